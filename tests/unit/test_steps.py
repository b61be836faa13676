"""Which steps each stage runs."""

import itertools

import pytest

from vdpp_core import split
from vdpp_core.config.steps import split_at


def sizes(*arguments):
    return [len(steps) for steps in split(*arguments)]


def compositions(total, parts):
    """All ways to write a total as so many positive sizes."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield [b - a for a, b in itertools.pairwise((0, *cuts, total))]


@pytest.mark.parametrize("stages", range(1, 13))
@pytest.mark.parametrize("total_steps", [12, 13, 25, 28, 30, 50, 99])
def test_stages_are_contiguous_complete_and_even(total_steps, stages):
    stages_steps = split(total_steps, stages)
    assert len(stages_steps) == stages
    assert [step for steps in stages_steps for step in steps] == list(range(total_steps))
    lengths = [len(steps) for steps in stages_steps]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


def test_known_splits():
    assert sizes(28, 7) == [4] * 7
    assert sizes(25, 7) == [4, 4, 4, 4, 3, 3, 3]
    assert split(7, 2) == [range(0, 4), range(4, 7)]
    assert sizes(5, 5) == [1] * 5


def test_weights_give_shares_in_proportion():
    assert sizes(28, 2, [3, 1]) == [21, 7]
    assert sizes(28, 2, [1, 3]) == [7, 21]
    assert sizes(28, 4, [2, 2, 1, 2]) == [8, 8, 4, 8]
    assert sizes(25, 7, [1] * 7) == sizes(25, 7)
    assert sizes(28, 2, [30, 10]) == sizes(28, 2, [0.3, 0.1]) == [21, 7]


@pytest.mark.parametrize("last_busy", [0.5, 1, 3.7, 20])
@pytest.mark.parametrize("weights", [(1, 1, 1), (1, 2, 3), (4, 1, 2)])
def test_the_busiest_stage_is_as_short_as_possible_with_what_the_last_one_does_besides(weights, last_busy):
    def busiest(sizes):
        times = [size / weight for size, weight in zip(sizes, weights, strict=True)]
        return max(*times[:-1], times[-1] + last_busy)

    found = sizes(13, 3, weights, last_busy)
    assert busiest(found) == pytest.approx(min(map(busiest, compositions(13, 3))))
    assert sizes(13, 3, found) == found  # as --stage-weights they give themselves


def test_a_slow_rank_keeps_one_step():
    assert sizes(10, 2, [1000, 1]) == [9, 1]


@pytest.mark.parametrize(
    ("total_steps", "weights"),
    [
        (12, (3, 1)),
        (12, (1, 2, 3)),
        (13, (5, 4, 1)),
        (14, (1, 1, 0.3, 2)),
        (11, (0.1, 10, 1)),
        (15, (2, 7, 1, 8)),
        (9, (1, 1.5, 1, 1)),
    ],
)
def test_the_slowest_stage_is_as_fast_as_whole_steps_allow(total_steps, weights):
    def interval(lengths):
        return max(size / weight for size, weight in zip(lengths, weights, strict=True))

    best = min(interval(lengths) for lengths in compositions(total_steps, len(weights)))
    weighted = split(total_steps, len(weights), weights)
    assert [step for steps in weighted for step in steps] == list(range(total_steps))
    assert min(len(steps) for steps in weighted) >= 1
    assert interval([len(steps) for steps in weighted]) == pytest.approx(best)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((3, 4), "total_steps 3"),
        ((0, 1), "total_steps 0"),
        ((3, 0), "stages 0"),
        ((3, -1), "stages -1"),
        ((8, 2, [1]), "one number per stage, 2"),
        ((8, 2, [1, 1, 1]), "one number per stage, 2"),
        ((8, 2, [1, 0]), "positive and finite"),
        ((8, 2, [1, -2]), "positive and finite"),
        ((8, 2, [1, float("inf")]), "positive and finite"),
        ((8, 2, [1, float("nan")]), "positive and finite"),
    ],
)
def test_what_cannot_be_split_is_said(arguments, named):
    with pytest.raises(ValueError, match=named):
        split(*arguments)


SEGMENTS = [(5, 7), (1, 9), (8, 2), (3, 4, 2), (1, 1, 6), (6,)]


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("weights", [(1, 1), (1, 3), (1, 1, 1), (2, 1, 3), (1, 4, 1, 2), (3, 1, 1, 1, 2)])
def test_no_stage_crosses_a_boundary_and_the_slowest_is_as_fast_as_possible(segments, weights):
    stages, total, ends = len(weights), sum(segments), set(itertools.accumulate(segments))
    if not len(segments) <= stages <= total:
        with pytest.raises(ValueError, match="stages"):
            split_at(segments, stages, weights)
        return

    def slowest(lengths):
        return max(size / weight for size, weight in zip(lengths, weights, strict=True))

    found = split_at(segments, stages, weights)
    assert [step for steps in found for step in steps] == list(range(total))
    assert all(found)
    assert ends <= {steps.stop for steps in found}
    possible = [sizes for sizes in compositions(total, stages) if ends <= set(itertools.accumulate(sizes))]
    assert slowest([len(steps) for steps in found]) == pytest.approx(min(map(slowest, possible)))


def test_stages_of_segments_without_weights():
    assert [len(steps) for steps in split_at((5, 15), 4)] == [5, 5, 5, 5]
    assert split_at((2, 4), 2) == [range(0, 2), range(2, 6)]
