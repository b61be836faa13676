"""The event log of a run: events/rank-N.jsonl, one event per line, appended by rank N and read by everyone else."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from vdpp_core.config.errors import redacted
from vdpp_core.runs import files
from vdpp_core.runs.event_types import Event, parse

_EPOCH = time.time() - time.perf_counter()


def now() -> float:
    """Seconds since 1970 on the monotonic clock, which all processes of one machine share."""
    return _EPOCH + time.perf_counter()


class EventLog(AbstractContextManager):
    """Writes the events of one rank. Each line leaves the process as soon as it is written."""

    def __init__(self, run_folder: Path, rank: int) -> None:
        self.folder, self.rank, self.lock = run_folder, rank, threading.Lock()
        self.path = run_folder / "events" / f"rank-{rank}.jsonl"
        self.file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, kind: str, sample: int | None = None, step: int | None = None, **facts: Any) -> None:
        """Append an event. `kinds` names the facts of each kind.

        Raises:
            FullDiskError: there is no room for it.
        """
        with self.lock:
            self._append(self._line(kind, sample=sample, step=step, **facts))

    def last_word(self, kind: str, **facts: Any) -> None:
        """Append the last event. Any later writer blocks until the process ends.

        On a full disk it takes the room that the run folder reserved for it.
        """
        self.lock.acquire()
        line = self._line(kind, **facts)
        try:
            self._append(line)
        except files.FullDiskError:
            files.release(self.folder)
            with suppress(files.FullDiskError):
                self._append(b"\n" + line)  # part of the line before may be there

    def sync(self) -> None:
        """Flush all events to storage, where other machines see them."""
        os.fsync(self.file)

    def _line(self, kind: str, **facts: Any) -> bytes:
        event = {"t": now(), "rank": self.rank, "kind": kind, **facts}
        event |= {name: redacted(value) for name, value in event.items() if isinstance(value, str)}
        return (json.dumps({name: value for name, value in event.items() if value is not None}) + "\n").encode()

    def _append(self, line: bytes) -> None:
        try:
            while line:
                line = line[os.write(self.file, line) :]
        except OSError as error:
            if files.is_full(error):
                raise files.FullDiskError(self.path) from error
            raise

    def __exit__(self, *_: object) -> None:
        os.close(self.file)


class Follower:
    """Reads the event log of a run folder repeatedly, each line once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._at, self._lines = folder, dict[Path, int](), dict[Path, int]()
        self._events: list[Event] = []
        self.damaged: list[str] = []

    def events(self) -> list[Event]:
        """All ranks' events so far, sorted by time. `damaged` names the lines that could not be read.

        A line without its end is still being written.
        """
        self._events = sorted(self._events + self.fresh(), key=lambda event: event.t)
        return self._events

    def fresh(self) -> list[Event]:
        """The events since the last call, rank by rank."""
        return [event for path in events_paths(self.folder) for event in self._new(path)]

    def _new(self, path: Path) -> list[Event]:
        with path.open("rb") as file:
            file.seek(self._at.get(path, 0))
            whole, end, _ = file.read().rpartition(b"\n")
        self._at[path] = self._at.get(path, 0) + len(whole) + len(end)
        rank, found = int(path.stem.partition("-")[2]), []
        for line in whole.split(b"\n") if end else ():
            self._lines[path] = number = self._lines.get(path, 0) + 1
            if (event := parse(line)) and event.rank == rank:
                found.append(event)
            elif line.strip():
                self.damaged.append(f"{path.relative_to(self.folder)}, line {number}, is not an event: skipped")
        return found


def events_paths(folder: Path) -> list[Path]:
    """The event files of a run folder that exist so far, one per rank."""
    return sorted(path for path in (folder / "events").glob("rank-*.jsonl") if path.stem[5:].isdecimal())
