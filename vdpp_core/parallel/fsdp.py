"""Parameters cut over ranks and gathered piece by piece while they are needed: PyTorch's `fully_shard` (FSDP2)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from vdpp_core import models
from vdpp_core.config import RunConfig
from vdpp_core.models import weights
from vdpp_core.parallel.fsdp_units import units
from vdpp_core.parallel.world import communication

# PyTorch 2.13 gave it a new name and warns of the old one
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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
    for piece in chain:
        piece.set_custom_all_gather(AllGather())  # type: ignore[arg-type]
    for piece, following in itertools.pairwise(chain):
        piece.set_modules_to_forward_prefetch([following])
    return unet


def structure(config: RunConfig, mesh: DeviceMesh, dtype: torch.dtype) -> Any:
    """The UNet of a run, sharded, on the meta device."""
    return models.ready(config, shard(models.on_meta(config, dtype), mesh, config.fsdp_cpu_offload))


@torch.no_grad()
def materialise(unet: Any, config: RunConfig, mesh: DeviceMesh, device: torch.device, dtype: torch.dtype) -> Any:
    """Give a `structure` its values. No rank ever holds more than its shards and the tensor that is being read.

    Of a stored model only the rank's own rows are read; random weights are drawn layer by layer.
    """
    unet.to_empty(device="cpu" if config.fsdp_cpu_offload else device)
    if config.model == "dummy" or config.random_weights:
        source: Iterator[tuple[str, Any]] = weights.random(models.on_meta(config, dtype), device)
    else:
        from vdpp_core.models.svd import weights_folder

        source = weights.stored(weights_folder(config, dtype), dtype)
    parameters = dict(unet.named_parameters())
    for name, rows in source:
        _copy_own_rows(parameters[name], rows, mesh)
    return unet


def release(unet: Any) -> None:
    """Give back the memory of a UNet, whole or sharded, at once. It computes nothing afterwards.

    To drop it is not enough: patched forward passes and FSDP2's hooks refer to it in circles, and its memory would stay
    until the collector happens to find them.
    """
    for module in unet.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for tensor in [*unet.parameters(), *unet.buffers()]:
        if isinstance(tensor, DTensor):
            tensor.to_local().untyped_storage().resize_(0)
        else:
            tensor.data = tensor.new_empty(0)


def _copy_own_rows(parameter: DTensor, rows: Any, mesh: DeviceMesh) -> None:
    """FSDP2 cuts the first dimension into pieces of ⌈rows / ranks⌉; the last ranks may have less, or nothing."""
    own = parameter.to_local()
    most = -(-parameter.shape[0] // mesh.size())
    first = min(mesh.get_local_rank() * most, parameter.shape[0])
    if own.shape[0]:
        own.copy_(rows[first : first + own.shape[0]])


class AllGather:
    """What FSDP2 gathers with. A failure is that of a lost rank.

    On a CPU: a broadcast from each rank, in place. gloo's own all-gather holds a second copy of what it gathers.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        ranks = dist.get_world_size(group)
        if ranks == 1:  # FSDP2 has put the only shard in its place
            return None
        with communication():
            if output_tensor.device.type != "cpu":
                return gather(output_tensor, input_tensor, group=group, async_op=async_op)
            for rank, part in enumerate(output_tensor.chunk(ranks)):
                dist.broadcast(part, group=group, group_src=rank)
        return None
