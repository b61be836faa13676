"""Process groups along the axes of a mesh, each with the time limit of the default group.

`init_device_mesh` and `DeviceMesh._flatten` give groups PyTorch's default limit: 10 minutes (NCCL) or 30 (gloo) after
an operation is enqueued. That is too short for a receive posted ahead, or for a rank that waits for a download.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vdpp_core.config.errors import ConfigError


def time_limit(group: dist.ProcessGroup | None = None) -> timedelta | None:
    """How long an operation of a group (by default, the default group) may take. None if its backend has no limit."""
    group = group or dist.group.WORLD
    assert group is not None, "init_process_group comes first"
    options = [getattr(group._get_backend(device), "options", None) for device in group._device_types]
    return min((each._timeout for each in options if each is not None), default=None)


def make_mesh(device_type: str, sizes: Sequence[int], axes: Sequence[str]) -> DeviceMesh:
    """Build a mesh of all ranks, outermost axis first. All ranks have to call it.

    Raises:
        ConfigError: the sizes are those of another number of ranks.
    """
    if (count := dist.get_world_size()) != math.prod(sizes):
        words = " × ".join(f"{axis} {size}" for axis, size in zip(axes, sizes, strict=True) if size > 1)
        raise ConfigError("world_size", count, f"must be {math.prod(sizes)} for a mesh of {words or '1 rank'}")
    ranks = torch.arange(count, dtype=torch.int).view(*sizes)
    groups = [_group_of_own(_lines(ranks, [dim]), axis) for dim, axis in enumerate(axes)]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=tuple(axes))


def merged(mesh: DeviceMesh, *axes: str) -> DeviceMesh:
    """Build the one-dimensional mesh of ranks that differ only in these axes. All ranks have to call it."""
    assert mesh.mesh_dim_names is not None
    lines = _lines(mesh.mesh, [mesh.mesh_dim_names.index(axis) for axis in axes])
    return mesh_of(lines, mesh.device_type, "_".join(axes))


def mesh_of(lines: Sequence[list[int]], device_type: str, name: str) -> DeviceMesh:
    """Build the one-dimensional mesh of the line that has this rank in it. All ranks have to call it."""
    return DeviceMesh.from_group(_group_of_own(lines, name), device_type, mesh_dim_names=(name,))


def _lines(ranks: torch.Tensor, dims: Sequence[int]) -> list[list[int]]:
    """The ranks of each group that differ only in these dimensions."""
    last = range(ranks.ndim - len(dims), ranks.ndim)
    size = torch.Size([ranks.shape[dim] for dim in dims]).numel()
    return ranks.movedim(list(dims), list(last)).reshape(-1, size).tolist()


def _group_of_own(lines: Sequence[list[int]], name: str) -> dist.ProcessGroup:
    """Create all groups and return this rank's. For a group of all ranks reuse the default group's communicator."""
    world = dist.group.WORLD
    assert world is not None, "init_process_group comes first"
    if len(lines) == 1:
        return world
    limit, own = time_limit(), None
    for line in lines:
        group = dist.new_group(line, timeout=limit, group_desc=name)
        if dist.get_rank() in line:
            own = group
    assert isinstance(own, dist.ProcessGroup)
    return own
