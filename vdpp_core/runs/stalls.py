"""Which rank keeps the others waiting, when that is reported, and when it ends the run.

The one policy for the ranks themselves, launchers and people who watch. Callers only act on what it decides.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from vdpp_core.config import RunConfig
from vdpp_core.config.layout import Parallel
from vdpp_core.runs import event_types as kinds
from vdpp_core.runs import processes
from vdpp_core.runs.event_types import Event, hosts, position
from vdpp_core.runs.events import Follower, now
from vdpp_core.runs.run import Run, Work

PERIOD_S = 0.5  # between two looks of a watcher
JITTER_S = 0.05  # by which a look may be late
LEAST_SILENCE_S = 2.0  # before anything is called a stall: on a busy machine any rank is silent for a moment
LAST_WORDS_S = 5.0  # after the last word of one rank or machine, for the others to have theirs
KEPT = 100  # of a rank's latest events
RECENT = 20  # steps that define a rank's pace


@dataclass(frozen=True)
class Stall:
    """A rank that is silent for longer than its own pace explains.

    heard:    the rank whose last event tells: itself, or one that waits for it where it is on another machine
    sample, step: where that rank is
    silent_s: seconds since that event
    step_s:   seconds of one of its own steps, 0 where not known
    waiting:  the ranks that are silent because of it
    limit_s:  the silence that ends the run
    """

    rank: int
    heard: int
    sample: int | None
    step: int | None
    silent_s: float
    step_s: float
    waiting: tuple[int, ...]
    limit_s: float

    @property
    def ends_run(self) -> bool:
        """Whether the silence is too long to go on."""
        return self.silent_s > self.limit_s

    @property
    def cause(self) -> str:
        """The cause of failure of a run that the stall ended."""
        own = f"stalled: {self} (ended after {self.limit_s:g} s, timeout_s)"
        return own if self.heard == self.rank else unheard(self.silent_s, self.heard, self.sample, self.step)

    def __str__(self) -> str:
        at = _at(self.sample, self.step) if self.heard == self.rank else ""
        words = f"rank {self.rank} has been silent for {self.silent_s:.1f} s{at}"
        if self.step_s:
            words += f", {self.silent_s / self.step_s:.0f} of its own steps"
        if self.waiting:
            several = len(self.waiting) > 1
            words += f"; rank{'s' * several} {', '.join(map(str, self.waiting))} wait{'s' * (not several)} for it"
        return words


def unheard(silence_s: float, waiting: int | None = None, sample: int | None = None, step: int | None = None) -> str:
    """The cause of failure where a rank of another machine is silent, and which rank waits for it where."""
    waits = "" if waiting is None else f"; rank {waiting} waits for it{_at(sample, step)}"
    return f"nothing was heard of it for {silence_s:.0f} s (timeout_s){waits}"


def _at(sample: int | None, step: int | None) -> str:
    known = [f"{name} {value}" for name, value in (("sample", sample), ("step", step)) if value is not None]
    return f" at {', '.join(known)}" if known else ""


class Standstills:
    """When a watcher itself stood still: the time between two of its looks beyond its period.

    The whole machine may have stood still, so silence in that time counts for no rank.
    """

    def __init__(self) -> None:
        self.last: float | None = None
        self.found: list[tuple[float, float]] = []  # from, until

    def look(self, at: float, forget: float = 0.0) -> None:
        """Note a look at a time. Standstills that ended before `forget` are not asked about any more."""
        if self.last is not None and at - self.last > PERIOD_S + JITTER_S:
            self.found.append((self.last + PERIOD_S, at))
        self.last = at
        self.found = [still for still in self.found if still[1] > forget]

    def silence_s(self, heard: float, at: float) -> float:
        """Seconds between `heard` and `at` in which the watcher was awake."""
        return at - heard - sum(until - max(begin, heard) for begin, until in self.found if until > heard)


def look(
    config: RunConfig,
    work: Work,
    events: Sequence[Event],
    at: float | None = None,
    still: Standstills | None = None,
) -> Stall | None:
    """The rank that is stalled at a time (default: now), or None. The time in `still` does not count as silence.

    A rank is late when it is silent for `stall_steps` of its own steps. A stopped process is named first, then the
    busy rank that fell silent first: ranks that wait are late because of others. Where all ranks of this machine wait,
    one of another machine is named, but only when the run ends: its clock and pace are not known here.
    """
    at, still = now() if at is None else at, still or Standstills()
    logs: dict[int, list[Event]] = defaultdict(list)
    away = {rank for rank, host in hosts(events).items() if host != socket.gethostname()}
    for event in events:
        if event.rank not in away:
            logs[event.rank].append(event)
    last = {rank: log[-1] for rank, log in logs.items() if not isinstance(log[-1], kinds.LastWord)}
    silence = {rank: still.silence_s(event.t, at) for rank, event in last.items()}
    step_s = {rank: _step_s(logs[rank]) for rank in last}
    late = [rank for rank in last if silence[rank] > max(LEAST_SILENCE_S, config.stall_steps * step_s[rank])]
    late.sort(key=lambda rank: last[rank].t)
    started = all(kinds.of(log, kinds.Clock) for log in logs.values())
    states = {rank: _state(rank, last[rank], config, work) for rank in last if started}
    stopped = [rank for rank in late if isinstance(first := logs[rank][0], kinds.Start) and processes.is_stopped(first)]
    decoding = [rank for rank in last if states.get(rank) == "decodes"]
    free = [rank for rank in late if not set(mates(config.layout, rank)) & set(decoding)]
    busy = [rank for rank in free if states.get(rank) == "busy"]
    stuck = [rank for rank in late if states.get(rank)] if len(late) == len(last) and not decoding else []
    elsewhere = [other for rank in stuck for other in needed(config, rank, last[rank]) if other not in logs]
    silent = late and len(late) == len(last) and min(silence.values()) > processes.PATIENCE_S
    culprits = stopped or elsewhere or busy or stuck or ((decoding or late) if silent else [])
    if not culprits:
        return None
    rank = culprits[0]
    heard = rank if rank in logs else late[0]
    at_last, silent_s = position(logs[heard], config.steps_of(heard)), silence[heard]
    longest = max(step_s[other] for other in late)
    limit_s = max(config.timeout_s, (5 if rank in stopped + busy else 3 * config.total_steps) * longest)
    if rank in elsewhere and silent_s < limit_s:
        return None
    return Stall(rank, heard, *at_last, silent_s, step_s.get(rank, 0.0), tuple(sorted({*late} - {rank})), limit_s)


def _state(rank: int, event: Event, config: RunConfig, work: Work) -> Literal["busy", "waits", "decodes"] | None:
    """Whether a rank with this last event computes a step, waits for another stage, or decodes between two samples.

    None: it does something else whose pace is not known, such as loading a decoder after its last sample.
    """
    layout = config.layout
    place = layout.place(rank)
    samples, stage, member = config.samples_at(place, work.latents), place.stage, place.member
    if not samples and not config.padding(place, work.latents):
        return None
    final = isinstance(event, kinds.OfSample) and event.sample in samples[-1:]
    last_stage = stage + 1 == layout.pp
    if isinstance(event, kinds.Clock):
        return "busy" if stage == 0 else "waits"
    if isinstance(event, kinds.AnyStep) and event.step == config.steps_of(rank)[-1]:
        if isinstance(event, kinds.Pad) or (last_stage and member > 0 and final):
            return None
        return "busy" if last_stage and (member == 0 or layout.pp == 1) else "waits"
    if isinstance(event, kinds.Take | kinds.AnyStep):
        return "busy"
    if isinstance(event, kinds.Finished | kinds.Decode | kinds.Chunk) and config.decode == "as-ready" and not final:
        return "decodes"
    if isinstance(event, kinds.Video) and event.sample not in samples[:-1]:  # nothing follows
        return None
    idle = isinstance(event, kinds.Send | kinds.Finished | kinds.Video)
    return "waits" if idle and layout.pp > 1 and not final else None


def needed(config: RunConfig, rank: int, last: Event) -> list[int]:
    """The ranks without which a rank with this last event cannot go on."""
    layout = config.layout
    replica, stage, member, _ = layout.place(rank)
    if isinstance(last, kinds.Take) or (isinstance(last, kinds.AnyStep) and last.step != config.steps_of(rank)[-1]):
        return mates(layout, rank)
    if isinstance(last, kinds.AnyStep) and stage + 1 < layout.pp:
        return layout.ranks_of(stage + 1, replica, member)
    if isinstance(last, kinds.Clock | kinds.Send | kinds.Finished | kinds.Video | kinds.AnyStep) and stage > 0:
        return layout.ranks_of(stage - 1, replica, member)
    return list(range(layout.world_size))  # all ranks meet: before the clock, before decoding, at the end


def mates(layout: Parallel, rank: int) -> list[int]:
    """The ranks that compute each of their steps together with this one, which is included."""
    replica, stage, _, copy = layout.place(rank)
    if layout.fsdp:
        return layout.ranks_of(stage)
    return [layout.rank(replica, stage, mate, copy) for mate in range(layout.lockstep)]


def _step_s(own: Sequence[Event]) -> float:
    """Seconds of one of a rank's recent steps; 0 before its first."""
    seconds = [event.seconds for event in own[-3 * RECENT :] if isinstance(event, kinds.Warm | kinds.AnyStep)]
    return median(seconds[-RECENT:]) if seconds else 0.0


