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
    def forward(sample: Tensor, *args: Any, return_dict: bool = True, **kwargs: Any) -> Any:
        if len(sample) % 2:
            raise ValueError(
                f"batch {len(sample)}: cfg 2 splits the two passes of the guidance, which is off: use cfg 1"
            )
        passes, named = _passes(sample, args, kwargs)[group.rank]
        prediction = compute(*passes, **named, return_dict=False)[0]
        return as_asked(group.all_gather(prediction, "", "guidance").flatten(0, 1), return_dict)

    patches.forward(unet, forward)


def one_after_the_other(unet: nn.Module) -> None:
    """Have a UNet compute the two halves of its batch, which are the passes of the guidance, one after the other."""
    compute = unet.forward

    def forward(sample: Tensor, *args: Any, return_dict: bool = True, **kwargs: Any) -> Any:
        halves = [compute(*passes, **named, return_dict=False)[0] for passes, named in _passes(sample, args, kwargs)]
        return as_asked(torch.cat(halves), return_dict)

    Patches().forward(unet, forward)


def _passes(sample: Tensor, args: tuple, kwargs: dict[str, Any]) -> list[tuple[tuple, dict[str, Any]]]:
    """The arguments of each pass: half of every tensor with one entry for each item of the batch."""

    def half(value: Any, number: int) -> Any:
        batched = isinstance(value, Tensor) and value.ndim > 0 and len(value) == len(sample)
        return value.chunk(2)[number] if batched else value

    return [
        (tuple(half(value, number) for value in (sample, *args)), {k: half(v, number) for k, v in kwargs.items()})
        for number in range(2)
    ]
