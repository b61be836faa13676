"""CFG parallelism: two ranks run one pass each of classifier-free guidance and exchange their predictions.

Classifier-free guidance: Ho and Salimans 2022. Some pipelines stack the unconditional and the conditional pass in one
batch; others call the denoiser once for each.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from vdpp_core.models.patches import Patches
from vdpp_core.models.stand_ins import moved, replaced, sample_of
from vdpp_core.parallel.group import Group

Call = tuple[tuple, dict[str, Any]]


def split(denoiser: nn.Module, group: Group, patches: Patches) -> None:
    """Have each of the two ranks of `group` compute one half of the batch: whole latents in, whole prediction out.

    For pipelines that stack both passes. They are independent in every layer, so one exchange per step is enough. The
    caller combines the passes, as before.
    """
    assert group.size == 2
    compute = denoiser.forward

    @torch.no_grad()
    def forward(*args: Any, **kwargs: Any) -> Any:
        batch = len(sample_of(args, kwargs))
        if batch % 2:
            raise ValueError(f"batch {batch}: cfg 2 splits the two passes of the guidance, which is off: use cfg 1")
        pass_args, pass_kwargs = _passes(args, kwargs)[group.rank]
        made = compute(*pass_args, **pass_kwargs)
        return replaced(made, lambda half: group.all_gather(half, "", "guidance").flatten(0, 1))

    patches.forward(denoiser, forward)


def split_calls(denoiser: nn.Module, group: Group, patches: Patches) -> None:
    """Have each of the two ranks of `group` compute every other call, for pipelines that call once for each pass.

    A call that the other rank computes returns NaNs, and the second call of a pair fills both predictions in. Pipelines
    read neither before. Of the first pair with latents of a shape, both ranks compute both, to learn what a call
    returns.
    """
    assert group.size == 2
    compute = denoiser.forward
    known: dict[torch.Size, Any] = {}  # shape of the latents -> what a call returns, on the meta device
    pair: list[Any] = []
    if isinstance(denoiser, FSDPModule):
        denoiser.set_modules_to_forward_prefetch([])  # a call that is not computed must not gather anything

    @torch.no_grad()
    def forward(*args: Any, **kwargs: Any) -> Any:
        sample = sample_of(args, kwargs)
        alone = sample.shape not in known
        if alone or len(pair) == group.rank:
            made = compute(*args, **kwargs)
        else:
            made = replaced(known[sample.shape], lambda like: torch.full_like(like, math.nan, device=sample.device))
        pair.append(made)
        if len(pair) == 2:
            if alone:
                known[sample.shape] = moved(made, torch.device("meta"))
            else:
                own, other = pair[group.rank][0], pair[1 - group.rank][0]
                other.copy_(group.all_gather(own, "", "guidance")[1 - group.rank])
            pair.clear()
        return made

    patches.forward(denoiser, forward)


def one_after_the_other(denoiser: nn.Module) -> None:
    """Have a denoiser compute the two halves of its batch, the passes of the guidance, one after the other."""
    compute = denoiser.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        first, second = (compute(*pass_args, **pass_kwargs) for pass_args, pass_kwargs in _passes(args, kwargs))
        others = iter(tree_leaves(second))
        return replaced(first, lambda half: torch.cat([half, next(others)]))

    Patches().forward(denoiser, forward)


def _passes(args: tuple, kwargs: dict[str, Any]) -> list[Call]:
    """The arguments of each pass: half of every tensor with one entry, or several, for each item of the batch.

    AnimateDiff repeats the text for every frame. A positional embedding (tokens, width) may happen to have a multiple
    of the batch, so several entries count only in tensors of three or more dimensions.
    """
    batch = len(sample_of(args, kwargs))

    def half(number: int, value: Tensor) -> Tensor:
        batched = value.ndim > 0 and (len(value) == batch or (value.ndim > 2 and len(value) % batch == 0))
        return value.chunk(2)[number] if batched else value

    return [replaced((args, kwargs), partial(half, number)) for number in range(2)]
