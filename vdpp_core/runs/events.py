"""The event log of a run: events/rank-N.jsonl, one line an event, appended by rank N and read by everybody."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from vdpp_core.config.errors import redacted
from vdpp_core.runs import files

Event = dict[str, Any]

_EPOCH = time.time() - time.perf_counter()
_FACTS = {  # what readers rely on, beside t, rank and kind
    "start": {"pid", "created", "host", "threads", "device", "dtype", "backend"},
    "warm": {"seconds"},
    "take": {"sample", "seconds"},
    "step": {"sample", "step", "seconds"},
    "send": {"sample", "seconds"},
    "sample": {"sample"},
    "pad": {"step", "seconds"},
    "done": {"memory"},
    "error": {"error"},
    "decode": {"sample"},
    "chunk": {"sample"},
    "video": {"sample", "seconds"},
    "comparing": {"sample", "step"},
    "official": {"sample", "equal_latents", "equal_frames", "max_latent_difference", "max_frame_difference"},
}
_NUMBERS = ("t", "seconds", "created", "sent_bytes", "asleep_s")
_WHOLE = ("rank", "sample", "step", "pid", "threads", "other_ranks")
_OBJECTS = ("memory", "decode_memory", "predicted_memory", "oom")


def now() -> float:
    """Seconds since 1970 on the monotonic clock, which the processes of one machine share."""
    return _EPOCH + time.perf_counter()


def clock_starts(events: Sequence[Event]) -> dict[int, float]:
    """Rank -> t at which the clock started on its machine.

    All ranks start it on leaving one barrier; each machine's times count from its own start, for their clocks differ.
    """
    host = {event["rank"]: event.get("host") for event in events if event["kind"] == "start"}
    zero: dict[str | None, float] = {}
    for event in events:
        if event["kind"] == "clock":
            place = host.get(event["rank"])
            zero[place] = min(zero.get(place, event["t"]), event["t"])
    ranks = {event["rank"] for event in events}
    return {rank: zero[host.get(rank)] for rank in ranks if host.get(rank) in zero}


class EventLog:
    """Writes the events of one rank. A line is out of the process as soon as it is written.

    Kinds, with t the end of what they tell: start, loaded, warm, clock, take (a sample taken up, seconds waited for
    it), step (seconds), send (seconds waited for room), sample (finished), pad (a step that only keeps the shard group
    company), done, and at a bad end error or terminated. Where videos are made: decode (a sample taken up), chunk (some
    of its frames decoded), video (written, seconds), comparing (the official pipeline did a step) and official
    (compared with it). Where several machines have run folders of their own: gather (a part of a file sent to rank 0 or
    received by it).
    """

    def __init__(self, run_folder: Path, rank: int) -> None:
        self.folder, self.rank, self.lock = run_folder, rank, threading.Lock()
        self.path = run_folder / "events" / f"rank-{rank}.jsonl"
        self.file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, kind: str, sample: int | None = None, step: int | None = None, **facts: Any) -> None:
        """Raises:
        FullDiskError: there is no room for it.
        """
        with self.lock:
            self._append(self._line(kind, sample=sample, step=step, **facts))

    def last_word(self, kind: str, **facts: Any) -> None:
        """Write the last event. Whoever wants to write after it, or have another last word, waits for the end.

        On a full disk it takes the room that the run folder kept for it.
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
        """Have all events on the storage, where other machines see them."""
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

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.file)


class Follower:
    """Reads the event log of a folder again and again, each line once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._at, self._lines = folder, dict[Path, int](), dict[Path, int]()
        self._events: list[Event] = []
        self.damaged: list[str] = []

    def events(self) -> list[Event]:
        """All ranks' events until now, in the order of time. `damaged` names the lines that hold none.

        A line without its end is still being written.
        """
        self._events = sorted(self._events + self.fresh(), key=lambda event: event["t"])
        return self._events

    def fresh(self) -> list[Event]:
        """Those that were not read before, each rank's in their order."""
        return [event for path in events_paths(self.folder) for event in self._new(path)]

    def _new(self, path: Path) -> list[Event]:
        with path.open("rb") as file:
            file.seek(self._at.get(path, 0))
            whole, end, _ = file.read().rpartition(b"\n")
        self._at[path] = self._at.get(path, 0) + len(whole) + len(end)
        found = []
        for line in whole.split(b"\n") if end else ():
            self._lines[path] = number = self._lines.get(path, 0) + 1
            if event := _parsed(line, rank=int(path.stem.partition("-")[2])):
                found.append(event)
            elif line.strip():
                self.damaged.append(f"{path.relative_to(self.folder)}, line {number}, is no event and was skipped")
        return found


def events_paths(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "events").glob("rank-*.jsonl") if path.stem[5:].isdecimal())


def _parsed(line: bytes, rank: int) -> Event | None:
    try:
        event = json.loads(line)
        whole = event["rank"] == rank and {"t"} | _FACTS.get(event["kind"], set()) <= event.keys()
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    different = [
        event.get(f"max_{what}_difference", 0.0) for what in ("latent", "frame", "batch")
    ]  # not a number, perhaps
    whole = whole and all(isinstance(value, int | float) for value in different)
    for names, kind in ((_NUMBERS, int | float), (_WHOLE, int), (_OBJECTS, dict), (("error", "host"), str)):
        whole = whole and all(_is(event[name], kind) for name in names if name in event)
    return event if whole else None


def _is(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and (not isinstance(value, float | int) or abs(value) < 1e15)


ENDS = ("done", "error", "terminated")


_VIDEOS = ("decode", "chunk", "video", "comparing", "official")


def position(own: Sequence[Event], steps: range) -> tuple[int | None, int | None]:
    """(sample, step) that a rank was at when it wrote its last event: the step after the last one it finished."""
    for event in reversed(own):
        if event["kind"] in _VIDEOS:
            return event["sample"], None
        if event["kind"] == "take":
            return event["sample"], steps[0]
        if event["kind"] == "step":
            return event["sample"], min(event["step"] + 1, steps[-1])
    return None, None
