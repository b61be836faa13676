"""Sharded parameters, gathered unit by unit while they are needed: PyTorch's `fully_shard` (FSDP2).

FSDP: Zhao et al. 2023; the idea is stage 3 of ZeRO: Rajbhandari et al. 2020.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from vdpp_core.parallel.fsdp_units import units
from vdpp_core.parallel.world import communication

# PyTorch 2.13 renamed it and warns about the old name
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def shard(denoiser: Any, mesh: DeviceMesh, cpu_offload: bool = False) -> Any:
    """Shard a denoiser in place over the ranks of a one-dimensional mesh. Its forward pass stays bit-equal.

    Parameters are gathered and used in the type they have. Inputs are not cast, because the timestep is fp32 whatever
    the model's type. Call it under no_grad, not inference_mode: FSDP2 reads version counters, which inference
    tensors lack.
    """
    policies: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
    }
    pieces = [fully_shard(piece, **policies) for piece in units(denoiser)]
    chain: list[FSDPModule] = [fully_shard(denoiser, **policies), *pieces]
    for piece in chain:
        piece.set_custom_all_gather(AllGather())  # type: ignore[arg-type]
    for piece, following in itertools.pairwise(chain):
        piece.set_modules_to_forward_prefetch([following])
    return denoiser


def release(denoiser: nn.Module) -> None:
    """Free the memory of a denoiser, or several, whole or sharded, at once. It cannot compute afterwards.

    Dropping the last reference would not do: patched forward passes and FSDP2's hooks form reference cycles, which keep
    the memory until the garbage collector runs.
    """
    for module in denoiser.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for tensor in [*denoiser.parameters(), *denoiser.buffers()]:
        if isinstance(tensor, DTensor):
            tensor.to_local().untyped_storage().resize_(0)
        else:
            tensor.data = tensor.new_empty(0)


class AllGather:
    """FSDP2's all-gather, with failures reported as `LostRankError`.

    On a CPU it broadcasts from each rank in place, because gloo's all-gather holds a second copy of the result.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the output buffer, as FSDP2 asks for it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        ranks = dist.get_world_size(group)
        if ranks == 1:  # FSDP2 has already copied the only shard
            return None
        with communication():
            if output_tensor.device.type != "cpu":
                return gather(output_tensor, input_tensor, group=group, async_op=async_op)
            for rank, part in enumerate(output_tensor.chunk(ranks)):
                dist.broadcast(part, group=group, group_src=rank)
        return None
