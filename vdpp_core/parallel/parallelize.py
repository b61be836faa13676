"""`parallelize`: one UNet over a lockstep group, its signature kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from vdpp_core.config.axes import AXIS_NAMES, LOCKSTEP_NAMES
from vdpp_core.models.patches import Patches
from vdpp_core.parallel import frames, guidance
from vdpp_core.parallel.fsdp import shard
from vdpp_core.parallel.group import Collectives, Group
from vdpp_core.parallel.process_groups import merged

APPLIED = "_parallelized"
SPLITTERS = {"cfg": guidance.split, "frames": frames.split}  # lockstep axis -> how it splits a forward pass


@dataclass
class Applied:
    """What `parallelize` did to a UNet."""

    patches: Patches
    groups: dict[str, Collectives]


def parallelize(unet: Any, mesh: DeviceMesh, fsdp: bool = False) -> Any:
    """Have the ranks of a mesh compute each forward pass together, in place: whole latents in, whole prediction out.

        pipe.unet = vdpp_core.parallelize(pipe.unet, Parallel(cfg=2, frames=2).mesh("cpu"))

    Every rank calls it with the same inputs and gets the same prediction, that of one rank within 1e-5 in fp32; on CUDA
    with torch.backends.cudnn.allow_tf32 off, which is on by default. For inference: no gradients come through.
    `restore` takes it back.

    Args:
        unet: diffusers' `UNetSpatioTemporalConditionModel`.
        mesh: of `Parallel.mesh`. Its axes cfg and frames split the pass; dp and pp are the caller's.
        fsdp: cut the parameters, too, over all ranks but those of other stages. That stays after `restore`.

    Raises:
        ValueError: the mesh has other axes; the UNet is parallelized already, or is no spatio-temporal one where
            `frames` asks for that; in a call: fewer frames than ranks, or a batch of one pass where cfg is 2.
    """
    from diffusers import UNetSpatioTemporalConditionModel

    if mesh.mesh_dim_names != AXIS_NAMES:
        raise ValueError(f"mesh {mesh.mesh_dim_names}: must be of Parallel.mesh, with the axes {', '.join(AXIS_NAMES)}")
    if hasattr(unet, APPLIED):
        raise ValueError(f"unet {type(unet).__name__}: is parallelized already, restore comes first")
    groups = {axis: Collectives(mesh.get_group(axis)) for axis in LOCKSTEP_NAMES if mesh[axis].size() > 1}
    if "frames" in groups and not isinstance(unet, UNetSpatioTemporalConditionModel):
        raise ValueError(f"unet {type(unet).__name__}: must be a UNetSpatioTemporalConditionModel to split by frames")
    if fsdp:
        shard(unet, merged(mesh, "dp", *LOCKSTEP_NAMES))
    setattr(unet, APPLIED, Applied(split_forward(unet, groups), groups))
    return unet


def restore(unet: Any) -> Any:
    """Undo `parallelize`: the UNet computes alone again, as it did before. Nothing happens to one that was not."""
    if hasattr(unet, APPLIED):
        getattr(unet, APPLIED).patches.undo()
        delattr(unet, APPLIED)
    return unet


def sent(unet: Any) -> Counter[tuple[str, str, str]]:
    """(axis, layer, kind) -> bytes that this rank has sent for a UNet's forward passes since it was parallelized.

    The kinds are those of `vdpp_core.parallel.group.Group`; nothing is sent for a UNet that is not parallelized.
    """
    groups = getattr(unet, APPLIED).groups if hasattr(unet, APPLIED) else {}
    return Counter({(axis, *key): count for axis, group in groups.items() for key, count in group.sent.items()})


def split_forward(unet: Any, groups: Mapping[str, Group]) -> Patches:
    """Split a UNet's forward pass in place over the groups of its lockstep axes, innermost axis first."""
    patches = Patches()
    for axis in reversed(LOCKSTEP_NAMES):
        if axis in groups:
            SPLITTERS[axis](unet, groups[axis], patches)
    return patches
