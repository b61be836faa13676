"""Processes that a run folder records: whether they still exist, and what state they are in."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

import psutil

from vdpp_core.runs.event_types import Start
from vdpp_core.runs.files import write_atomically

_RUN_BEGAN = "VDPP_RUN_BEGAN"  # environment variable
PATIENCE_S = 3600.0  # with a run that writes nothing: weights may be downloaded


def created_s(pid: int) -> float:
    """When a process began, in seconds on a clock that cannot be set: on Linux, since the machine started.

    Raises:
        psutil.NoSuchProcess: there is no such process.
    """
    try:
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except FileNotFoundError:
        return psutil.Process(pid).create_time()
    except ProcessLookupError:
        raise psutil.NoSuchProcess(pid) from None
    return int(ticks) / os.sysconf("SC_CLK_TCK")


def age_s(pid: int) -> float:
    """Seconds since a process began."""
    return _now() - created_s(pid)


def _now() -> float:
    """On the clock of `created_s`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.time()


def begin_run() -> None:
    """Have the ranks that this process starts from now on count their launch from here."""
    os.environ[_RUN_BEGAN] = str(_now())


def launch_s() -> float:
    """Seconds from the beginning of a rank's run, or of its launcher where that runs nothing else, to its own."""
    launcher_age = age_s(os.getppid())
    began = float(os.environ.get(_RUN_BEGAN, 0.0))
    return (min(launcher_age, _now() - began) if began else launcher_age) - age_s(os.getpid())


def is_alive(pid: int, created: float) -> bool:
    """Whether a process exists, is not a zombie, and is not a later one with the same pid."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and abs(created_s(pid) - created) < 2
    except psutil.NoSuchProcess:
        return False


def write_launcher(folder: Path, pid: int, alone: bool = True) -> None:
    """Record the process that watches over the run, on this machine or `alone`, and settles it after a bad end."""
    facts = {"pid": pid, "created": created_s(pid), "host": socket.gethostname()}
    write_atomically(folder / "job.json" if alone else launcher_path(folder), json.dumps(facts) + "\n")


def launcher_path(folder: Path) -> Path:
    """Where this machine, one of several, records its launcher."""
    return folder / f"job-{socket.gethostname()}.json"


def is_rank(start: Start) -> bool:
    """Whether the process that wrote a start event still exists, on this machine."""
    return start.host == socket.gethostname() and is_alive(start.pid, start.created)


def has_vanished(start: Start) -> bool:
    """Whether the process that wrote a start event is known to be gone. Processes of other machines are never known."""
    return start.host == socket.gethostname() and not is_rank(start)


def is_stopped(start: Start) -> bool:
    """Whether the process that wrote a start event is known to be stopped, for example by SIGSTOP."""
    try:
        return is_rank(start) and psutil.Process(start.pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False
