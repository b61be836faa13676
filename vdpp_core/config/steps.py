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


def split_at(segments: Sequence[int], stages: int, weights: Sequence[float] | None = None) -> list[range]:
    """Cut steps into stages none of which holds steps of two segments, so that the slowest one is as short as possible.

    Args:
        segments: number of steps of each, in order, such as those of a model's experts.
        weights: as of `split`.

    Raises:
        ValueError: fewer stages than segments, or what `split` refuses.
    """
    if stages < len(segments):
        raise ValueError(f"stages {stages}: must be at least the number of segments, {len(segments)}")
    speeds = [1.0] * stages if weights is None else [float(weight) for weight in weights]
    best: list[int] = []
    slowest = float("inf")
    for cuts in itertools.combinations(range(1, stages), len(segments) - 1):
        shares = [speeds[begin:end] for begin, end in itertools.pairwise((0, *cuts, stages))]
        if any(len(share) > steps for share, steps in zip(shares, segments, strict=True)):
            continue
        pieces = (_in_proportion(steps, len(share), share, 0.0) for share, steps in zip(shares, segments, strict=True))
        sizes = list(itertools.chain.from_iterable(pieces))
        if (longest := max(size / speed for size, speed in zip(sizes, speeds, strict=True))) < slowest:
            best, slowest = sizes, longest
    if not best:
        raise ValueError(f"stages {stages}: must be at most the number of steps, {sum(segments)}")
    bounds = [0, *itertools.accumulate(best)]
    return [range(first, last) for first, last in itertools.pairwise(bounds)]


def ranks_for(segments: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Share ranks among segments of steps so that the largest number of steps per rank is as small as possible.

    Raises:
        ValueError: fewer ranks than segments.
    """
    if ranks < len(segments):
        raise ValueError(f"ranks {ranks}: must be at least the number of segments, {len(segments)}")
    shares = [1] * len(segments)
    for _ in range(ranks - len(segments)):
        busiest = max(range(len(segments)), key=lambda each: segments[each] / shares[each])
        shares[busiest] += 1
    return tuple(shares)


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
