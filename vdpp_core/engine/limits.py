"""Devices that are smaller on purpose, and what is known when one is full."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch
from torch import nn

from vdpp_core.parallel.devices import GIB, is_out_of_memory

_POWERS = {unit: 2 ** (10 * power) for power, unit in enumerate("bKMGTPE")}  # MPS writes GB for what others write GiB
_REQUEST = re.compile(r"(?:alloc|allocate|async|mmap) ([\d.]+) ?(b|[KMGTPE])(?:ytes|i?B)\b")


class OutOfMemoryError(RuntimeError):
    """A rank ran out of memory: a result, not a fault. `facts` has requested_gb, free_gb, limit_gib, layer, phase."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        words = [f"out of memory while {facts['phase']}"]
        if facts["requested_gb"] is not None:
            words.append(f"asked for {facts['requested_gb']:.3f} GB")
        words.append(f"{facts['free_gb']:.3f} GB were free")
        if facts["limit_gib"] is not None:
            words[-1] += f" of the limit of {facts['limit_gib']:g} GiB"
        if facts["layer"]:
            words.append(f"in {facts['layer']}")
        super().__init__(", ".join(words))


class Device:
    """What a rank may use of its device; the whole of it where `limit_gib` is None.

    CUDA: the share of the card that PyTorch's allocator may reserve; the context is not in it. CPU: what the process
    may hold in private memory beyond what it holds now (RLIMIT_DATA, which Linux alone keeps).
    """

    def __init__(self, device: torch.device, limit_gib: float | None) -> None:
        self.device, self.limit_gib = device, limit_gib

    @contextmanager
    def limited(self) -> Iterator[None]:
        """The limit holds in here."""
        if self.limit_gib is None:
            yield
            return
        before = self._set(self.limit_gib * GIB)
        try:
            yield
        finally:
            self._restore(before)

    def _set(self, limit: float) -> Any:
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), self.device)
            return None
        torch.ones(2**20).add_(1)  # OpenMP makes its threads now: it ends a process that has no room for their stacks
        before = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (_private_memory() + int(limit), before[1]))
        return before

    def _restore(self, before: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)
        else:
            resource.setrlimit(resource.RLIMIT_DATA, before)

    def _lift(self) -> int | None:
        """End a CPU's limit; what it was."""
        if self.limit_gib is None or self.device.type != "cpu":
            return None
        limit, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        return limit

    def free(self, lifted: int | None = None) -> int:
        """Bytes that are left, inside `limited` those of the limit, also of one that was lifted."""
        if self.device.type == "cuda":
            left = torch.cuda.mem_get_info(self.device)[0]
            if self.limit_gib is not None:
                left = min(left, int(self.limit_gib * GIB) - torch.cuda.memory_reserved(self.device))
        elif self.limit_gib is not None:
            limit = resource.getrlimit(resource.RLIMIT_DATA)[0] if lifted is None else lifted
            left = limit - _private_memory()
        else:
            left = psutil.virtual_memory().available
        return max(0, left)

    def explain(self, error: BaseException, model: nn.Module | None, phase: str) -> OutOfMemoryError | None:
        """What is known of an error inside `limited` if it is a lack of memory, else None. A CPU's limit ends with it:
        to tell takes memory, too."""
        lifted = self._lift()
        if not is_out_of_memory(error):
            return None
        request, free = _REQUEST.search(str(error)), self.free(lifted)
        return OutOfMemoryError(
            {
                "requested_gb": float(request[1]) * _POWERS[request[2]] / 1e9 if request else None,
                "free_gb": free / 1e9,
                "limit_gib": self.limit_gib,
                "layer": _layer(error.__traceback__, model) if model is not None else None,
                "phase": phase,
            }
        )


def _private_memory() -> int:
    """Bytes that RLIMIT_DATA counts."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def _layer(trace: TracebackType | None, model: nn.Module) -> str | None:
    """The name of the innermost layer of `model` that was being computed."""
    names = {id(module): name for name, module in model.named_modules() if name}
    found = None
    while trace is not None:
        found = names.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    return found
