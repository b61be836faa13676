"""Why a run failed: the rank that failed first, where it was, and the cause."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any

from vdpp_core.config import RunConfig
from vdpp_core.runs import event_types as kinds
from vdpp_core.runs import processes
from vdpp_core.runs.event_types import Event, position

# How ranks end when another one is gone: by NCCL's watchdog, or by torchrun's agent.
_CONSEQUENCES = (-signal.SIGABRT, -signal.SIGTERM, 128 + signal.SIGTERM)


def first_cause(config: RunConfig, events: Sequence[Event], exits: Mapping[int, int | str]) -> dict[str, Any] | None:
    """The rank that failed first, where it was and why; None where every rank was ended from outside.

    In this order: the earliest error that is not the loss of another rank; a rank that is gone without a last word; a
    rank without a last word that another one lost, or the only such rank where the lost one is not known; a rank that
    was terminated and that another one lost; a rank killed by SIGABRT, with which NCCL's watchdog ends ranks that wait
    for a lost one, or by SIGTERM, with which torchrun's agent ends the others; the first loss.
    """
    ranks = range(config.layout.world_size)
    events = [event for event in events if event.rank in ranks]
    errors = sorted(kinds.of(events, kinds.Error), key=lambda event: (event.t, event.rank))
    faults = [event for event in errors if event.lost_rank is None]
    terminated, losses = kinds.last_of(events, kinds.Terminated), {event.lost_rank for event in errors}
    silent = sorted(set(ranks) - kinds.last_of(events, kinds.LastWord).keys())
    starts = kinds.last_of(events, kinds.Start)
    gone = [rank for rank in silent if rank in exits]
    gone += [rank for rank in silent if rank in starts and processes.has_vanished(starts[rank])]
    gone += [rank for rank in silent if rank in losses or (losses == {"unknown"} and len(silent) == 1)]
    ended = sorted((rank for rank in gone if exits.get(rank) in _CONSEQUENCES), key=lambda rank: _turn(exits[rank]))
    without_a_word = "ended without a word: killed, out of memory, or crashed"
    suspects = [
        *((event.rank if event.blamed is None else event.blamed, event.error) for event in faults),
        *((rank, _ending(exits.get(rank, without_a_word))) for rank in gone if rank not in ended),
        *((event.lost_rank, "ended from outside by a signal") for event in errors if event.lost_rank in terminated),
        *((rank, _ending(exits[rank])) for rank in ended),
        *((event.rank, event.error) for event in errors),
        *((rank, _ending(exits[rank])) for rank in sorted(exits, key=lambda rank: _turn(exits[rank]))),
    ]
    if not suspects:
        return None
    rank, cause = suspects[0]
    sample, step = position([event for event in events if event.rank == rank], config.steps_of(rank))
    oom = {"oom": faults[0].oom} if faults and faults[0].oom is not None else {}
    return {"rank": rank, "sample": sample, "step": step, "cause": cause, **oom}


def _turn(how: int | str) -> int:
    """Of ends that may all be consequences, the lower number is the likelier cause."""
    return _CONSEQUENCES.index(how) + 1 if how in _CONSEQUENCES else 0


def _ending(how: int | str) -> str:
    """How a process ended, in words."""
    if isinstance(how, str):
        return how
    if how >= 0:
        return f"ended with exit code {how}"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-how, f'signal {-how}')}"
