"""Denoisers loaded in part: a rank's shards of FSDP, its pieces of tensor parallelism. None ever holds a whole one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vdpp_core import models
from vdpp_core.config import ConfigError, RunConfig
from vdpp_core.models import weights
from vdpp_core.models.patches import Patches
from vdpp_core.parallel import tensor
from vdpp_core.parallel.fsdp import shard
from vdpp_core.parallel.group import Group


def load(
    config: RunConfig,
    device: torch.device,
    dtype: torch.dtype,
    only: Sequence[str] | None,
    mesh: DeviceMesh | None = None,
    tp: Group | None = None,
    structured: Callable[[], None] = lambda: None,
) -> nn.ModuleDict:
    """Load the denoisers of a run, or some of them: this rank's part, where they are sharded or cut.

    Args:
        mesh: of the ranks that share parameters.
        tp: the ranks that split the layers.
        structured: called before anything is read, where only a part is loaded.
    """
    if mesh is None and tp is None:
        return nn.ModuleDict(models.load_denoisers(config, device, dtype, only))
    made = structure(config, dtype, only, mesh, tp)
    structured()
    materialise(made, config, device, dtype, mesh)
    return made


def structure(
    config: RunConfig,
    dtype: torch.dtype,
    only: Sequence[str] | None = None,
    mesh: DeviceMesh | None = None,
    tp: Group | None = None,
) -> nn.ModuleDict:
    """Make the denoisers of a run, or some of them, on the meta device, without values, cut and sharded."""
    made = models.skeletons(config, dtype, only)
    for denoiser in made.values():
        if config.is_svd:
            models.ready(config, denoiser)
        if tp is not None:  # after the shortcuts, which know nothing of other ranks
            tensor.split(denoiser, tp, Patches())
        if mesh is not None:
            shard(denoiser, mesh, config.fsdp_cpu_offload)
    return nn.ModuleDict(made)


@torch.no_grad()
def materialise(
    denoisers: nn.ModuleDict,
    config: RunConfig,
    device: torch.device,
    dtype: torch.dtype,
    mesh: DeviceMesh | None = None,
) -> None:
    """Fill denoisers from `structure` with their weights. No rank ever holds more than its part and one more layer.

    Of a stored model only the rank's own rows, heads, columns and channels are read; random weights are drawn layer by
    layer.

    Raises:
        ConfigError: a parameter is not stored.
    """
    home = torch.device("cpu") if config.fsdp_cpu_offload else device
    for part, denoiser in denoisers.items():
        denoiser._apply(lambda one: torch.empty_like(one, device=home) if one.is_meta else one.to(device))
        parameters, pieces = dict(denoiser.named_parameters()), tensor.pieces_of(denoiser)
        targets: dict[str, Tensor] = parameters | dict(denoiser.named_buffers())
        for name, rows in _source(config, part, device, dtype):
            target, piece = targets.get(name), pieces.get(name)
            parameters.pop(name, None)
            if piece is not None:
                rows = piece.of(rows)
            if isinstance(target, DTensor):
                assert mesh is not None
                _copy_own_rows(target, rows, mesh)
            elif target is not None:
                target.copy_(rows[:])
        if parameters:
            absent = next(iter(parameters))
            raise ConfigError(*config.model_argument, f"must have all weights of {part}: {absent} is missing")


def _source(config: RunConfig, part: str, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    if config.model == "dummy" or config.random_weights:
        return weights.random(models.on_meta(config, dtype, part), device)
    from vdpp_core.models.svd import weights_folder

    return weights.stored(weights_folder(config, dtype, part), dtype)


def _copy_own_rows(parameter: DTensor, rows: Any, mesh: DeviceMesh) -> None:
    """FSDP2 cuts the first dimension into pieces of ⌈rows / ranks⌉; the last ranks may have fewer rows or none."""
    own = parameter.to_local()
    most = -(-parameter.shape[0] // mesh.size())
    first = min(mesh.get_local_rank() * most, parameter.shape[0])
    if own.shape[0]:
        own.copy_(rows[first : first + own.shape[0]])
