"""What this machine's devices can do, and how to recognise that their memory is full."""

from __future__ import annotations

import errno
import re
import sys

import psutil
import torch

from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.execution import Execution

AMPERE = (8, 0)  # the first compute capability with bf16 arithmetic
GIB = 2**30


def capacity(config: RunConfig, execution: Execution) -> int:
    """Bytes that each rank on this machine may use: the run's limit, the memory of the smallest GPU in use, Metal's
    recommended maximum, or an equal share of the free memory of a CPU."""
    if config.memory_limit_gib is not None:
        return int(config.memory_limit_gib * GIB)
    if execution.device_type == "cuda":
        return min(torch.cuda.get_device_properties(card).total_memory for card in execution.cards)
    if execution.device_type == "mps":
        return torch.mps.recommended_max_memory()
    return psutil.virtual_memory().available // execution.local_ranks


def check_device(config: RunConfig, execution: Execution) -> None:
    """Check that device and backend exist here and serve this many ranks.

    Raises:
        ConfigError: they do not.
    """
    kind, local_ranks = execution.device_type, execution.local_ranks
    if kind == "cuda":
        gpus = torch.cuda.device_count()
        if not gpus:
            raise ConfigError("device", config.device, "no CUDA device here: use cpu or auto")
        if ":" in config.device and execution.cards[0] >= gpus:
            raise ConfigError("device", config.device, f"must be below cuda:{gpus}, this machine has {gpus}")
        if local_ranks > gpus:
            raise ConfigError("world_size", local_ranks, f"must be at most the GPUs of this machine, {gpus}")
        if local_ranks > 1 and ":" in config.device:
            raise ConfigError("device", config.device, "must be cuda with several ranks: the local rank picks the GPU")
        if config.backend == "gloo" and config.layout.world_size > 1:
            raise ConfigError("backend", "gloo", "must be nccl or auto with several ranks on CUDA: gloo is for CPUs")
    if kind == "mps":
        if not torch.backends.mps.is_available():
            raise ConfigError("device", config.device, "no Apple GPU here: use cpu or auto")
        if local_ranks > 1:
            raise ConfigError("device", config.device, "serves one rank only")
    if kind != "cuda" and config.backend == "nccl":
        raise ConfigError("backend", "nccl", f"needs CUDA devices; on {kind} use gloo or auto")


def check_memory_options(config: RunConfig, execution: Execution) -> None:
    """Check that a memory limit and CPU offload work on this type of device.

    Raises:
        ConfigError: they do not.
    """
    kind = execution.device_type
    if config.memory_limit_gib is not None and not can_limit(kind):
        raise ConfigError("memory_limit_gib", config.memory_limit_gib, f"needs CUDA, or a CPU under Linux; not {kind}")
    if config.fsdp_cpu_offload and kind != "cuda":
        raise ConfigError("fsdp_cpu_offload", True, f"needs CUDA: on {kind} the shards are in the host's memory anyway")
    if config.swap == "host" and kind != "cuda":
        allowed = f"needs CUDA: on {kind} the experts would be in the host's memory anyway; use disk"
        raise ConfigError("swap", "host", allowed)


def check_dtype(config: RunConfig, execution: Execution) -> None:
    """Check that the devices compute in the element type.

    Raises:
        ConfigError: they do not.
    """
    if execution.device_type == "cuda" and execution.dtype == torch.bfloat16:
        _check_bf16(config, execution.cards)
    elif execution.device_type == "cpu" and execution.dtype != torch.float32:
        _try_on_cpu(config, execution.dtype)


def _check_bf16(config: RunConfig, cards: range) -> None:
    """PyTorch accepts bf16 on older GPUs, too, but emulates it, as far as it has kernels at all."""
    for card in cards:
        capability = torch.cuda.get_device_capability(card)
        if capability < AMPERE:
            known = f"{torch.cuda.get_device_name(card)}, compute capability {'.'.join(map(str, capability))}"
            raise ConfigError("dtype", config.dtype, f"must be fp16 or fp32: cuda:{card} ({known}) only emulates bf16")


@torch.no_grad()
def _try_on_cpu(config: RunConfig, dtype: torch.dtype) -> None:
    """Try each kind of operation in the UNet; some CPU builds lack them in half precision."""
    try:
        values = torch.ones(1, 4, 2, 4, 4, dtype=dtype)
        values = torch.nn.functional.conv3d(values, torch.ones(4, 4, 3, 1, 1, dtype=dtype), padding=(1, 0, 0))
        values = torch.nn.functional.group_norm(values, 2).flatten(2)
        torch.nn.functional.scaled_dot_product_attention(values, values, values)
    except RuntimeError as error:
        allowed = f"must be fp32, this CPU cannot ({str(error).splitlines()[0]})"
        raise ConfigError("dtype", config.dtype, allowed) from None


# Error messages of a lack of memory, by their source. oneDNN gives no reason for a failure, except that unsupported
# operations fail at their descriptor.
_FULL = re.compile(
    r"(^|: |\b(CUDA|HIP|XPU|MPS backend|C10) |Cuda failure (\d+ )?')out of memory"  # PyTorch's allocators, CUDA, NCCL
    r"|Failed to (CUDA )?(malloc|calloc|calloc async|host alloc) \d+ bytes"  # NCCL
    r"|_ALLOC(ATION)?_FAILED"  # cuBLAS, cuDNN
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory|bad_alloc|cannot allocate memory"  # the CPU
    r"|could not (create|execute) a primitive(?! descriptor)|could not create a memory object",  # oneDNN
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of PyTorch, Python, the system or a library means a lack of memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_FULL.search(str(error)))


def can_limit(device_type: str) -> bool:
    """Whether a memory limit can be enforced here on this type of device."""
    return device_type == "cuda" or (device_type == "cpu" and sys.platform == "linux")
