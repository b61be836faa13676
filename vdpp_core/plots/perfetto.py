"""Turns a run's events into a trace for chrome://tracing and Perfetto (JSON, times in µs since the first event).

A process is a replica on a machine, a thread is a rank. The phases of a rank (loading, warming up, running, decoding)
contain its slices: steps, receiving latents (take), sending them (send), videos and the chunks of their frames. With
--decode as-ready, videos are in the phase of running. An arrow leads from each send to its take. Unfinished slices end
with the rank's last event. Clocks of several machines are not corrected.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.runs import event_types as kinds
from vdpp_core.runs import files
from vdpp_core.runs.event_types import Event
from vdpp_core.runs.run import Run

Entry = dict[str, Any]
_Work = kinds.Take | kinds.Encode | kinds.Swapped | kinds.Step | kinds.Send | kinds.Pad | kinds.Warm

PHASES = {"start": "loading", "loaded": "warming up", "clock": "running", "decode": "decoding"}
NAMES = {"pad": "padding", "warm": "warm-up step", "encode": "encoding", "swapped": "loading an expert"}


def write(run: Path | Run, path: Path | None = None) -> Path:
    """Write the trace of a run, finished or not, to `path` (default: trace.json in its folder) and return the path.

    Raises:
        ConfigError: the folder has no run's config.json, or the file cannot be written.
    """
    run = Run.of(run)
    path = path or run.folder / "trace.json"
    text = json.dumps(trace(run))
    try:
        files.write_atomically(path, text)
    except (OSError, ValueError) as error:  # ValueError: not a possible file name
        raise ConfigError("output", path, f"must be a file that can be written ({error})") from None
    return path


def trace(run: Path | Run) -> Entry:
    """The trace of a run folder as a JSON object, without damaged events.

    Raises:
        ConfigError: the folder has no run's config.json.
    """
    run = Run.of(run)
    config, result = run.config, run.result() or {}
    ranks = range(config.layout.world_size)
    events = [event for event in run.events() if event.rank in ranks]
    zero = events[0].t if events else 0.0
    own: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        own[event.rank].append(event)
    threads = [_Thread(config, rank, own[rank], zero) for rank in ranks]
    pids = {name: number for number, name in enumerate(dict.fromkeys(thread.process for thread in threads), start=1)}
    entries = [entry for thread in threads for entry in thread.entries] + _arrows(config, threads)
    failure = result.get("failure") or {}
    if failure.get("rank") in ranks and (lost := threads[failure["rank"]]).silent:
        entries.append(lost.entry("i", lost.floor, failure["cause"], "failure", s="t"))
    for entry in entries:
        entry["pid"] = pids[threads[entry["tid"]].process]
    entries.sort(key=lambda entry: (entry["ts"], -entry.get("dur", 0)))
    facts = {"run_id": run.id, "layout": str(config.layout), "outcome": result.get("outcome"), "epoch_s": zero}
    return {"traceEvents": _names(threads, pids) + entries, "displayTimeUnit": "ms", "otherData": facts}


class _Thread:
    """The entries of one rank. Its slices are disjoint or nested, and last at least 1 µs."""

    def __init__(self, config: RunConfig, rank: int, own: Sequence[Event], zero: float) -> None:
        self.rank, self.zero, self.place = rank, zero, config.layout.place(rank)
        steps = config.steps_of(rank)
        host = next((event.host for event in own if isinstance(event, kinds.Start)), None)
        self.process = f"replica {self.place.replica}" + (f" on {host}" if host else "")
        self.name = f"rank {rank}: steps {steps[0]}–{steps[-1]}"
        self.entries: list[Entry] = []
        self.open: list[Entry] = []  # the phase, and in it the video
        self.floor = 0  # end of the last slice
        self.phases = {kind: name for kind, name in PHASES.items() if kind != "decode" or config.decode == "at-end"}
        self.silent = not kinds.of(own, kinds.LastWord)
        before: Event | None = None
        for event in own:
            self._draw(event, before)
            before = event
        self._close_all(self.floor)

    def entry(self, ph: str, ts: int, name: str, cat: str, **more: Any) -> Entry:
        """An entry of this rank in the trace format's terms."""
        return {"ph": ph, "ts": ts, "tid": self.rank, "name": name, "cat": cat, **more}

    def _draw(self, event: Event, before: Event | None) -> None:
        kind, t, args = event.kind, self._us(event.t), self._args(event)
        if kind in self.phases and not (kind == "decode" and self._phase() == PHASES["decode"]):
            self._close_all(t)
            self._begin(t, PHASES[kind], "phase", {})
        if isinstance(event, _Work):
            self._draw_work(event, before)
        elif isinstance(event, kinds.Decode):
            self._close_video(t)
            self._begin(t, f"video of sample {event.sample}", "video", args)
        elif kind == "chunk":
            self._slice(self.floor, t, "chunk of frames", kind, args)
        elif kind == "video":
            self._close_video(t)
        elif isinstance(event, kinds.Comparing):
            self._slice(self.floor, t, f"official pipeline, sample {event.sample}, to step {event.step}", kind, args)
        elif isinstance(event, kinds.Official):
            self._slice(self.floor, t, f"official pipeline, sample {event.sample}, decoding", kind, args)
        elif kind == "clock":
            self._instant(t, "clock starts", kind, args)
        elif isinstance(event, kinds.Finished):
            self._instant(t, f"sample {event.sample} finished", kind, args)
        elif isinstance(event, kinds.LastWord):
            self._close_all(t)
            if not isinstance(event, kinds.Done):
                self._instant(t, event.error if isinstance(event, kinds.Error) else kind, "failure", args)
        self.floor = max(self.floor, t)

    def _draw_work(self, event: _Work, before: Event | None) -> None:
        kind, sample = event.kind, event.sample if isinstance(event, kinds.OfSample) else 0
        begin, end = self._us(event.t - event.seconds), self._us(event.t)
        if isinstance(event, kinds.Take) and self.place.stage == 0:
            return  # the first stage receives nothing
        if isinstance(event, kinds.Send) and isinstance(before, kinds.Step):
            begin = self.floor  # the earliest moment: it may arrive before the sender records it
        name = f"sample {sample}, step {event.step}" if isinstance(event, kinds.Step) else NAMES.get(kind, kind)
        self._slice(begin, end, name, kind if sample >= 0 else "warm-up", self._args(event))

    def _phase(self) -> str | None:
        return self.open[0]["name"] if self.open else None

    def _us(self, t: float) -> int:
        return round((t - self.zero) * 1e6)

    def _args(self, event: Event) -> dict[str, Any]:
        return event.model_dump(exclude={"t", "rank", "kind"}, exclude_unset=True)

    def _slice(self, begin: int, end: int, name: str, cat: str, args: dict[str, Any]) -> None:
        begin = max(min(begin, end - 1), self.floor)
        self.floor = max(end, begin + 1)
        self.entries.append(self.entry("X", begin, name, cat, dur=self.floor - begin, args=args))

    def _begin(self, t: int, name: str, cat: str, args: dict[str, Any]) -> None:
        self.floor = max(self.floor, t)
        self.open.append(self.entry("X", self.floor, name, cat, args=args))
        self.entries.append(self.open[-1])

    def _instant(self, t: int, name: str, cat: str, args: dict[str, Any]) -> None:
        self.entries.append(self.entry("i", t, name, cat, s="t", args=args))

    def _close_all(self, t: int) -> None:
        while self.open:
            self._close(t)

    def _close_video(self, t: int) -> None:
        if len(self.open) > 1:
            self._close(t)

    def _close(self, t: int) -> None:
        closed = self.open.pop()
        self.floor = max(self.floor, t, closed["ts"] + 1)
        closed["dur"] = self.floor - closed["ts"]