class Watchdog:
    """Decides for one watcher of a run: who is stalled, and when the run is over.

    A watcher asks every PERIOD_S. Reading is rare enough to take no time from the ranks, and little is kept.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.work, self.follower = run, run.work, Follower(run.folder)
        self.logs: dict[int, list[Event]] = defaultdict(list)
        self.next_look, self.still = 0.0, Standstills()

    def events(self) -> list[Event]:
        """What `look` needs, sorted by time: of each rank the start, the clock and the latest events."""
        for event in self.follower.fresh():
            self.logs[event.rank].append(event)
        for rank, log in self.logs.items():
            if len(log) > 2 * KEPT:
                self.logs[rank] = [e for e in log[:-KEPT] if isinstance(e, kinds.Start | kinds.Clock)] + log[-KEPT:]
        return sorted((event for log in self.logs.values() for event in log), key=lambda event: event.t)

    def look(self, silence_s: float = LEAST_SILENCE_S) -> Stall | None:
        """The present stall. Nothing is read as long as every rank wrote something within `silence_s`."""
        began, longest_s = now(), self.run.silence_s()
        self.still.look(began, forget=began - longest_s - silence_s)
        if began < self.next_look or longest_s < silence_s:
            return None
        stall = look(self.run.config, self.work, self.events(), still=self.still)
        self.next_look = now() + 20 * (now() - began)
        return stall

    def fatal(self) -> Stall | None:
        """The stall that ends the run, for a watcher that reports no others: it reads nothing within `timeout_s`."""
        stall = self.look(self.run.config.timeout_s)
        return stall if stall and stall.ends_run else None

    def ended_badly(self) -> bool | None:
        """Whether a rank has ended badly and the others have had time for their last words; None where none has."""
        events = self.events()
        if not kinds.of(events, kinds.BadEnd):
            return None
        return now() - events[-1].t > LAST_WORDS_S
