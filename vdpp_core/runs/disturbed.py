"""What disturbed the times of a run: ranks that stood still, a machine that slept, other runs on the same cores.

Times are judged by the run itself: what a rank took from when all that it needed was there, against what it usually
takes. Waiting for others disturbs nothing, whoever the others are.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

from vdpp_core.config import RunConfig
from vdpp_core.config.execution import Execution
from vdpp_core.config.layout import IN_FLIGHT
from vdpp_core.runs import other_runs
from vdpp_core.runs.events import Event, clock_starts
from vdpp_core.runs.stalls import LEAST_SILENCE_S, mates

FAR = 10  # times the usual spread
SLEPT_S = 1.0
MOST_LINES = 3
COUNT_EVERY_S = 30.0  # looking through all processes takes tens of milliseconds
_SIGMA = 1.4826  # standard deviations of a normal distribution in its median absolute deviation
_WORK = ("take", "step", "pad", "send", "sample")


class Surroundings:
    """What a rank notes while the clock runs: whether its machine slept, and one rank of each machine how many ranks of
    other runs were in the way of this one at most."""

    def __init__(self, execution: Execution, counts: bool) -> None:
        self.execution, self.counts = execution, counts
        self.others, self.next_count = 0, float("inf")

    def begin(self) -> dict[str, Any]:
        """What the event says that starts the clock."""
        self.others = 0
        return self.so_far()

    def look(self) -> None:
        """To be called now and then by a thread that has time."""
        if time.monotonic() > self.next_count:
            self._count()

    def so_far(self) -> dict[str, Any]:
        """What the last event says."""
        self._count()
        return {"asleep_s": asleep_s(), "other_ranks": self.others if self.counts else None}

    def _count(self) -> None:
        if self.counts:
            self.others = max(self.others, other_runs.in_the_way(self.execution))
            self.next_count = time.monotonic() + COUNT_EVERY_S


def reasons(config: RunConfig, events: Sequence[Event], cores: int) -> list[str]:
    """A line on whatever disturbed the times of a run; none for one that was left in peace.

    Args:
        events: of all ranks, in the order of time.
        cores: of each machine. Ranks that are more than those take turns by design.
    """
    lines = _lines(_standstills(config, events, cores))
    for host, seconds in _slept(events).items():
        lines.append(f"{host or 'the machine'} slept for {seconds:.0f} s while it ran")
    if others := other_ranks(events):
        was = "was" if others == 1 else "were"
        lines.append(f"{other_runs.ranks_of_other_runs(others)} {was} at work on its cores")
    return lines


def other_ranks(events: Sequence[Event]) -> int | None:
    """Ranks of other runs that were at work on the cores of one of its machines; None where nobody looked."""
    return max((event["other_ranks"] for event in events if "other_ranks" in event), default=None)


def unfit(result: Mapping[str, Any]) -> str | None:
    """Why the times of a result say nothing about other runs; None if they do.

    Ranks of other runs are no such reason: steps beside them are longer, and stay so as long as they are there.
    """
    lines = result.get("disturbed") or []
    return lines[0] if len(lines) > bool(result.get("other_ranks_at_work")) else None


def _slept(events: Sequence[Event]) -> dict[str | None, float]:
    """Machine -> seconds that it slept while the clock ran."""
    host = {event["rank"]: event.get("host") for event in events if event["kind"] == "start"}
    before = {event["rank"]: event["asleep_s"] for event in events if event["kind"] == "clock" and "asleep_s" in event}
    slept: dict[str | None, float] = defaultdict(float)
    for event in events:
        rank = event["rank"]
        if event["kind"] == "done" and "asleep_s" in event and rank in before:
            slept[host.get(rank)] = max(slept[host.get(rank)], event["asleep_s"] - before[rank])
    several = len(slept) > 1
    return {name if several else None: seconds for name, seconds in slept.items() if seconds > SLEPT_S}


@dataclass
class _Piece:
    """What a rank did between two of its events, in seconds since the clock started."""

    event: Event
    begin: float
    end: float
    usual_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def place(self) -> str:
        """Where it was."""
        kind, sample, step = (self.event.get(name) for name in ("kind", "sample", "step"))
        at = {"clock": "when the clock started", "pad": f"at step {step} of a sample that only keeps others company"}
        at |= {"step": f"at sample {sample}, step {step}", "take": f"before sample {sample}"}
        return at.get(str(kind), f"after the last step of sample {sample}")


@dataclass
class _Log:
    """The pieces of one rank while the clock ran, and the seconds of its steps before."""

    pieces: list[_Piece] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)

    def of(self, *kinds: str) -> list[_Piece]:
        return [piece for piece in self.pieces if piece.event["kind"] in kinds]


def _standstills(config: RunConfig, events: Sequence[Event], cores: int) -> list[_Piece]:
    """The pieces that took far longer than usual, by when they began."""
    logs = _logs(events)
    for ready in [_ready(config, rank, logs) for rank in logs]:
        for piece, at in ready:
            piece.begin = max(piece.begin, at)
    host = {event["rank"]: event.get("host") for event in events if event["kind"] == "start"}
    threads = {e["rank"]: e["threads"] for e in events if e["kind"] == "start" and e["device"].startswith("cpu")}
    found = []
    for rank, log in logs.items():
        busy = sum(number for other, number in threads.items() if host[other] == host.get(rank))
        found += _far_beyond(log, crowd=max(1.0, busy / cores))
    return sorted(found, key=lambda piece: piece.begin)


def _logs(events: Sequence[Event]) -> dict[int, _Log]:
    """Each piece begins where the one before ended; a padding step where it says: nothing tells of its hand-off."""
    zero, logs = clock_starts(events), dict[int, _Log]()
    last: dict[int, float] = {}
    for event in events:
        rank, kind = event["rank"], event["kind"]
        if rank not in zero:
            continue
        t = event["t"] - zero[rank]
        if kind == "clock":
            last[rank] = 0.0
        if rank in last and kind in ("clock", *_WORK):
            begin = max(last[rank], t - event["seconds"]) if kind == "pad" else last[rank]
            logs.setdefault(rank, _Log()).pieces.append(_Piece(event, begin, t))
            last[rank] = t
        elif kind in ("warm", "step"):
            logs.setdefault(rank, _Log()).warm.append(event["seconds"])
    for log in logs.values():
        while log.pieces and log.pieces[-1].event["kind"] in ("take", "sample"):  # nobody waits for its end
            log.pieces.pop()
    return logs


def _ready(config: RunConfig, rank: int, logs: Mapping[int, _Log]) -> list[tuple[_Piece, float]]:
    """When others had done what the pieces of a rank need: its mates in a step begun theirs, the stage before sent a
    sample, the stage after taken one, so that there was room for the next."""
    layout, own = config.layout, logs[rank]
    replica, stage, member = layout.place(rank)
    found = []
    together = [logs[mate].of("step", "pad") for mate in mates(layout, rank) if mate in logs]
    for number, piece in enumerate(own.of("step", "pad")):
        found.append((piece, max(steps[number].begin for steps in together if number < len(steps))))
    if stage > 0:
        before = logs.get(layout.rank(replica, stage - 1, member), _Log())
        sent = {piece.event["sample"]: piece.end for piece in before.of("send")}
        for piece in own.of("take"):
            found.append((piece, sent.get(piece.event["sample"], piece.begin + piece.event["seconds"])))
    if stage + 1 < layout.pp:
        after, sends = logs.get(layout.rank(replica, stage + 1, member), _Log()), own.of("send")
        taken = {piece.event["sample"]: piece.end for piece in after.of("take")}
        for piece, earlier in zip(sends[IN_FLIGHT:], sends, strict=False):
            found.append((piece, taken.get(earlier.event["sample"], piece.begin + piece.event["seconds"])))
    return found


def _far_beyond(log: _Log, crowd: float) -> list[_Piece]:
    """The pieces of a rank that took far longer than others of their kind and than its steps, which take up to `crowd`
    times as long while all ranks are at work."""
    found, steps = [], log.of("step", "pad")
    step_s, spread = _usual([piece.seconds for piece in steps] + log.warm)
    for pieces in (steps, *(log.of(kind) for kind in ("clock", "take", "send", "sample"))):
        usual = step_s
        if pieces is not steps:
            own_s, spread = _usual([piece.seconds for piece in pieces])
            usual = max(usual, own_s)
        limit = crowd * usual + max(LEAST_SILENCE_S, usual / 2, FAR * spread)
        for piece in pieces:
            if piece.seconds > limit:
                piece.usual_s = usual
                found.append(piece)
    return found


def _usual(seconds: Sequence[float]) -> tuple[float, float]:
    """The median and the spread around it; nothing is usual of what happened once."""
    if len(seconds) < 2:
        return 0.0, 0.0
    usual = median_low(seconds)
    return usual, _SIGMA * median_low([abs(each - usual) for each in seconds])


def _lines(found: Sequence[_Piece]) -> list[str]:
    """A line for what happened at one time, to whichever ranks; the longest ones first."""
    moments: list[list[_Piece]] = []
    until = 0.0
    for piece in found:
        if not moments or piece.begin >= until:
            moments.append([])
        moments[-1].append(piece)
        until = max(until, piece.end)
    worst = [(max(moment, key=lambda piece: piece.seconds), moment) for moment in moments]
    worst.sort(key=lambda each: -each[0].seconds)
    lines = []
    for piece, moment in worst[:MOST_LINES]:
        ranks = sorted({each.event["rank"] for each in moment})
        who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        lines.append(f"{who} took {piece.seconds:.1f} s {piece.place} (usually {piece.usual_s:.2g} s)")
    if more := worst[MOST_LINES:]:
        lines.append(f"and {len(more)} more like these, {sum(piece.seconds for piece, _ in more):.0f} s together")
    return lines


def asleep_s() -> float:
    """Seconds that this machine has slept, up to a constant; the clock of all other times stands still in sleep. Where
    no clock goes on in sleep this is the constant alone."""
    awake_or_not = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # on a Mac the latter goes on
    return time.clock_gettime(awake_or_not) - time.perf_counter()
