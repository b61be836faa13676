"""Which rank keeps the others waiting: one policy for ranks, launchers and people who watch."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from vdpp_core.config import RunConfig
from vdpp_core.config.layout import Parallel
from vdpp_core.runs import processes, resuming, runfolder
from vdpp_core.runs.events import ENDS, Event, Follower, now, position
from vdpp_core.runs.resuming import Work

AT_WORK, WAITS = "at work", "waits"


LEAST_SILENCE_S = 2.0  # before anything is called a stall: a busy machine makes anybody silent for a moment


PERIOD_S = 0.5  # between two looks of who watches


JITTER_S = 0.05  # by which a look may be late


KEPT = 100  # of a rank's latest events


RECENT = 20  # steps, from which a rank's own pace is taken


@dataclass(frozen=True)
class Stall:
    """A rank that is silent for longer than its own pace explains.

    step_s is one of its own steps, 0 where that is not known; waiting are the ranks that are silent because of it;
    limit_s is the silence that ends the run.
    """

    rank: int
    sample: int | None
    step: int | None
    silent_s: float
    step_s: float
    waiting: tuple[int, ...]
    limit_s: float

    @property
    def cause(self) -> str:
        """What is said of a run that it ended."""
        return f"stalled: {self} (ended after {self.limit_s:g} s, timeout_s)"

    def __str__(self) -> str:
        known = (("sample", self.sample), ("step", self.step))
        at = ", ".join(f"{name} {value}" for name, value in known if value is not None)
        words = f"rank {self.rank} is silent for {self.silent_s:.1f} s" + (f" at {at}" if at else "")
        if self.step_s:
            words += f", {self.silent_s / self.step_s:.0f} of its own steps"
        if self.waiting:
            several = len(self.waiting) > 1
            words += f"; rank{'s' * several} {', '.join(map(str, self.waiting))} wait{'s' * (not several)} for it"
        return words


class Standstills:
    """When a watcher itself stood still: what lay between two of its looks beyond its period. It may have been the
    machine that did, and silence in that time counts for nobody."""

    def __init__(self) -> None:
        self.last: float | None = None
        self.found: list[tuple[float, float]] = []  # from, until

    def look(self, at: float, forget: float = 0.0) -> None:
        """Note a look; whoever is asked about was heard after `forget`."""
        if self.last is not None and at - self.last > PERIOD_S + JITTER_S:
            self.found.append((self.last + PERIOD_S, at))
        self.last = at
        self.found = [still for still in self.found if still[1] > forget]

    def silence_s(self, heard: float, at: float) -> float:
        """Seconds since something was heard at which the watcher was awake."""
        return at - heard - sum(until - max(begin, heard) for begin, until in self.found if until > heard)


def look(
    config: RunConfig,
    work: Work,
    events: Sequence[Event],
    at: float | None = None,
    still: Standstills | None = None,
) -> Stall | None:
    """The rank that is stalled at a time (default: now), if one is. What `still` holds is no silence.

    A rank is late when it is silent for `stall_steps` of its own steps. One that is stopped is named first, then the
    one at work that fell silent first: those that wait are late because of others. Where all of this machine's wait,
    one of another machine is named, but not before the run ends: its clock and pace are not known here.
    """
    at = now() if at is None else at
    logs: dict[int, list[Event]] = defaultdict(list)
    away = {event["rank"] for event in events if event.get("host", socket.gethostname()) != socket.gethostname()}
    for event in events:
        if event["rank"] not in away:
            logs[event["rank"]].append(event)
    last = {rank: log[-1] for rank, log in logs.items() if log[-1]["kind"] not in ENDS}
    still = still or Standstills()
    silence = {rank: still.silence_s(event["t"], at) for rank, event in last.items()}
    step_s = {rank: _step_s(logs[rank]) for rank in last}
    late = [rank for rank in last if silence[rank] > max(LEAST_SILENCE_S, config.stall_steps * step_s[rank])]
    late.sort(key=lambda rank: last[rank]["t"])
    started = all(any(event["kind"] == "clock" for event in log) for log in logs.values())
    states = {rank: _state(rank, last[rank], config, work) for rank in last if started}
    stopped = [rank for rank in late if logs[rank][0]["kind"] == "start" and processes.stands_still(logs[rank][0])]
    at_work = [rank for rank in late if states.get(rank) == AT_WORK]
    stuck = [rank for rank in late if states.get(rank)] if len(late) == len(last) else []
    elsewhere = [other for rank in stuck for other in needed(config, rank, last[rank]) if other not in logs]
    silent = late and len(late) == len(last) and min(silence.values()) > processes.PATIENCE_S
    culprits = stopped or elsewhere or at_work or stuck or (late if silent else [])
    if not culprits:
        return None
    rank = culprits[0]
    heard = rank if rank in logs else late[0]
    own, stage, silent_s = logs[heard], config.stages()[config.layout.place(rank).stage], silence[heard]
    longest = max(step_s[other] for other in late)
    limit_s = max(config.timeout_s, (5 if rank in stopped + at_work else 3 * config.total_steps) * longest)
    waiting = tuple(sorted(set(late) - {rank}))
    if rank in elsewhere and silent_s < limit_s:
        return None
    return Stall(rank, *position(own, stage), silent_s, step_s.get(rank, 0.0), waiting, limit_s)


def _state(rank: int, event: Event, config: RunConfig, work: Work) -> str | None:
    """Whether a rank that wrote this event last is at work on a step, or waits for another stage.

    None: something else, that no pace is known of, as loading a decoder when all of its samples are done.
    """
    layout, kind = config.layout, event["kind"]
    replica, stage, member = layout.place(rank)
    if not config.samples(replica, work.latents) and not config.padding(replica, work.latents):
        return None
    final = event.get("sample") in config.samples(replica, work.latents)[-1:]
    last_stage = stage + 1 == layout.pp
    if kind == "clock":
        return AT_WORK if stage == 0 else WAITS
    if kind in ("step", "pad") and event["step"] == config.stages()[stage][-1]:
        if kind == "pad" or (last_stage and member > 0 and final):
            return None
        return AT_WORK if last_stage and (member == 0 or layout.pp == 1) else WAITS
    if kind in ("take", "step", "pad"):
        return AT_WORK
    return WAITS if kind in ("send", "sample") and layout.pp > 1 and not final else None


def needed(config: RunConfig, rank: int, last: Event) -> list[int]:
    """The ranks without which a rank that wrote this event last cannot go on."""
    layout = config.layout
    replica, stage, member = layout.place(rank)
    steps = config.stages()[stage]
    if last["kind"] == "take" or (last["kind"] in ("step", "pad") and last["step"] != steps[-1]):
        return mates(layout, rank)
    if last["kind"] in ("step", "pad") and stage + 1 < layout.pp:
        return [layout.rank(replica, stage + 1, member)]
    if last["kind"] in ("clock", "send", "sample", "step", "pad") and stage > 0:
        return [layout.rank(replica, stage - 1, member)]
    return list(range(layout.world_size))  # all ranks meet: before the clock, before decoding, at the end


def mates(layout: Parallel, rank: int) -> list[int]:
    """The ranks that compute each of their steps together with this one, itself among them."""
    replica, stage, _ = layout.place(rank)
    replicas = range(layout.dp) if layout.fsdp else [replica]
    return [layout.rank(each, stage, mate) for each in replicas for mate in range(layout.lockstep)]


def _step_s(own: Sequence[Event]) -> float:
    """One of a rank's own steps, from the last ones; 0 before its first."""
    seconds = [event["seconds"] for event in own[-3 * RECENT :] if event["kind"] in ("warm", "step", "pad")]
    return median(seconds[-RECENT:]) if seconds else 0.0


