"""End a rank cleanly: on a signal, when its launcher or run folder is gone, or when a rank has stalled."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from typing import Any

from vdpp_core.config.errors import ConfigError
from vdpp_core.runs import results
from vdpp_core.runs.disturbed import Surroundings
from vdpp_core.runs.events import EventLog
from vdpp_core.runs.files import Place
from vdpp_core.runs.run import Run
from vdpp_core.runs.stalls import LAST_WORDS_S, PERIOD_S, Stall, Watchdog

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class RankMonitor(threading.Thread):
    """Watches one rank from a thread, because a main thread inside a communicator runs no Python signal handlers.

    A context manager. When it finds a reason to end, it writes the rank's last event and ends the process.
    """

    def __init__(self, run: Run, log: EventLog, surroundings: Surroundings, follow_parent: bool) -> None:
        super().__init__(daemon=True)
        self.folder, self.log, self.surroundings = run.folder, log, surroundings
        self.parent = os.getppid() if follow_parent else None
        self.watchdog, self.place = Watchdog(run), Place(run.folder / "events")
        self.stopped = False

    def __enter__(self) -> RankMonitor:
        self.signals, self.wakeup = os.pipe()
        os.set_blocking(self.wakeup, False)
        self.earlier_wakeup = signal.set_wakeup_fd(self.wakeup)  # the handlers do nothing: `run` reads the pipe
        self.earlier = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stopped = True
        self.join(2 * PERIOD_S)  # it never ends if this thread wrote the last word first
        signal.set_wakeup_fd(self.earlier_wakeup)
        if kind is None:  # after an error the launcher sends SIGTERM, which must not cut off the error's report
            for number, handler in self.earlier.items():
                signal.signal(number, handler)
        if not self.is_alive():
            self.place.close()
        os.close(self.signals)
        os.close(self.wakeup)

    def run(self) -> None:
        """Watch until the context ends."""
        while not self.stopped:
            if select.select([self.signals], [], [], PERIOD_S)[0]:
                number = os.read(self.signals, 1)[0]
                if number in SIGNALS:
                    self._end(128 + number, "terminated", signal=signal.Signals(number).name)
            elif self.place.is_gone():
                self._leave()
            elif self.parent is not None and os.getppid() != self.parent:
                self._end(1, "terminated", signal="the launcher is gone")
            elif stall := self._stall():
                self._end(1, "error", error=stall.cause, blamed=stall.rank)
            else:
                self.surroundings.look()

    def _stall(self) -> Stall | None:
        with contextlib.suppress(OSError):  # a file vanished while it was read
            return self.watchdog.fatal()
        return None

    def _end(self, code: int, kind: str, **facts: Any) -> None:
        """Write the last word and end the process. Without a launcher, first write the result for the other ranks."""
        if self.place.is_gone():
            self._leave()
        self.log.last_word(kind, **facts)
        try:
            if not self.watchdog.run.launcher_alive():
                self._settle()
        except (ConfigError, OSError) as error:  # config.json is damaged, or the folder is gone
            print(f"{self.folder}: no result could be written: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)

    def _settle(self) -> None:
        deadline = time.monotonic() + LAST_WORDS_S
        while not results.all_ended(self.watchdog.run) and time.monotonic() < deadline:
            time.sleep(0.1)
        by_hand = self.watchdog.run.launcher() is None
        results.settle(self.watchdog.run, reason=None if by_hand else "the launcher was killed", again=by_hand)

    def _leave(self) -> None:
        """End without writing to the folder, which is no longer this run's."""
        print(f"rank {self.log.rank}: the run folder {self.folder} is gone, so it ends", file=sys.stderr, flush=True)
        os._exit(1)
