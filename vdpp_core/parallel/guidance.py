"""CFG parallelism: two ranks run one pass each of classifier-free guidance and exchange their predictions.

Classifier-free guidance: Ho and Salimans 2022.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vdpp_core.models.patches import Patches, as_asked
from vdpp_core.parallel.group import Group


def split(unet: nn.Module, group: Group, patches: Patches) -> None:
    """Have each of the two ranks of `group` compute one half of the batch: whole latents in, whole prediction out.

    The pipeline stacks the unconditional and the conditional pass in one batch. They are independent in every layer, so
    one exchange per step is enough. The caller combines the passes, as before.
    """
    assert group.size == 2
    compute = unet.forward

    @torch.no_grad()
    def forward(
        sample: Tensor, timestep: Any, encoder_hidden_states: Tensor, added_time_ids: Tensor, return_dict: bool = True
    ) -> Any:
        batch = sample.shape[0]
        if batch % 2:
            raise ValueError(f"batch {batch}: cfg 2 splits the two passes of the guidance, which is off: use cfg 1")
        own = slice(group.rank * batch // 2, (group.rank + 1) * batch // 2)
        inputs = sample[own], timestep, encoder_hidden_states[own], added_time_ids[own]
        prediction = compute(*inputs, return_dict=False)[0]
        return as_asked(group.all_gather(prediction, "", "guidance").flatten(0, 1), return_dict)

    patches.forward(unet, forward)
