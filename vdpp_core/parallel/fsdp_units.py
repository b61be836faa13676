"""The units of a denoiser for FSDP: the modules whose parameters are gathered together."""

from __future__ import annotations

import itertools
from typing import Any

from torch import nn

LAYERS = ("resnets", "temp_convs", "attentions", "temp_attentions", "motion_modules")  # of UNets' blocks


def units(denoiser: Any) -> list[nn.Module]:
    """List a UNet's layers, or a transformer's blocks and the layers around them, in execution order.

    Whole blocks of a UNet would be too large: up_blocks.1 alone holds 0.98 of the published SVD's 3.05 GB in fp16.
    Samplers are included because parameters outside all units stay gathered throughout the forward pass.
    """
    if not hasattr(denoiser, "down_blocks"):
        names = (getattr(denoiser, name, None) or () for name in ("_no_split_modules", "_repeated_blocks"))
        return _outermost(denoiser, {*itertools.chain(*names)})
    found: list[nn.Module] = [denoiser.transformer_in] if hasattr(denoiser, "transformer_in") else []
    for block in (*denoiser.down_blocks, denoiser.mid_block, *denoiser.up_blocks):
        groups = itertools.zip_longest(*(getattr(block, name, None) or [] for name in LAYERS))
        found += [module for group in groups for module in group if module is not None]
        for name in ("downsamplers", "upsamplers"):
            found += getattr(block, name, None) or []
    return found


def _outermost(module: nn.Module, blocks: set[str]) -> list[nn.Module]:
    """The outermost modules of these classes, and what has parameters beside them."""
    found: list[nn.Module] = []
    for child in module.children():
        inside = any(type(part).__name__ in blocks for part in child.modules())
        if inside and type(child).__name__ not in blocks:
            found += _outermost(child, blocks)
        elif any(True for _ in child.parameters()):
            found.append(child)
    return found
