"""Fused attention with batches larger than its kernels accept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from vdpp_core.models.patches import Patches

# CUDA numbers the blocks of a grid with 16 bits in all dimensions but the first. The batch of temporal attention is all
# positions: 92 160 at 160 × 288 with both guidance passes, where several backends have failed.
MOST = 2**16 - 1


class InTurns(TorchFunctionMode):
    """Compute attention over more than `most` batch rows in parts. Each row's result stays bit-equal."""

    def __init__(self, most: int = MOST) -> None:
        super().__init__()
        self.most = most

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or args[0].shape[0] <= self.most:
            return func(*args, **kwargs)
        query, key, value = args
        assert kwargs.get("attn_mask") is None, "the UNet's attention has no mask"
        result = torch.empty_like(query)
        for part, *given in zip(*(tensor.split(self.most) for tensor in (result, query, key, value)), strict=True):
            part.copy_(func(*given, **kwargs))
        return result


def take_turns(unet: Any) -> Patches:
    """Have a UNet compute attention in parts where the batch is too large."""
    patches = Patches()
    patches.forward(unet, partial(_in_turns, unet.forward))
    return patches


def _in_turns(compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with InTurns():
        return compute(*args, **kwargs)
