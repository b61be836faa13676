"""Processes of this machine: whether one that was noted is still there."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import psutil

from vdpp_core.runs.events import Event, events_paths
from vdpp_core.runs.files import read_object, write_atomically


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


PATIENCE_S = 3600.0  # with a run of which nothing is heard: weights may be downloaded


def write_launcher(folder: Path, pid: int, alone: bool = True) -> None:
    """Record the process that watches over the run, here or `alone`, and settles it after a bad end."""
    facts = {"pid": pid, "created": created_s(pid), "host": socket.gethostname()}
    write_atomically(folder / "job.json" if alone else _launcher_path(folder), json.dumps(facts) + "\n")


def _launcher_path(folder: Path) -> Path:
    return folder / f"job-{socket.gethostname()}.json"


def read_launcher(folder: Path) -> dict[str, Any] | None:
    """pid and creation time of that process, this machine's where there are several; None where torchrun was called by
    hand."""
    paths = [_launcher_path(folder), folder / "job.json", *sorted(folder.glob("job-*.json"))]
    return next((told for path in paths if (told := read_object(path, "pid", "created", "host"))), None)


def launcher_alive(folder: Path) -> bool:
    """Whether somebody watches over the run; of another machine's launcher that is assumed for PATIENCE_S."""
    launcher = read_launcher(folder)
    if launcher is None:
        return False
    if launcher["host"] == socket.gethostname():
        return is_alive(launcher["pid"], launcher["created"])
    written = [path.stat().st_mtime for path in (folder / "config.json", *events_paths(folder)) if path.exists()]
    return time.time() - max(written, default=0.0) < PATIENCE_S


def is_rank(start: Event) -> bool:
    """Whether the process of a rank's start event is still that rank, and on this machine."""
    return start["host"] == socket.gethostname() and is_alive(start["pid"], start["created"])


def has_vanished(start: Event) -> bool:
    """Whether the process of a rank's start event is known to be gone; of another machine's nothing is known."""
    return start["host"] == socket.gethostname() and not is_rank(start)


def stands_still(start: Event) -> bool:
    """Whether the process of a rank's start event is known to be stopped, as by SIGSTOP."""
    try:
        return is_rank(start) and psutil.Process(start["pid"]).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False
