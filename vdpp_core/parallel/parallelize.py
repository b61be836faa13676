"""`parallelize`: run a denoiser on a lockstep group of ranks without changing its signature."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from vdpp_core.config.axes import AXIS_NAMES, LOCKSTEP_NAMES
from vdpp_core.models.patches import Patches
from vdpp_core.parallel import frames, guidance, sequence, tensor
from vdpp_core.parallel.fsdp import shard
from vdpp_core.parallel.group import Collectives, Group
from vdpp_core.parallel.process_groups import merged

APPLIED = "_parallelized"
# lockstep axis -> how it splits a forward pass
SPLITTERS = {"cfg": guidance.split, "frames": frames.split, "tp": tensor.split}


@dataclass
class Applied:
    """What `parallelize` did to a denoiser, kept on it under the name `APPLIED`."""

    patches: Patches
    groups: dict[str, Group]


def parallelize(unet: Any, mesh: DeviceMesh, fsdp: bool = False, calls_per_step: int = 1) -> Any:
    """Have the ranks of a mesh compute each forward pass together, in place: whole latents in, whole prediction out.

        pipe.unet = vdpp_core.parallelize(pipe.unet, Parallel(cfg=2, frames=2).mesh("cpu"))

    All ranks call the UNet with the same inputs and get the same prediction, within 1e-5 of a single rank's in fp32. On
    CUDA that needs torch.backends.cudnn.allow_tf32 = False; the default is True. For inference only: gradients do not
    flow through. `restore` undoes it.

    Args:
        unet: diffusers' `UNetSpatioTemporalConditionModel`, or the UNet or transformer of another pipeline. `frames`
            splits the UNets of SVD, AnimateDiff, text-to-video and I2VGen-XL, and transformers with a `_cp_plan`; `tp`
            the attention, feed-forward and resnets of all of them, of which each rank then holds a piece.
        mesh: from `Parallel.mesh`. Its lockstep axes split the forward pass; dp and pp are left to the caller.
        fsdp: also shard the parameters over all ranks of a stage that hold the same. `restore` does not undo this.
        calls_per_step: 2 where the pipeline calls the UNet once for each pass of the guidance (Wan). Pairs of calls
            are then split over cfg, and the first prediction of a pair is complete when the second call returns.

    Raises:
        ValueError: the mesh has other axes; the UNet is already parallelized; `frames` cannot split it.
            In a call of the UNet: fewer frames than ranks, or cfg 2 with a batch of only one pass.
    """
    if mesh.mesh_dim_names != AXIS_NAMES:
        raise ValueError(f"mesh {mesh.mesh_dim_names}: must be of Parallel.mesh, with the axes {', '.join(AXIS_NAMES)}")
    if hasattr(unet, APPLIED):
        raise ValueError(f"unet {type(unet).__name__}: is parallelized already, restore comes first")
    groups: dict[str, Group] = {
        axis: Collectives(mesh.get_group(axis)) for axis in LOCKSTEP_NAMES if mesh[axis].size() > 1
    }
    if "frames" in groups and (reason := sequence.refusal(unet, groups["frames"].size)):
        raise ValueError(f"frames {groups['frames'].size}: {reason}")
    patches = Patches()
    if pieces := tensor.pieces_of(unet):  # loaded in pieces
        groups["tp"] = next(iter(pieces.values())).group
    elif "tp" in groups:
        tensor.check({"unet": unet}, groups["tp"].size, mesh["frames"].size())
        tensor.split(unet, groups["tp"], patches)
    if fsdp:
        shard(unet, merged(mesh, "dp", *(axis for axis in LOCKSTEP_NAMES if axis != "tp")))
    split_forward(unet, {axis: group for axis, group in groups.items() if axis != "tp"}, calls_per_step, patches)
    setattr(unet, APPLIED, Applied(patches, groups))
    return unet


def restore(unet: Any) -> Any:
    """Undo `parallelize`, so that the UNet computes alone again. A UNet that was not parallelized stays as it is.

    With tp, all its ranks have to call this, because they gather the parameters from each other.

    Raises:
        ValueError: with tp and fsdp, whose parameters are not gathered.
    """
    if hasattr(unet, APPLIED):
        if tensor.pieces_of(unet) and isinstance(unet, FSDPModule):
            raise ValueError(f"unet {type(unet).__name__}: with tp and fsdp it stays in pieces, load it again")
        getattr(unet, APPLIED).patches.undo()
        delattr(unet, APPLIED)
    return unet


def sent(unet: Any) -> Counter[tuple[str, str, str]]:
    """Count (axis, layer, kind) -> bytes that this rank has sent for a UNet since it was parallelized.

    Kinds: see `vdpp_core.parallel.group.Group`. Empty for a UNet that is not parallelized.
    """
    groups = getattr(unet, APPLIED).groups if hasattr(unet, APPLIED) else {}
    return Counter({(axis, *key): count for axis, group in groups.items() for key, count in group.sent.items()})


def split_forward(
    unet: Any, groups: Mapping[str, Group], calls_per_step: int = 1, patches: Patches | None = None
) -> Patches:
    """Split a UNet's forward pass in place over the groups of its lockstep axes, innermost axis first."""
    patches, splitters = patches or Patches(), dict[str, Any](SPLITTERS)
    if calls_per_step == 2:
        splitters["cfg"] = guidance.split_calls
    if getattr(unet, "_cp_plan", None):
        splitters["frames"] = sequence.split
    for axis in reversed(LOCKSTEP_NAMES):
        if axis in groups:
            splitters[axis](unet, groups[axis], patches)
    return patches
