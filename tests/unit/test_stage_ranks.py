"""Layouts with a number of ranks for each stage: places, partners, samples, and the numbers of such runs."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from vdpp_core import ConfigError, Parallel, RunConfig
from vdpp_core.cli import arguments
from vdpp_core.config.layout import Place
from vdpp_core.runs.metrics import Span, numbers

LAYOUTS = [
    Parallel(dp=dp, stage_ranks=ranks, cfg=cfg)
    for dp in (1, 3)
    for cfg in (1, 2)
    for ranks in [(1, 3), (2, 1), (3, 2), (2, 4, 3), (6, 4), (5,), (1, 1)]
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_and_places_are_each_others_inverse(layout: Parallel) -> None:
    places = [
        Place(replica, stage, member, copy)
        for replica in range(layout.dp)
        for stage in range(layout.pp)
        for copy in range(layout.copies[stage])
        for member in range(layout.lockstep)
    ]
    assert [layout.place(rank) for rank in range(layout.world_size)] == places
    assert [layout.rank(*place) for place in places] == list(range(layout.world_size))
    assert sorted(itertools.chain(*map(layout.ranks_of, range(layout.pp)))) == list(range(layout.world_size))
    assert layout.ranks_of(0, replica=0, member=0) == [copy * layout.lockstep for copy in range(layout.copies[0])]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_partners_are_those_who_have_a_sample_in_common(layout: Parallel) -> None:
    for stage, other in itertools.permutations(range(layout.pp), 2):
        if abs(stage - other) != 1:
            continue
        met = defaultdict[int, set[int]](set)
        for turn in range(60):
            met[turn % layout.copies[stage]].add(turn % layout.copies[other])
        for copy in range(layout.copies[stage]):
            assert layout.partners(stage, copy, other) == sorted(met[copy])
            assert all(copy in layout.partners(other, each, stage) for each in met[copy])
    assert layout.partners(0, 0, -1) == layout.partners(layout.pp - 1, 0, layout.pp) == []


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("num_samples", [1, 7, 13])
def test_every_stage_of_a_sample_is_on_one_rank(layout: Parallel, num_samples: int) -> None:
    config = RunConfig(model="dummy", total_steps=8, num_samples=num_samples, guidance_scale=3.0, parallel=layout)
    for fsdp in (False, True):
        run = config.replace(parallel=Parallel(**layout.model_dump() | {"fsdp": fsdp}))
        for stage in range(layout.pp):
            places = [layout.place(rank) for rank in layout.ranks_of(stage)]
            own = [[*run.samples_at(place)] for place in places if place.member == 0]
            assert sorted(itertools.chain(*own)) == list(range(num_samples))
            work = {len(run.samples_at(place)) + run.padding(place) for place in places}
            assert len(work) == 1 or not fsdp  # ranks that share parameters compute as often


def test_a_layout_without_stage_ranks_is_as_before() -> None:
    plain, ones = Parallel(dp=2, pp=3), Parallel(dp=2, stage_ranks=(1, 1, 1))
    assert [plain.place(rank) for rank in range(6)] == [ones.place(rank) for rank in range(6)]
    assert (plain.world_size, plain.groups, plain.copies) == (ones.world_size, ones.groups, ones.copies)
    assert (str(plain), str(Parallel(dp=2, stage_ranks=(1, 3)))) == ("dp 2 × pp 3", "dp 2 × pp 1+3")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"stage_ranks": (1, 0)}, "stage_ranks 1 0: must be 2 whole numbers, each at least 1"),
        ({"stage_ranks": ()}, "stage_ranks '': must be 1 whole number"),
        ({"stage_ranks": (1, 3), "pp": 3}, "stage_ranks 1 3: must be 3 whole numbers"),
        ({"stage_ranks": ("1", "x")}, "stage_ranks 1 x: must be a valid integer"),
        ({"stage_ranks": (1.5, 2)}, "stage_ranks 1.5 2: must be a valid integer"),
        ({"stage_ranks": 3}, "stage_ranks 3: must be a valid tuple"),
        (
            {"stage_ranks": (1, 5000)},
            "stage_ranks 1 5000: dp × pp × cfg × frames × tp must be at most 4096 ranks, not 5001",
        ),
        ({"stage_ranks": (-1, 2)}, "stage_ranks -1 2: must be 2 whole numbers"),
    ],
)
def test_what_are_no_ranks_of_stages(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Parallel(**arguments)
    assert str(refused.value).startswith(words)


def test_copies_of_the_last_stage_count_as_replicas_in_the_numbers() -> None:
    """Two of them finish six samples in pairs, which a stream of one would do at no time apart."""
    layout = Parallel(stage_ranks=(1, 2))
    spans = [Span(0, sample, sample / 10, (sample + 1) / 10, 0.1) for sample in range(6)]
    spans += [Span(1 + sample % 2, sample, 1.0 + sample // 2, 2.0 + sample // 2, 1.0) for sample in range(6)]
    found = numbers(spans, layout)
    assert found["steady_state_samples_per_s"] == pytest.approx(2.0)
    assert found["per_sample_times_ms"] == [2000.0, 1000.0, 1000.0] * 2
    assert (found["avg_sample_time_s"], found["throughput_samples_per_s"]) == (1.0, 6 / 4)
    pair = numbers([span for span in spans if span.sample < 2], layout)
    assert (pair["steady_state_samples_per_s"], pair["avg_sample_time_s"]) == (None, 2.0)
    assert all(np.isfinite(pair["interval_s"]))


def test_ranks_that_swap_are_replicas_unless_flags_say_otherwise() -> None:
    swapping = {"model": "experts", "swap": "disk"}
    assert arguments.run_config(swapping, 2, "world_size").layout == Parallel(dp=2)
    assert arguments.run_config(swapping | {"cfg": "2"}, 4, "world_size").layout == Parallel(dp=2, cfg=2)
    with pytest.raises(ConfigError, match="swap disk: only for ranks that run all steps"):
        arguments.run_config(swapping | {"pp": "2"}, 2, "world_size")
