"""Memory limits that simulate smaller devices, and reports of what was going on when memory ran out."""

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

_POWERS = {unit: 2 ** (10 * power) for power, unit in enumerate("bKMGTPE")}  # MPS says GB where others say GiB
_REQUEST = re.compile(r"(?:alloc|allocate|async|mmap) ([\d.]+) ?(b|[KMGTPE])(?:ytes|i?B)\b")


class OutOfMemoryError(RuntimeError):
    """A rank ran out of memory, which is a result of a run rather than a fault.

    `facts` has requested_gb, free_gb (both GB, 1e9 bytes), limit_gib, layer and phase; unknown ones are None.
    """

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
    """What a rank may use of its device: `limit_gib` (GiB), or the whole device if that is None.

    On CUDA the limit is what PyTorch's allocator may reserve, without the CUDA context. On a CPU it is the private
    memory that the process may take beyond what it holds now (RLIMIT_DATA; Linux only).
    """

    def __init__(self, device: torch.device, limit_gib: float | None) -> None:
        self.device, self.limit_gib = device, limit_gib

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Enforce the limit within the context."""
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
        torch.ones(2**20).add_(1)  # starts OpenMP's threads: later it would end the process if their stacks did not fit
        before = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (_private_memory() + int(limit), before[1]))
        return before

    def _restore(self, before: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)
        else:
            resource.setrlimit(resource.RLIMIT_DATA, before)

    def _lift(self) -> int | None:
        """Lift a CPU's limit and return it."""
        if self.limit_gib is None or self.device.type != "cpu":
            return None
        limit, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        return limit

    def free(self, lifted: int | None = None) -> int:
        """Bytes that are free; inside `limited`, of the limit, or of the CPU limit that was `lifted`."""
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

    def explain(self, error: BaseException, denoisers: nn.ModuleDict | None, phase: str) -> OutOfMemoryError | None:
        """Turn an error inside `limited` into an OutOfMemoryError, or return None if it is no lack of memory.

        This lifts a CPU's limit, because the report needs memory, too.

        Args:
            denoisers: their innermost running layer is reported.
            phase: what the rank was doing, in words.
        """
        lifted = self._lift()
        if not is_out_of_memory(error):
            return None
        request, free = _REQUEST.search(str(error)), self.free(lifted)
        return OutOfMemoryError(
            {
                "requested_gb": float(request[1]) * _POWERS[request[2]] / 1e9 if request else None,
                "free_gb": free / 1e9,
                "limit_gib": self.limit_gib,
                "layer": _layer(error.__traceback__, denoisers or nn.ModuleDict()),
                "phase": phase,
            }
        )


def _private_memory() -> int:
    """Bytes of this process that RLIMIT_DATA counts."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def _layer(trace: TracebackType | None, denoisers: nn.ModuleDict) -> str | None:
    """The name of the innermost layer that was running; with that of its denoiser, if there are several."""
    names: dict[int, str] = {}
    for own, denoiser in denoisers.items():
        prefix = f"{own}." if len(denoisers) > 1 else ""
        names |= {id(module): f"{prefix}{name}" for name, module in denoiser.named_modules() if name}
    found = None
    while trace is not None:
        found = names.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    return found
