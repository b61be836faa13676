"""What disturbed the times of a run: ranks that stood still, a machine that slept, other runs on the same cores.

Times are judged by the run itself: the time a rank took once everything that it needed was there, against the time it
usually takes. Waiting for other ranks is not a disturbance.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median_low
from typing import Any

from vdpp_core.config import RunConfig
from vdpp_core.config.execution import Execution
from vdpp_core.config.layout import IN_FLIGHT
from vdpp_core.runs import event_types as kinds
from vdpp_core.runs import other_runs
from vdpp_core.runs.event_types import Event, clock_starts, hosts
from vdpp_core.runs.stalls import LEAST_SILENCE_S, mates

FAR = 10  # times the usual spread
SLEPT_S = 1.0
MOST_LINES = 3
COUNT_EVERY_S = 5.0  # going through all processes takes tens of milliseconds
_SIGMA = 1.4826  # standard deviation of a normal distribution / its median absolute deviation
_Timed = kinds.Clock | kinds.Take | kinds.AnyStep | kinds.Send | kinds.Finished


class Surroundings:
    """What a rank records about its machine while the clock runs: how long it slept, and ranks of other runs on it.

    asleep_s:    seconds that the machine has slept, up to a constant
    other_ranks: the most ranks of other runs that shared cores with this one, counted by one rank of each machine
    device_use:  mean share of the time in which the device computed, where `device_use` returns samples of it
    """

    def __init__(self, execution: Execution, counts: bool, device_use: Callable[[], float | None]) -> None:
        self.execution, self.counts, self.device_use = execution, counts, device_use
        self.others, self.next_count = 0, float("inf")
        self.shares: list[float] = []

    def begin(self) -> dict[str, Any]:
        """The facts for the event that starts the clock."""
        self.others = 0
        self.shares.clear()
        return self.so_far()

    def look(self) -> None:
        """Sample the device, and count again where it is time. A thread that is not busy calls this now and then."""
        if (share := self.device_use()) is not None:
            self.shares.append(share)
        if time.monotonic() > self.next_count:
            self._count()

    def so_far(self) -> dict[str, Any]:
        """The facts for the last event."""
        self._count()
        return {
            "asleep_s": asleep_s(),
            "other_ranks": self.others if self.counts else None,
            "device_use": fmean(self.shares) if self.shares else None,
        }

    def _count(self) -> None:
        if self.counts:
            self.others = max(self.others, other_runs.in_the_way(self.execution))
            self.next_count = time.monotonic() + COUNT_EVERY_S


def reasons(config: RunConfig, events: Sequence[Event], cores: int) -> list[str]:
    """One line for each thing that disturbed the times of a run.

    Args:
        events: of all ranks, sorted by time.
        cores: of each machine. Where a machine has more ranks than cores, they take turns by design.
    """
    lines = _lines(_standstills(config, events, cores))
    for host, seconds in _slept(events).items():
        lines.append(f"{host or 'the machine'} slept for {seconds:.0f} s during the run")
    if others := other_ranks(events):
        lines.append(f"{other_runs.ranks_of_other_runs(others)} used the same cores")
    return lines


def other_ranks(events: Sequence[Event]) -> int | None:
    """The most ranks of other runs that shared cores with this one; None where nothing was recorded."""
    counted = [event.other_ranks for event in events if isinstance(event, kinds.Clock | kinds.Done)]
    return max((count for count in counted if count is not None), default=None)


def _slept(events: Sequence[Event]) -> dict[str | None, float]:
    """Machine -> seconds that it slept while the clock ran. The only machine of a run has no name here."""
    host = hosts(events)
    before = {clock.rank: clock.asleep_s for clock in kinds.of(events, kinds.Clock)}
    slept: dict[str | None, float] = defaultdict(float)
    for done in kinds.of(events, kinds.Done):
        began = before.get(done.rank)
        if done.asleep_s is not None and began is not None:
            place = host.get(done.rank)
            slept[place] = max(slept[place], done.asleep_s - began)
    several = len(slept) > 1
    return {name if several else None: seconds for name, seconds in slept.items() if seconds > SLEPT_S}


@dataclass
class _Piece:
    """What a rank did between two of its events, in seconds since the clock started."""

    event: _Timed
    begin: float
    end: float
    usual_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def sample(self) -> int | None:
        return self.event.sample if isinstance(self.event, kinds.OfSample) else None

    def __str__(self) -> str:
        """Where the rank was."""
        match self.event:
            case kinds.Clock():
                return "when the clock started"
            case kinds.Pad():
                return f"at step {self.event.step} of a padding sample"
            case kinds.Step():
                return f"at sample {self.sample}, step {self.event.step}"
            case kinds.Take():
                return f"before sample {self.sample}"
        return f"after the last step of sample {self.sample}"


@dataclass
class _Log:
    """The pieces of one rank while the clock ran, and the seconds of its steps before."""

    pieces: list[_Piece] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)

    def of(self, *kinds: type[Event]) -> list[_Piece]:
        return [piece for piece in self.pieces if isinstance(piece.event, kinds)]


def _standstills(config: RunConfig, events: Sequence[Event], cores: int) -> list[_Piece]:
    """The pieces that took far longer than usual, sorted by when they began."""
    logs = _logs(events)
    for ready in [_ready(config, rank, logs) for rank in logs]:
        for piece, at in ready:
            piece.begin = max(piece.begin, at)
    host = hosts(events)
    threads = {start.rank: start.threads for start in kinds.of(events, kinds.Start) if start.device.startswith("cpu")}
    found = []
    for rank, log in logs.items():
        busy = sum(number for other, number in threads.items() if host[other] == host.get(rank))
        found += _far_beyond(log, crowd=max(1.0, busy / cores))
    return sorted(found, key=lambda piece: piece.begin)


def _logs(events: Sequence[Event]) -> dict[int, _Log]:
    """Each piece begins where the one before ended; a padding step where it says, for its hand-off has no event."""
    zero, logs = clock_starts(events), dict[int, _Log]()
    last: dict[int, float] = {}
    for event in events:
        rank = event.rank
        if rank not in zero:
            continue
        log, t = logs.setdefault(rank, _Log()), event.t - zero[rank]
        if isinstance(event, kinds.Clock):
            last[rank] = 0.0
        if rank in last and isinstance(event, _Timed):
            begin = max(last[rank], t - event.seconds) if isinstance(event, kinds.Pad) else last[rank]
            log.pieces.append(_Piece(event, begin, t))
            last[rank] = t
        elif rank in last and isinstance(
            event, kinds.Encode | kinds.Swapped | kinds.Decode | kinds.Chunk | kinds.Video
        ):
            last[rank] = t  # between two samples
        elif isinstance(event, kinds.Warm | kinds.Step):
            log.warm.append(event.seconds)
    for log in logs.values():
        while log.pieces and isinstance(log.pieces[-1].event, kinds.Take | kinds.Finished):  # no rank waits for its end
            log.pieces.pop()
    return logs


def _ready(config: RunConfig, rank: int, logs: Mapping[int, _Log]) -> list[tuple[_Piece, float]]:
    """When everything was there that the pieces of a rank need.

    A step needs its mates, receiving a sample the stage before, and handing one on room at the stage after.
    """
    layout, own = config.layout, logs[rank]
    replica, stage, member, _ = layout.place(rank)
    found = []
    together = [logs[mate].of(kinds.Step, kinds.Pad) for mate in mates(layout, rank) if mate in logs]
    for number, piece in enumerate(own.of(kinds.Step, kinds.Pad)):
        found.append((piece, max(steps[number].begin for steps in together if number < len(steps))))
    if stage > 0:
        before = [logs.get(other, _Log()) for other in layout.ranks_of(stage - 1, replica, member)]
        sent = {piece.sample: piece.end for log in before for piece in log.of(kinds.Send)}
        found += [(piece, sent.get(piece.sample, _waited_until(piece))) for piece in own.of(kinds.Take)]
    if stage + 1 < layout.pp:
        after = [logs.get(other, _Log()) for other in layout.ranks_of(stage + 1, replica, member)]
        sends, taken = own.of(kinds.Send), {piece.sample: piece.end for log in after for piece in log.of(kinds.Take)}
        for piece, earlier in zip(sends[IN_FLIGHT:], sends, strict=False):
            found.append((piece, taken.get(earlier.sample, _waited_until(piece))))
    return found


def _waited_until(piece: _Piece) -> float:
    assert isinstance(piece.event, kinds.Take | kinds.Send)
    return piece.begin + piece.event.seconds


def _far_beyond(log: _Log, crowd: float) -> list[_Piece]:
    """The pieces of a rank that took far longer than others of their kind and than its steps.

    Those take up to `crowd` times as long while all ranks are busy.
    """
    found: list[_Piece] = []
    steps = log.of(kinds.Step, kinds.Pad)
    step_s, _ = of_steps = _usual([piece.seconds for piece in steps] + log.warm)
    for pieces in (
        steps,
        *(log.of(kind) for kind in (kinds.Clock, kinds.Take, kinds.Send, kinds.Finished)),
    ):
        own_s, spread = of_steps if pieces is steps else _usual([piece.seconds for piece in pieces])
        usual = max(step_s, own_s)
        limit = crowd * usual + max(LEAST_SILENCE_S, usual / 2, FAR * spread)
        found += [replace(piece, usual_s=usual) for piece in pieces if piece.seconds > limit]
    return found


def _usual(seconds: Sequence[float]) -> tuple[float, float]:
    """The median and the spread around it; what happened only once has no usual time."""
    if len(seconds) < 2:
        return 0.0, 0.0
    usual = median_low(seconds)
    return usual, _SIGMA * median_low([abs(each - usual) for each in seconds])


def _lines(found: Sequence[_Piece]) -> list[str]:
    """One line for what happened at one time, to whichever ranks; the longest ones first."""
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
        ranks = sorted({each.event.rank for each in moment})
        who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        lines.append(f"{who} took {piece.seconds:.1f} s {piece} (usually {piece.usual_s:.2g} s)")
    if more := worst[MOST_LINES:]:
        lines.append(f"and {len(more)} more like these, {sum(piece.seconds for piece, _ in more):.0f} s in total")
    return lines


def asleep_s() -> float:
    """Seconds that this machine has slept, up to a constant. All other times are read from a clock that stops in sleep.

    Where no clock runs on in sleep this is the constant alone.
    """
    awake_or_not = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # on a Mac the latter runs on
    return time.clock_gettime(awake_or_not) - time.perf_counter()
