"""The end of what is at work for a run on this machine."""

from __future__ import annotations

import contextlib
import signal
import socket
from pathlib import Path

import psutil

from vdpp_core import runfolder
from vdpp_core.errors import ConfigError

STOP_PATIENCE_S = 12.0
LAST_WORD_S = 2.0


def end(folder: Path) -> None:
    """End the process that watches over a run and with it the ranks, forcibly if they do not listen.

    Raises:
        ConfigError: that process is on another machine.
    """
    launcher = runfolder.read_launcher(folder)
    if launcher is None or not runfolder.launcher_alive(folder):
        return
    if launcher["host"] != socket.gethostname():
        raise ConfigError("run", folder.name, f"has no part on this machine: stop it on {launcher['host']}")
    try:
        process = psutil.Process(launcher["pid"])
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_PATIENCE_S)
    except psutil.NoSuchProcess:
        pass
    except psutil.TimeoutExpired:
        process.kill()
    end_ranks(folder)


def end_ranks(folder: Path) -> None:
    """End what is left of a run's ranks on this machine: a moment for a last word, then by force."""
    starts = [event for event in runfolder.read_events(folder) if event["kind"] == "start"]
    left = []
    for start in starts:
        with contextlib.suppress(psutil.Error):  # it has ended, or is somebody else's
            if runfolder.is_rank(start):
                left.append(psutil.Process(start["pid"]))
                left[-1].terminate()
    for process in psutil.wait_procs(left, LAST_WORD_S)[1]:
        with contextlib.suppress(psutil.Error):
            process.kill()
