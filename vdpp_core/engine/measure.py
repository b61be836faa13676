"""Clocks and peak memory of one rank."""

from __future__ import annotations

import ctypes
import resource
import sys
import time
from pathlib import Path

import psutil
import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MOST_FOR_MMAP = 32 * 2**20  # the largest threshold that glibc accepts


def keep_freed_memory(keep: bool) -> None:
    """Have glibc keep freed memory, or return it at once. Other C libraries are left alone.

    Keep it for timing, as PyTorch's allocator does on CUDA: otherwise a CPU rank may return its activations and fault
    them in again at every step, depending on what lies at the top of its heap: 13 % of one rank's time, 2 % of its
    neighbour's. Return it for runs within a memory limit: the process then holds live memory only, where a heap of
    activations of all sizes held 30 to 80 % more.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_TRIM_THRESHOLD, -1 if keep else 2**16)
        library.mallopt(_M_MMAP_THRESHOLD, _MOST_FOR_MMAP if keep else 2**16)


def device_use(device: torch.device) -> float | None:
    """The share of the last moment (NVML's own period, up to a second) in which a CUDA GPU computed, 0 to 1.

    None on other devices, without the package nvidia-ml-py, and where NVML does not say, as for a slice of a GPU.
    """
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except Exception:  # of the package, which may be missing, or the driver: only this number is lost
        return None


class Stopwatch:
    """Measures the seconds of one span of work: with CUDA events on CUDA, with the wall clock elsewhere.

    `stop` waits for the work. Once per step, that leaves the device idle for some microseconds.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def start(self) -> None:
        """Begin a span."""
        if self.device.type == "cuda":
            self.begin.record()
        else:
            self.began = time.perf_counter()

    def stop(self) -> float:
        """End the span, wait for its work, and return its seconds."""
        if self.device.type == "cuda":
            self.end.record()
            self.end.synchronize()
            return self.begin.elapsed_time(self.end) / 1000
        if self.device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter() - self.began


class MemoryMeter:
    """Measures peak memory of this rank in GB (1e9 bytes) from `reset` on, including the model.

    CUDA: the allocator's maxima of allocated and reserved bytes, and what the device reports as used.
    MPS counts no maximum: what the driver has given to this process, above the baseline. PyTorch's pools keep what is
    freed, so this is the largest amount held at once, rounded up to their heaps.
    CPU: the high-water mark of resident memory above the baseline, that is, what the process held before the model's
    tensors. Memory that libraries take on first use counts, about 20 MB for oneDNN. Where the mark cannot be reset
    (outside Linux), it is the process's lifetime maximum.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.set_baseline()

    def set_baseline(self) -> None:
        """Take what the process holds now as the baseline."""
        on_mps = self.device.type == "mps"
        self.baseline = torch.mps.driver_allocated_memory() if on_mps else psutil.Process().memory_info().rss

    def reset(self) -> None:
        """Start a new peak."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()  # buffers in use cannot be freed
            torch.mps.empty_cache()
        elif sys.platform == "linux":
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> dict[str, float]:
        """The peak since `reset` as allocated_gb, with further figures of the device type, all in GB."""
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            return {
                "allocated_gb": torch.cuda.max_memory_allocated(self.device) / 1e9,
                "reserved_gb": torch.cuda.max_memory_reserved(self.device) / 1e9,
                "device_used_gb": (total - free) / 1e9,
            }
        if self.device.type == "mps":
            given = torch.mps.driver_allocated_memory()
            return {"allocated_gb": max(0, given - self.baseline) / 1e9, "driver_gb": given / 1e9}
        mark = _resident_high_water()
        return {"allocated_gb": max(0, mark - self.baseline) / 1e9, "resident_gb": mark / 1e9}


def _resident_high_water() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on a Mac
