"""What a run's `auto` means on this machine: device, element type, backend, threads."""

from __future__ import annotations

import os

import psutil
import torch

from vdpp_core.config import RunConfig

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def device_type(config: RunConfig) -> str:
    """cuda, mps or cpu; `auto` takes CUDA where there is some, else the CPU."""
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device.partition(":")[0]


def dtype(config: RunConfig) -> torch.dtype:
    """The element type of UNet and latents; `auto` is fp16 on CUDA and fp32 elsewhere."""
    if config.dtype == "auto":
        return torch.float16 if device_type(config) == "cuda" else torch.float32
    return DTYPES[config.dtype]


def element_size(config: RunConfig) -> int:
    """Bytes of a value of UNet and latents."""
    return torch.empty(0, dtype=dtype(config)).element_size()


def backend(config: RunConfig) -> str:
    """nccl or gloo; `auto` is nccl on CUDA and gloo elsewhere."""
    if config.backend == "auto":
        return "nccl" if device_type(config) == "cuda" else "gloo"
    return config.backend


def cards(config: RunConfig, local_ranks: int) -> range:
    """The numbers of the GPUs that so many ranks on this machine use: the one that was named, or one each."""
    named = config.device.partition(":")[2]
    return range(int(named), int(named) + 1) if named else range(local_ranks)


def cores() -> int:
    """Cores that this process may use."""
    return len(cores_of(psutil.Process()))


def cores_of(process: psutil.Process) -> set[int]:
    if hasattr(process, "cpu_affinity"):
        return set(process.cpu_affinity() or ())
    return set(range(os.cpu_count() or 1))


def threads(config: RunConfig, local_ranks: int) -> int:
    """CPU threads of each of so many ranks on this machine: its share of the cores. Other runs do not change it, since
    the bits depend on it."""
    return config.threads or max(1, cores() // local_ranks)
