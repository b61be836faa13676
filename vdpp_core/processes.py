"""Processes of this machine: whether one that was noted is still there."""

from __future__ import annotations

import os
from pathlib import Path

import psutil


def created_s(pid: int) -> float:
    """When a process began, in seconds that no setting of the clock changes: on Linux since the machine started.

    Raises:
        psutil.NoSuchProcess: there is none.
    """
    try:
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except FileNotFoundError:
        return psutil.Process(pid).create_time()
    except ProcessLookupError:
        raise psutil.NoSuchProcess(pid) from None
    return int(ticks) / os.sysconf("SC_CLK_TCK")


def is_alive(pid: int, created: float) -> bool:
    """Whether a process is there, is no zombie, and no later one with the same number."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and abs(created_s(pid) - created) < 2
    except psutil.NoSuchProcess:
        return False
