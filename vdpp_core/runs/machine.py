"""What a result records of its machine: the hardware, the versions of libraries, the commit."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from vdpp_core.config.execution import cores

LIBRARIES = ("torch", "diffusers", "transformers", "accelerate", "safetensors")


def hardware() -> dict[str, Any]:
    """GPUs, CPU, cores, memory in GB (1e9 bytes) and platform of this machine."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "gpus": gpus,
        "cpu": _cpu_name(),
        "cores": cores(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "platform": platform.platform(),
    }


def hardware_name(facts: dict[str, Any]) -> str:
    """`hardware()`, or what a result recorded of it, in a few words."""
    if facts["gpus"]:
        return f"{len(facts['gpus'])} × {facts['gpus'][0]}"
    return f"{facts['cpu']}, {facts['cores']} core{'s' * (facts['cores'] != 1)}"


def threads_text(threads: Iterable[int | None]) -> str:
    """Threads per rank in words; several numbers where ranks have different ones."""
    numbers = sorted({number for number in threads if number})
    return f"{'/'.join(map(str, numbers))} thread{'s' * (numbers != [1])} per rank"


def versions() -> dict[str, str]:
    """The versions of Python and of the libraries that results depend on."""
    return {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES}


def git_commit() -> str | None:
    """The commit of the clone that this package lies in; None outside a clone."""
    project = Path(__file__).resolve().parents[2]
    if not (project / ".git").exists():
        return None
    command = ["git", "-C", str(project), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
