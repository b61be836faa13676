"""The axes of a lockstep group, one inside the other: each pass of the guidance split by frames."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vdpp_core.parallel import frames, guidance
from vdpp_core.parallel.group import Group
from vdpp_core.unets.patches import Patches


def split(unet: Any, groups: Mapping[str, Group]) -> Patches:
    """Split a UNet's forward pass, in place, over the groups that there are of the axes cfg and frames."""
    patches = Patches()
    if "frames" in groups:
        frames.split(unet, groups["frames"], patches)
    if "cfg" in groups:
        guidance.split(unet, groups["cfg"], patches)
    return patches
