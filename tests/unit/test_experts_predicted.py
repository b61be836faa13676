"""Predictions of models with experts: stages with several ranks, ranks that swap, and who wins."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from tests.families import FAMILIES, folder
from vdpp_core.__main__ import main
from vdpp_core.cli import predict
from vdpp_core.config import Parallel, RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.layout import IN_FLIGHT
from vdpp_core.config.steps import ranks_for
from vdpp_core.engine import preflight
from vdpp_core.predict import costs, memory, planner, rates, schedule
from vdpp_core.predict.rates import Link, Loading, Rates
from vdpp_core.predict.schedule import Seconds
from vdpp_core.runs import metrics

KNOWN = Rates(1e9, Link(1e12), "made up")


def wan(ranks=1, **changes):
    call = {name: value for name, value in FAMILIES["wan-2.2"].call.items() if "scale" in name}
    size = {"height": 32, "width": 48, "num_frames": 9}
    config = RunConfig(model_id=str(folder("wan-2.2")), prompt="a", call=call, device="cpu", **size, **changes)
    return preflight.complete(config, ranks)


def simulated(layout, sizes, samples, step, hop):
    """Start of each sample on each stage, one event after the other, as the worker does it."""
    copies, stages = layout.copies, layout.pp
    start, left, arrived = {}, {}, {}
    for sample, stage in itertools.product(range(samples), range(stages)):
        ready = [0.0]
        if stage:
            ready.append(arrived[sample, stage])
        earlier = sample - copies[stage]
        if earlier >= 0:
            ready.append(left[earlier, stage])
        start[sample, stage] = max(ready)
        left[sample, stage] = start[sample, stage] + sizes[stage] * step
        if stage + 1 < stages:
            before = arrived.get((earlier, stage + 1), -math.inf)  # a rank sends one sample at a time
            arrived[sample, stage + 1] = max(left[sample, stage], before) + hop
    return start


@pytest.mark.parametrize("ranks", [(1, 3), (3, 1), (2, 3), (1, 2, 4), (4, 4), (2,)])
def test_copies_of_a_stage_take_samples_in_turn(ranks):
    layout, samples = Parallel(stage_ranks=ranks), 11
    sizes = [2 * count for count in ranks]  # in proportion: no stage is ever far ahead of the next
    found = schedule.make(layout, sizes, samples, Seconds(1.0, hop=0.25))
    wanted = simulated(layout, sizes, samples, 1.0, 0.25)
    for stage in range(layout.pp):
        assert found.starts(stage)[:, 0].tolist() == pytest.approx([wanted[each, stage] for each in range(samples)])
    for span in found.spans():
        place = layout.place(span.rank)
        assert place.copy == span.sample % ranks[place.stage]
    numbers = found.numbers()
    busy = [sum(span.busy for span in found.spans() if span.rank == rank) for rank in range(layout.world_size)]
    assert numbers["utilisation_per_rank"] == pytest.approx([each / numbers["makespan_s"] for each in busy])


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (3, 1), (3, 2)])
def test_a_fast_stage_stops_where_the_next_has_no_room(ranks):
    """A rank hands on only when all but IN_FLIGHT - 1 of its earlier messages have been received."""
    layout, samples = Parallel(stage_ranks=ranks), 40
    found = schedule.make(layout, [1, 20], samples, Seconds(1.0))
    begun = found.starts(1)[:, 0]
    for sample, starts in enumerate(found.starts(0)[:, 0]):
        oldest = sample - ranks[0] * (IN_FLIGHT + 1)  # must have been received: its receiver began the one before
        received = oldest - ranks[1]
        if received >= 0:
            assert starts >= begun[received]
    assert found.starts(0)[-1, 0] > 0.5 * begun[-1]


def test_replicas_of_uneven_stages_and_numbers_of_a_schedule():
    layout = Parallel(dp=2, stage_ranks=(1, 2), cfg=2)
    found = schedule.make(layout, [1, 2], 5, Seconds(1.0))
    ranks = {span.rank for span in found.spans()}
    assert ranks == set(range(12))
    assert {layout.place(span.rank).replica for span in found.spans() if span.sample % 2} == {1}
    assert len(found.numbers()["utilisation_per_rank"]) == 12


def test_experts_are_swapped_once_or_twice_for_each_video():
    config = RunConfig(total_steps=10, num_samples=5, parallel=Parallel(dp=2), swap="disk")
    config = config.replace(experts=(("high", 4), ("low", 6)))
    step = Seconds(1.0, swap=3.0)
    one = schedule.predict(config, step)
    # rank 0 has samples 0, 2, 4: high is there at first; each video loads low, and each but the first high again
    assert one.finished_s.tolist() == [13, 13, 29, 29, 45]
    assert [span.start for span in one.swaps if span.rank == 0] == [4, 13, 20, 29, 36]
    batched = schedule.predict(config.replace(swap_batch=3), step)
    assert batched.finished_s.tolist() == [12 + 3 + 6, 8 + 3 + 6, 12 + 3 + 12, 8 + 3 + 12, 12 + 3 + 18]
    assert len([span for span in batched.swaps if span.rank == 0]) == 1
    assert batched.numbers()["latency_s"] == [21, 17, 23, 19, 25]
    assert one.numbers()["utilisation_per_rank"] == pytest.approx([30 / 45, 20 / 45])


def test_a_stage_needs_the_memory_of_its_expert():
    alone, stages = wan(), wan(4, parallel=Parallel(stage_ranks=(1, 3)))
    both, single = memory.predict(alone), memory.per_stage(stages)
    sizes = costs.experts(alone)
    assert both.parameters == sum(sizes.values())
    assert [peak.parameters for peak in single] == list(sizes.values())
    swapping = wan(parallel=Parallel(), swap="disk")
    assert memory.predict(swapping).parameters == max(sizes.values())
    sharded = wan(8, parallel=Parallel(stage_ranks=(2, 6), fsdp=True))
    assert [peak.parameters for peak in memory.per_stage(sharded)] == pytest.approx(
        [sizes["transformer"] / 2, sizes["transformer_2"] / 6], rel=0.1
    )
    assert memory.needed(stages) < memory.needed(alone)
    facts = memory.report(stages, None)
    assert facts["peak_gb_per_stage"] == [peak.total / 1e9 for peak in single]


def test_a_spanning_stage_costs_the_mean_of_its_experts():
    config = wan(2, parallel=Parallel(pp=2), split="even")
    assert [len(names) for names in map(config.experts_of, range(2))] == [2, 1]
    assert len({cost.flops for cost in costs.per_stage(config)}) == 1  # experts of one architecture
    parts = costs.per_stage(wan(parallel=Parallel(), swap="disk"))
    assert len(parts) == 2


@pytest.mark.parametrize(
    ("steps", "ranks", "shares"), [((13, 27), 4, (1, 3)), ((2, 2), 4, (2, 2)), ((1, 9, 3), 5, (1, 3, 1))]
)
def test_ranks_in_proportion_to_steps(steps, ranks, shares):
    assert ranks_for(steps, ranks) == shares
    longest = max(count / own for count, own in zip(steps, shares, strict=True))
    every = (each for each in itertools.product(range(1, ranks + 1), repeat=len(steps)) if sum(each) == ranks)
    assert longest == min(max(count / own for count, own in zip(steps, each, strict=True)) for each in every)
    with pytest.raises(ValueError, match="at least the number of segments"):
        ranks_for(steps, len(steps) - 1)


@pytest.fixture(scope="module")
def table():
    config = wan(num_samples=8, total_steps=20)
    between = (memory.needed(config.replace(swap="disk", parallel=Parallel())) + memory.needed(config)) / 2
    capacity_gib = between / 2**30 / (1 - planner.SPARE)
    return config, capacity_gib, planner.advise(config, 3, "throughput", KNOWN, capacity_gib)


def test_a_plan_has_the_rivals_of_a_step_pipeline(table):
    _, _, found = table
    layouts = set(found["layout"])
    assert {"pp 2", "pp 1+2", "dp 2 swap disk", "dp 2 swap host batch 4", "dp 2 × fsdp"} <= layouts
    dp = found[found["layout"] == "dp 2"].iloc[0]
    assert np.isnan(dp["makespan_s"])
    assert "mostly parameters" in dp["reason"] or "every rank holds" in dp["reason"]
    best = planner.rivals(found).set_index("way")
    assert best.loc["all experts on every rank", "value"] != best.loc["all experts on every rank", "value"]  # NaN
    assert best["times_best"].min() == 1
    assert "each stage holds one expert" in best.loc["step pipeline", "reason"]
    found.attrs["goal"], goal = "memory", found.attrs["goal"]
    assert np.isnan(planner.rivals(found).set_index("way").loc["all experts on every rank", "times_best"])
    found.attrs["goal"] = goal


def test_why_a_swapping_rank_does_not_fit():
    found = planner.advise(wan(num_samples=2, total_steps=4), 2, "memory", KNOWN, 1e-4).set_index("layout")
    assert found.loc["dp 2 swap disk", "reason"].endswith("usable: one expert and all activations")
    assert found.loc["dp 2", "reason"].endswith("splitting steps or samples saves no memory")


def test_ways_that_were_not_counted_are_called_excluded(capsys):
    found = planner.advise(wan(num_samples=2, total_steps=4), 1, "throughput", KNOWN)
    predict._print_rivals(planner.rivals(found), "throughput", found.attrs["experts"])
    said = " ".join(capsys.readouterr().out.split())
    assert "one expert at a time, from disk: excluded: fits without swapping, which would only slow it down" in said


def test_at_the_break_even_loading_time_stages_and_swapping_are_as_fast(table):
    config, capacity_gib, found = table
    rival = planner.rivals(found).set_index("way").loc["one expert at a time, from disk"]
    size = max(costs.experts(config).values())
    slower = replace(KNOWN, swap={**KNOWN.swap, "disk": Loading(size / rival["break_even_s"])})
    again = planner.advise(config, 3, "throughput", slower, capacity_gib).set_index("layout")
    stages = again[again["pp"] > 1]["makespan_s"].min()
    assert again.loc[rival["layout"], "makespan_s"] == pytest.approx(stages)


def test_loading_is_limited_to_the_simulated_rate():
    config = wan(parallel=Parallel(), swap="disk", swap_gb_per_s=1e-6)
    assert rates.swap_s(config, KNOWN) == max(costs.experts(config).values()) / 1e3
    assert rates.swap_s(config.replace(swap_gb_per_s=None), KNOWN) == pytest.approx(91040 / 3e9)
    assert rates.swap_s(wan(), KNOWN) == 0


@pytest.mark.parametrize(("batch", "samples", "rate"), [(1, 3, 1 / 8), (2, 6, 2 / 12), (2, 5, 3 / 20), (2, 2, None)])
def test_steady_state_of_swapping_ranks_counts_whole_batches(batch, samples, rate):
    """A batch of two ends in two seconds, but the next one ends 12 seconds later: 8 steps and 4 s of loading."""
    config = wan(parallel=Parallel(), swap="disk", swap_batch=batch, num_samples=samples, total_steps=4)
    found = schedule.predict(config, Seconds(1.0, swap=2.0))
    numbers = found.numbers()
    assert numbers["steady_state_samples_per_s"] == (rate and pytest.approx(rate))
    for name, value in metrics.numbers(found.spans(), config.layout, batch).items():
        assert numbers[name] == (value and pytest.approx(value)), name


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--model experts --host-gb-per-s 0", "--host-gb-per-s 0.0: must be at least 1e-9"),
        ("--model experts --disk-gb-per-s -1", "--disk-gb-per-s -1.0: must be at least 1e-9"),
        ("--model experts --disk-gb-per-s x", "--disk-gb-per-s x: must be a finite number"),
        (
            "--model experts --split boundary",
            "--split boundary: must be even; without it, a plan splits at the boundary between experts",
        ),
        ("--model experts --stage-weights 1 2", "--stage-weights 1 2: not in a plan, which looks for the layout"),
        ("--model tiny --disk-gb-per-s 3", "--disk-gb-per-s 3: only for a model with experts, which can be swapped"),
    ],
)
def test_what_a_plan_of_experts_cannot_use(flags, words, capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--gpus", "2", "--tflops", "1", "--link-gb-per-s", "1", *flags.split()])
    assert capsys.readouterr().err == f"error: {words}\n"


@pytest.mark.parametrize("count", [0, -2])
def test_an_expert_of_no_steps_is_refused(count):
    with pytest.raises(ConfigError, match=r"experts .*: must be greater than or equal to 1"):
        RunConfig(model="experts", total_steps=4, experts=(("high", count), ("low", 4 - count)))
