"""The numbers that follow from who computed which sample when, predicted or measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vdpp_core.config.layout import Parallel

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Span:
    """One sample on one rank: from its first step there to its last, in seconds since the clock started.

    `busy` is the time spent in steps; less than end - start where something came between them.
    """

    rank: int
    sample: int
    start: float
    end: float
    busy: float


def numbers(spans: Sequence[Span], layout: Parallel) -> dict[str, Any]:
    """Throughput, latency, interval, makespan and utilisation of the samples that reached the last stage.

    The names of the user's documents keep the documents' definitions: `per_sample_times_ms` is the time between two
    samples of one replica (the first counted from the start of the clock, so it holds the fill), `avg_sample_time_s`
    leaves each replica's first sample out, and `throughput_samples_per_s` is 1 / average for a step pipeline but
    samples / makespan for data parallel. All else is as the README's vocabulary has it, the fill always included
    except in `steady_state_samples_per_s`.
    """
    places = [layout.place(rank) for rank in range(layout.world_size)]
    first: dict[int, Span] = {}
    last: dict[int, Span] = {}
    busy, taken, left = np.zeros(len(places)), np.full(len(places), np.nan), np.full(len(places), np.nan)
    for span in spans:
        place = places[span.rank]
        busy[span.rank] += span.busy
        taken[span.rank] = np.fmin(taken[span.rank], span.start)
        left[span.rank] = np.fmax(left[span.rank], span.end)
        if place.stage == 0 and place.member == 0:
            first[span.sample] = span
        if place.stage == layout.pp - 1 and place.member == 0:
            last[span.sample] = span
    finished = sorted(first.keys() & last.keys())
    if not finished:
        return {"samples_finished": 0}
    return numbers_of(
        layout,
        replica=np.array([places[last[sample].rank].replica for sample in finished]),
        latency=np.array([last[sample].end - first[sample].start for sample in finished]),
        ended=np.array([last[sample].end for sample in finished]),
        busy=busy,
        taken=taken,
        left=left,
    )


def numbers_of(
    layout: Parallel, replica: Array, latency: Array, ended: Array, busy: Array, taken: Array, left: Array
) -> dict[str, Any]:
    """Of samples: replica, latency, end. Of ranks: seconds busy, when the first was taken up and the last one left."""
    ends, makespan = np.sort(ended), float(ended.max())
    order = np.lexsort((ended, replica))
    same = np.diff(replica[order]) == 0
    gaps = np.diff(ended[order], prepend=0.0)
    first = np.append(True, ~same)
    gaps[first] = ended[order][first]
    counts = np.unique(replica, return_counts=True)[1]
    firsts, lasts = ended[order][first], ended[order][np.append(~same, True)]
    steady = float(((counts - 1) / (lasts - firsts)).sum()) if counts.min() > 1 else None
    average = float((gaps[~first] if same.any() else gaps).mean())
    utilisation = busy / makespan
    return {
        "samples_finished": len(ended),
        "first_sample_time_s": float(ends[0]),
        "avg_sample_time_s": average,
        "throughput_samples_per_s": 1 / average if layout.dp == 1 else len(ended) / makespan,
        "per_sample_times_ms": (gaps * 1000).tolist(),
        "makespan_s": makespan,
        "samples_per_s": len(ended) / makespan,
        "steady_state_samples_per_s": steady,
        "latency_s": latency.tolist(),
        "interval_s": np.diff(ends).tolist(),
        "fill_s": float(np.nanmax(taken)),
        "drain_s": makespan - float(np.nanmin(left)),
        "utilisation_per_rank": utilisation.tolist(),
        "bubble": 1 - float(utilisation.mean()),
    }


def others_at_work(spans: Sequence[Span]) -> Array:
    """(spans,): how many other ranks were at work during each of them, on average. A rank has one span at a time."""
    start, end = (np.array([getattr(span, name) for span in spans]) for name in ("start", "end"))
    times = np.concatenate([start, end])
    order = np.argsort(times)
    at_work = np.cumsum(np.repeat([1.0, -1.0], len(spans))[order])
    done = np.append(0.0, np.cumsum(at_work[:-1] * np.diff(times[order])))  # seconds of work of all ranks until then
    until = np.empty_like(done)
    until[order] = done
    return (until[len(spans) :] - until[: len(spans)]) / (end - start) - 1