class Watchdog:
    """Looks for a stalled rank again and again, seldom enough to take no time from the ranks, and keeps little."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.config = folder, RunConfig.read(folder)
        self.work, self.follower = resuming.work(folder, self.config), Follower(folder)
        self.logs: dict[int, list[Event]] = defaultdict(list)
        self.next_look, self.still = 0.0, Standstills()

    def events(self) -> list[Event]:
        """Of each rank the first ones, until the clock, and the latest ones: what `look` wants to know."""
        for event in self.follower.fresh():
            self.logs[event["rank"]].append(event)
        for rank, log in self.logs.items():
            if len(log) > 2 * KEPT:
                self.logs[rank] = [e for e in log[:-KEPT] if e["kind"] in ("start", "clock")] + log[-KEPT:]
        return sorted((event for log in self.logs.values() for event in log), key=lambda event: event["t"])

    def look(self, silence_s: float = LEAST_SILENCE_S) -> Stall | None:
        """A stall, if one is seen now; nothing is read as long as every rank wrote something within `silence_s`.

        To be called every PERIOD_S.
        """
        began, longest_s = now(), runfolder.longest_silence_s(self.folder)
        self.still.look(began, forget=began - longest_s - silence_s)
        if began < self.next_look or longest_s < silence_s:
            return None
        stall = look(self.config, self.work, self.events(), still=self.still)
        self.next_look = now() + 20 * (now() - began)
        return stall

    def over(self) -> Stall | None:
        """A stall that ends the run."""
        stall = self.look(self.config.timeout_s)
        return stall if stall and stall.silent_s > stall.limit_s else None


def unheard(folder: Path, silence_s: float, surely: bool = False) -> dict[int, str]:
    """A rank of another machine, or one that never started, that a rank of this one waits for -> what is known of it.

    Empty where there is none, or where a rank of this machine is what the others wait for; but where another machine
    is `surely` silent, its first rank is named while nobody waits for it yet.
    """
    config, events = RunConfig.read(folder), runfolder.read_events(folder)
    here = {e["rank"]: e for e in events if e["kind"] == "start" and e["host"] == socket.gethostname()}
    elsewhere = set(range(config.layout.world_size)) - here.keys()
    if not elsewhere or not here or any(processes.stands_still(start) for start in here.values()):
        return {}
    words = f"nothing was heard of it for {silence_s:.0f} s (timeout_s)"
    for rank in sorted(here):
        own = [event for event in events if event["rank"] == rank and event["kind"] not in ENDS[1:]]
        steps = config.stages()[config.layout.place(rank).stage]
        for other in needed(config, rank, own[-1]):
            if other in elsewhere:
                sample, step = position(own, steps)
                at = "" if sample is None else f" at sample {sample}" + ("" if step is None else f", step {step}")
                return {other: f"{words}; rank {rank} waits for it{at}"}
    return {min(elsewhere): words} if surely else {}
