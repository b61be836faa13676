"""The pieces of a UNet whose parameters are gathered together, in the order of execution."""

from __future__ import annotations

import itertools
from typing import Any

from torch import nn


def units(unet: Any) -> list[nn.Module]:
    """Every resnet, transformer, down- and upsampler of SVD's UNet; of another network, its layers.

    Whole blocks would be too much at once: of the published UNet's 3.05 GB in fp16, up_blocks.1 alone holds 0.98. The
    samplers are here, too, since what belongs to no unit stays gathered throughout the forward pass.
    """
    if not hasattr(unet, "down_blocks"):
        return list(unet.children())
    found: list[nn.Module] = []
    for block in (*unet.down_blocks, unet.mid_block, *unet.up_blocks):
        pairs = itertools.zip_longest(block.resnets, getattr(block, "attentions", []))
        found += [module for pair in pairs for module in pair if module is not None]
        for name in ("downsamplers", "upsamplers"):
            found += getattr(block, name, None) or []
    return found
