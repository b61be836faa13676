"""Who computes which sample when, predicted; and the numbers that follow from a schedule, predicted or measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from vdpp_core.config import RunConfig
from vdpp_core.layout import Parallel


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


def spans(layout: Parallel, sizes: Sequence[int], num_samples: int, step_s: Sequence[float]) -> list[Span]:
    """The schedule of a run.

    A stage takes up a sample when the stage before has finished it and its own earlier sample is done; hand-offs
    overlap with computing and cost nothing here.

    Args:
        sizes: steps of each stage.
        step_s: seconds a step takes on each stage's ranks.
    """
    seconds = [size * step for size, step in zip(sizes, step_s, strict=True)]
    result = []
    for replica in range(layout.dp):
        free = [0.0] * layout.pp
        for sample in range(replica, num_samples, layout.dp):
            ready = 0.0
            for stage in range(layout.pp):
                start = max(ready, free[stage])
                ready = free[stage] = start + seconds[stage]
                ranks = [layout.rank(replica, stage, member) for member in range(layout.lockstep)]
                result += [Span(rank, sample, start, ready, seconds[stage]) for rank in ranks]
    return result


def even_makespan(total_steps: int, stages: int, num_samples: int, step_s: float) -> float:
    """S·t + (M-1)·⌈S/P⌉·t: fill by the first sample, then one sample each time the longest stage is done."""
    return (total_steps + (num_samples - 1) * math.ceil(total_steps / stages)) * step_s


def predict(config: RunConfig, step_s: Sequence[float]) -> dict[str, Any]:
    """The numbers of a run before it runs, from the seconds a step takes on each stage."""
    sizes, layout = [len(steps) for steps in config.stages()], config.layout
    at_work = (
        layout.model_copy(update={"dp": 1}) if config.fsdp_same_sample else layout
    )  # the first replica's ranks come first
    return numbers(spans(at_work, sizes, config.num_samples, step_s), layout)


def numbers(schedule: Sequence[Span], layout: Parallel) -> dict[str, Any]:
    """Throughput, latency, interval, makespan and utilisation of the samples that reached the last stage.

    The names of the user's documents keep the documents' definitions: `per_sample_times_ms` is the time between two
    samples of one replica (the first counted from the start of the clock, so it holds the fill), `avg_sample_time_s`
    leaves each replica's first sample out, and `throughput_samples_per_s` is 1 / average for a step pipeline but
    samples / makespan for data parallel. All else is as the README's vocabulary has it, the fill always included
    except in `steady_state_samples_per_s`.
    """
    at = {span: layout.place(span.rank) for span in schedule}
    last = {span.sample: span for span in schedule if at[span].stage == layout.pp - 1 and at[span].member == 0}
    first = {span.sample: span for span in schedule if at[span].stage == 0 and at[span].member == 0}
    finished = sorted(last, key=lambda sample: last[sample].end)
    if not finished:
        return {"samples_finished": 0}
    ends = [last[sample].end for sample in finished]
    makespan = ends[-1]
    busy = [sum(span.busy for span in schedule if span.rank == rank) for rank in range(layout.world_size)]
    utilisation = [seconds / makespan for seconds in busy]

    replicas = {at[last[sample]].replica for sample in finished}
    per_replica = [
        [last[sample].end for sample in finished if at[last[sample]].replica == replica] for replica in replicas
    ]
    gaps = [[b - a for a, b in zip([0.0, *times], times, strict=False)] for times in per_replica]
    steady = [(len(times) - 1) / (times[-1] - times[0]) for times in per_replica if len(times) > 1]
    after_first = [gap for times in gaps for gap in times[1:]]
    average = fmean(after_first or [times[0] for times in gaps])
    return {
        "samples_finished": len(finished),
        "first_sample_time_s": ends[0],
        "avg_sample_time_s": average,
        "throughput_samples_per_s": 1 / average if layout.dp == 1 else len(finished) / makespan,
        "per_sample_times_ms": [gap * 1000 for times in gaps for gap in times],
        "makespan_s": makespan,
        "samples_per_s": len(finished) / makespan,
        "steady_state_samples_per_s": sum(steady) if len(steady) == len(per_replica) else None,
        "latency_s": [last[sample].end - first[sample].start for sample in sorted(finished)],
        "interval_s": [b - a for a, b in itertools.pairwise(ends)],
        "utilisation_per_rank": utilisation,
        "bubble": 1 - fmean(utilisation),
    }
