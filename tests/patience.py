"""How long tests wait: in seconds of an idle machine, so that a verdict does not depend on what else runs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    import subprocess

    import launch

LOADAVG = Path("/proc/loadavg")
PERIOD_S = 0.05


def share_of_a_core() -> float:
    """Of a core, what a process gets now: 1 where no more of them want to run than there are cores."""
    if not LOADAVG.exists():
        return 1.0
    running = int(LOADAVG.read_text().split()[3].partition("/")[0])
    cores = len(os.sched_getaffinity(0))
    return min(1.0, cores / max(1, running))


class FairClock(threading.Thread):
    """Seconds in which a process could have computed: where three of them share a core, three seconds count as one.

    with FairClock() as clock: …; clock.seconds
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seconds, self.over = 0.0, threading.Event()

    def __enter__(self) -> FairClock:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.join()

    def run(self) -> None:
        last = time.monotonic()
        while not self.over.wait(PERIOD_S):
            now = time.monotonic()
            self.seconds += (now - last) * share_of_a_core()
            last = now


def wait_until(condition: Callable[[], Any], seconds: float) -> Any:
    """What a condition returns as soon as it is true; AssertionError after so many seconds of a machine at rest."""
    with FairClock() as clock:
        while not (answer := condition()):
            assert clock.seconds < seconds, f"not within {seconds} s"
            time.sleep(PERIOD_S)
    return answer


def exit_code(process: subprocess.Popen[Any], seconds: float) -> int:
    """Of a process that has to end in that time."""
    wait_until(lambda: process.poll() is not None, seconds)
    return process.returncode


def wait_for_end(process: psutil.Process, seconds: float) -> None:
    """Of a process that has to end in that time, whose exit code is not known."""

    def is_over() -> bool:
        try:
            return process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    wait_until(is_over, seconds)


def result_of(job: launch.Job, seconds: float) -> dict[str, Any]:
    """Of a run that has to end in that time."""
    wait_until(job.outcome, seconds)
    return job.result()
