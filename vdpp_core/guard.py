"""A rank's last word: when it is told to end, when its launcher is gone, or when the whole run has fallen silent."""

from __future__ import annotations

import os
import select
import signal
import threading
from pathlib import Path
from typing import Any

from vdpp_core import results, runfolder
from vdpp_core.config import RunConfig
from vdpp_core.measure import EventLog

PERIOD_S = 0.5


class Guard(threading.Thread):
    """A thread, since the main one may wait inside a communicator, where no Python signal handler runs."""

    def __init__(self, folder: Path, log: EventLog, timeout_s: float, follow_parent: bool) -> None:
        super().__init__(daemon=True)
        self.folder, self.log, self.timeout_s = folder, log, timeout_s
        self.parent = os.getppid() if follow_parent else None
        self.watching = self.stopped = False
        self.signals, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)  # the byte in the pipe is what counts

    def stop(self) -> None:
        self.stopped = True

    def run(self) -> None:
        while not self.stopped:
            if select.select([self.signals], [], [], PERIOD_S)[0]:
                number = os.read(self.signals, 1)[0]
                if number in (signal.SIGTERM, signal.SIGINT):
                    self._end(128 + number, "terminated", signal=signal.Signals(number).name)
            elif self.parent is not None and os.getppid() != self.parent:
                self._end(1, "terminated", signal="the launcher is gone")
            elif self.watching and runfolder.silence_s(self.folder) > self.timeout_s:
                blamed = self._stalled_rank()
                cause = f"stalled: no rank wrote an event for {self.timeout_s:g} s (timeout_s)"
                self._end(1, "error", error=cause, lost_rank=False, blamed=blamed)

    def _stalled_rank(self) -> int:
        """The rank that is in the middle of a stage, while the others wait for it."""
        stages, layout = RunConfig.read(self.folder).stages(), RunConfig.read(self.folder).layout
        last = {event["rank"]: event for event in runfolder.read_events(self.folder)}
        for rank, event in sorted(last.items()):
            steps = stages[layout.coordinates(rank)[1]]
            if event["kind"] == "take" or (event["kind"] == "step" and event["step"] != steps[-1]):
                return rank
        return min(last, key=lambda rank: last[rank]["t"])

    def _end(self, code: int, kind: str, **facts: Any) -> None:
        self.log.write(kind, **facts)
        if not runfolder.launcher_alive(self.folder):
            by_hand = runfolder.read_launcher(self.folder) is None
            results.settle(self.folder, reason=None if by_hand else "the launcher was killed")
        os._exit(code)
