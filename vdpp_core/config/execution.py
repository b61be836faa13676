"""How a run executes on this machine: device type, element type, backend, threads."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil
import torch

from vdpp_core.config.run_config import RunConfig

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Execution:
    """A run's device settings with every `auto` resolved, for the ranks of this machine.

    Attributes:
        device_type: cuda, mps or cpu.
        dtype: element type of the UNet and the latents.
        backend: nccl or gloo.
        threads: CPU threads of each rank.
        local_ranks: ranks on this machine.
        cards: GPU indices of the local ranks; empty unless the device type is cuda.
    """

    device_type: str
    dtype: torch.dtype
    backend: str
    threads: int
    local_ranks: int
    cards: range

    @property
    def element_size(self) -> int:
        """Bytes per element of the UNet and the latents."""
        return self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """The element type as torch spells it: float32, float16 or bfloat16."""
        return str(self.dtype).removeprefix("torch.")


def resolve(config: RunConfig, local_ranks: int = 1) -> Execution:
    """Decide what every `auto` of a configuration means on this machine.

    `auto` is CUDA with fp16 and nccl where a CUDA device exists, else the CPU with fp32 and gloo. Each rank gets an
    equal share of the cores as threads. Other running jobs do not change that share, because the bits depend on it.
    """
    device_type, _, index = config.device.partition(":")
    if device_type == "auto":
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    on_cuda = device_type == "cuda"
    return Execution(
        device_type,
        DTYPES["fp16" if on_cuda else "fp32"] if config.dtype == "auto" else DTYPES[config.dtype],
        ("nccl" if on_cuda else "gloo") if config.backend == "auto" else config.backend,
        config.threads or max(1, cores() // local_ranks),
        local_ranks,
        range(int(index), int(index) + 1) if index else range(local_ranks if on_cuda else 0),
    )


def cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(cores_of(psutil.Process()))


def cores_of(process: psutil.Process) -> set[int]:
    """Indices of the CPU cores that a process may use."""
    if hasattr(process, "cpu_affinity"):
        return set(process.cpu_affinity() or ())
    return set(range(os.cpu_count() or 1))
