"""The numbers that follow from which rank computed which sample when, predicted or measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from vdpp_core.config.layout import Parallel

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Span:
    """One sample on one rank, from its first step there to its last, in seconds since the clock started.

    `busy` is the time spent in steps: less than end - start where something came between them.

    Attributes:
        beside: "" for steps; what else the rank did for the sample, "decoding" until its videos are written, or
            "encoding"; or, for no sample in particular (-1), "swapping" experts.
    """

    rank: int
    sample: int
    start: float
    end: float
    busy: float
    beside: str = ""


def numbers(spans: Sequence[Span], layout: Parallel, batch: int = 1) -> dict[str, Any]:
    """Throughput, latency, interval, makespan and utilisation of the samples that reached the last stage.

    The names of the documents (docs/benchmark.md) are defined as their figures imply: `per_sample_times_ms` is the time
    between two samples of one replica (the first counted from the start of the clock, so it holds the fill),
    `avg_sample_time_s` leaves each replica's first sample out, and `throughput_samples_per_s` is 1 / average for a step
    pipeline but samples / makespan for data parallel. Copies of the last stage, which finish samples side by side,
    count as replicas here. Everything else follows the README's vocabulary; the fill is always included except in
    `steady_state_samples_per_s`. The names carry the units.

    Args:
        batch: number of samples that a rank takes through an expert before it loads the next. They finish in bursts, so
            the average and the steady state count from the end of a replica's first batch.
    """
    in_steps = [span for span in spans if not span.beside]
    frame = pd.DataFrame(in_steps, columns=["rank", "sample", "start", "end", "busy"])
    places = pd.DataFrame(map(layout.place, frame["rank"]), columns=["replica", "stage", "member", "copy"])
    speaks = frame.join(places).query("member == 0").groupby(["stage", "sample"])
    each = speaks.agg({"replica": "first", "start": "min", "end": "max"})  # a swapping rank has a sample twice
    first, last = (each[each.index.get_level_values(0) == stage].droplevel(0) for stage in (0, layout.pp - 1))
    finished = first.index.intersection(last.index).sort_values()
    if finished.empty:
        return {"samples_finished": 0}
    first, last = first.loc[finished], last.loc[finished]
    ranks = frame.groupby("rank").agg({"busy": "sum", "start": "min", "end": "max"}).reindex(range(layout.world_size))
    return numbers_of(
        layout,
        replica=last["replica"].to_numpy(),
        latency=(last["end"] - first["start"]).to_numpy(),
        ended=last["end"].to_numpy(),
        busy=ranks["busy"].fillna(0.0).to_numpy(),
        taken=ranks["start"].to_numpy(),
        left=ranks["end"].to_numpy(),
        batch=batch,
    )


def numbers_of(
    layout: Parallel,
    replica: Array,
    latency: Array,
    ended: Array,
    busy: Array,
    taken: Array,
    left: Array,
    batch: int = 1,
) -> dict[str, Any]:
    """The numbers of `numbers`, from arrays.

    Args:
        layout: that of the run.
        replica: (samples,) the replica of each, in the order of their numbers.
        latency: (samples,) seconds from its first step to its last.
        ended: (samples,) seconds from the start of the clock to its last step.
        busy: (ranks,) seconds in steps.
        taken: (ranks,) when the first sample's first step began; NaN for a rank without samples.
        left: (ranks,) when the last sample's last step ended; NaN for a rank without samples.
        batch: as of `numbers`.
    """
    ends, makespan = np.sort(ended), float(ended.max())
    stream = replica * layout.copies[-1] + _turns(replica) % layout.copies[-1]
    order = np.lexsort((ended, stream))
    same = np.diff(stream[order]) == 0
    gaps = np.diff(ended[order], prepend=0.0)
    first = np.append(True, ~same)
    gaps[first] = ended[order][first]
    begins, counts = np.flatnonzero(first), np.unique(stream, return_counts=True)[1]
    later = np.arange(len(ended)) - np.repeat(begins, counts) >= batch
    since, lasts = (ended[order][begins + nth - 1] for nth in (np.minimum(batch, counts), counts))
    steady = float(((counts - batch) / (lasts - since)).sum()) if counts.min() > batch else None
    average = float((gaps[later] if later.any() else gaps).mean())
    utilisation = busy / makespan
    return {
        "samples_finished": len(ended),
        "first_sample_time_s": float(ends[0]),
        "avg_sample_time_s": average,
        "throughput_samples_per_s": 1 / average if layout.dp * layout.copies[-1] == 1 else len(ended) / makespan,
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


def _turns(replica: Array) -> Array:
    """The number of each sample among those of its replica."""
    turns = np.empty(len(replica), dtype=int)
    for own in (replica == each for each in np.unique(replica)):
        turns[own] = np.arange(own.sum())
    return turns
