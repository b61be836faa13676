"""How steps are divided among the stages of a step pipeline."""

import heapq
import itertools
from collections.abc import Sequence


def split(total_steps: int, stages: int, weights: Sequence[float] | None = None, last_busy: float = 0.0) -> list[range]:
    """Cut steps 0 … total_steps-1 (0 is the noisiest) into contiguous stages, none of them empty.

    Without weights, sizes differ by at most one and the larger stages come first. With weights (relative speeds of the
    ranks), steps are distributed so that the slowest stage, which sets the interval, is as short as possible.

    Args:
        last_busy: how long the last stage does something else for each sample, in steps at weight 1.

    Raises:
        ValueError: fewer steps than stages, or weights that are not one positive number per stage.
    """
    if stages < 1:
        raise ValueError(f"stages {stages}: must be at least 1")
    if total_steps < stages:
        raise ValueError(f"total_steps {total_steps}: must be at least the number of stages, {stages}")
    if weights is None and not last_busy:
        sizes = [total_steps // stages + (stage < total_steps % stages) for stage in range(stages)]
    else:
        speeds = [1.0] * stages if weights is None else [float(weight) for weight in weights]
        sizes = _in_proportion(total_steps, stages, speeds, last_busy)
    bounds = [0, *itertools.accumulate(sizes)]
    return [range(first, last) for first, last in itertools.pairwise(bounds)]


def _in_proportion(total_steps: int, stages: int, speeds: Sequence[float], last_busy: float) -> list[int]:
    if len(speeds) != stages:
        raise ValueError(f"weights {speeds}: must have one number per stage, {stages} of them")
    if not all(0 < speed < float("inf") for speed in speeds):
        raise ValueError(f"weights {speeds}: must all be positive and finite")
    sizes, busy = [1] * stages, [*[0.0] * (stages - 1), last_busy]
    soonest = [(2 / speed + busy[stage], stage) for stage, speed in enumerate(speeds)]  # time with one more step
    heapq.heapify(soonest)
    for _ in range(total_steps - stages):
        stage = soonest[0][1]
        sizes[stage] += 1
        heapq.heapreplace(soonest, ((sizes[stage] + 1) / speeds[stage] + busy[stage], stage))
    return sizes
