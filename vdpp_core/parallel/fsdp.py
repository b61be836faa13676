"""Parameters cut over ranks and gathered piece by piece while they are needed: PyTorch's `fully_shard` (FSDP2)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from vdpp_core import unets
from vdpp_core.config import RunConfig
from vdpp_core.limits import is_out_of_memory
from vdpp_core.mesh import LostRankError
from vdpp_core.unets import weights
from vdpp_core.unets.units import units


def shard(unet: Any, mesh: DeviceMesh, cpu_offload: bool = False) -> Any:
    """Cut a UNet over the ranks of a one-dimensional mesh, in place. Its forward pass stays what it was, bit for bit.

    Parameters stay in the type that they have: that is what is gathered and computed in (MixedPrecisionPolicy's
    `param_dtype` at its default). Inputs are not cast, since the timestep is fp32 whatever the UNet is.
    Call it under no_grad, not inference_mode: FSDP2 looks at version counters, which inference tensors lack.
    """
    policies: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
    }
    pieces = [fully_shard(piece, **policies) for piece in units(unet)]
    chain: list[FSDPModule] = [fully_shard(unet, **policies), *pieces]
    for piece, following in itertools.pairwise(chain):
        piece.set_modules_to_forward_prefetch([following])
    return unet


@torch.no_grad()
def load(config: RunConfig, mesh: DeviceMesh, device: torch.device, dtype: torch.dtype) -> Any:
    """The UNet of a run, sharded. No rank ever holds more than its shards and the tensor that is being read.

    Of a stored model only the rank's own rows are read; random weights are drawn layer by layer.
    """
    unet = unets.ready(config, shard(unets.on_meta(config, dtype), mesh, config.fsdp_cpu_offload))
    unet.to_empty(device="cpu" if config.fsdp_cpu_offload else device)
    if config.model == "dummy" or config.random_weights:
        source: Iterator[tuple[str, Any]] = weights.random(unets.on_meta(config, dtype), device)
    else:
        from vdpp_core.unets.svd import weights_folder

        source = weights.stored(weights_folder(config, dtype), dtype)
    parameters = dict(unet.named_parameters())
    for name, rows in source:
        _copy_own_rows(parameters[name], rows, mesh)
    return unet


def _copy_own_rows(parameter: DTensor, rows: Any, mesh: DeviceMesh) -> None:
    """FSDP2 cuts the first dimension into pieces of ⌈rows / ranks⌉; the last ranks may have less, or nothing."""
    own = parameter.to_local()
    most = -(-parameter.shape[0] // mesh.size())
    first = min(mesh.get_local_rank() * most, parameter.shape[0])
    if own.shape[0]:
        own.copy_(rows[first : first + own.shape[0]])


@contextmanager
def gathering() -> Iterator[None]:
    """A failure of the communication inside FSDP is that of a lost rank; all others stay what they are."""
    try:
        yield
    except RuntimeError as error:
        trace, innermost = error.__traceback__, ""
        while trace is not None:
            innermost, trace = trace.tb_frame.f_globals.get("__name__", ""), trace.tb_next
        if not innermost.startswith("torch.distributed") or is_out_of_memory(error):
            raise
        raise LostRankError("unknown", str(error).splitlines()[0]) from error