def _arrows(config: RunConfig, threads: Sequence[_Thread]) -> list[Entry]:
    """Two entries for each hand-off whose two ends were recorded."""
    entries: list[Entry] = []
    for thread in threads:
        replica, stage, member, _ = thread.place
        if stage == 0:
            continue
        senders = [threads[rank] for rank in config.layout.ranks_of(stage - 1, replica, member)]
        sends: dict[int, list[tuple[int, _Thread]]] = defaultdict(list)
        for sender in senders:
            for entry in sender.entries:
                if entry["name"] == "send":
                    sends[entry["args"]["sample"]].append((entry["ts"], sender))
        for take in [entry for entry in thread.entries if entry["name"] == "take"]:
            arrives = take["ts"] + take["dur"] - 1
            if left := [end for end in sends[take["args"]["sample"]] if end[0] <= arrives]:
                number, (ts, sender) = len(entries) // 2 + 1, left[-1]
                entries.append(sender.entry("s", ts, "hand-off", "hand-off", id=number))
                entries.append(thread.entry("f", arrives, "hand-off", "hand-off", id=number, bp="e"))
    return entries


def _names(threads: Sequence[_Thread], pids: dict[str, int]) -> list[Entry]:
    """Names and order of processes and threads."""
    entries: list[Entry] = []
    for name, pid in pids.items():
        entries.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        entries.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
    for thread in threads:
        place = {"ph": "M", "pid": pids[thread.process], "tid": thread.rank}
        entries.append({**place, "name": "thread_name", "args": {"name": thread.name}})
        entries.append({**place, "name": "thread_sort_index", "args": {"sort_index": thread.rank}})
    return entries
