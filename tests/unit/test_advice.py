"""Which layout comes first for each goal, why, and why the rest are excluded."""

from __future__ import annotations

import itertools
import json
import math

import pandas as pd
import pytest

from vdpp_core import ConfigError, Parallel, RunConfig
from vdpp_core.__main__ import main
from vdpp_core.cli.words import WIDTH
from vdpp_core.config.execution import resolve
from vdpp_core.parallel.devices import GIB
from vdpp_core.predict import costs, memory, planner, published, rates, schedule
from vdpp_core.predict.costs import Cost
from vdpp_core.predict.planner import advise
from vdpp_core.predict.predictor import Predictor, Room
from vdpp_core.predict.rates import Link, Rates

SVD = RunConfig(model="svd", random_weights=True, device="cuda", dtype="fp16", latent_shape=(1, 4, 25, 160, 288))
CARD = Rates(1e12, Link(1e9), "made up")


class Simple(Predictor):
    """4 GiB of parameters, 20 of activations a pass, 1e12 operations a pass, 1 MB and two meetings a step."""

    def cost(self, config):
        layout = config.parallel
        share = math.ceil(config.shape[2] / layout.frames) / config.shape[2]
        passes = 2 if config.guidance_scale > 1 and layout.cfg == 1 else 1
        together, gathers = layout.lockstep > 1, layout.shards > 1
        sent = {"positions": 1_000_000} if together else {}
        return Cost(int(1e12 * passes * share), sent, {"frames": 2 * together}, 4 * GIB * gathers, 9 * gathers)

    def room(self, config):
        layout = config.parallel
        at_once = 2 if not config.sequential and config.guidance_scale > 1 and layout.cfg == 1 else 1
        share = math.ceil(config.shape[2] / layout.frames) / config.shape[2]
        peak = 4 * GIB / layout.shards + 20 * GIB * at_once * share
        return Room(peak, peak + GIB)


def simple(goal, gpus=4, config=SVD, capacity_gib=None, **more):
    return advise(config, gpus, goal, CARD, capacity_gib, predictor=Simple(), **more)


def row(table: pd.DataFrame, layout: str):
    (found,) = [facts for _, facts in table.iterrows() if facts["layout"] == layout]
    return found


def test_only_the_ways_that_are_given_are_ranked():
    ways = [planner.Way(Parallel(pp=2)), planner.Way(Parallel(dp=2))]
    assert [*simple("throughput", 2, SVD.replace(num_samples=4), ways=ways)["layout"]] == ["dp 2", "pp 2"]


@pytest.mark.parametrize("gpus", range(1, 9))
def test_all_layouts_are_looked_at_once(gpus):
    found = list(planner.layouts(gpus))
    assert len(set(found)) == len(found)
    assert max(layout.world_size for layout in found) == gpus
    plain = [layout for layout in found if not layout.fsdp]
    assert sum(layout.world_size == gpus and layout.cfg == 1 for layout in plain) == sum(
        gpus % (a * b * c) == 0 for a, b, c in itertools.product(range(1, gpus + 1), repeat=3)
    )
    assert all(layout.shards > 1 for layout in found if layout.fsdp)
    assert len(simple("latency", gpus)) == len(list(planner.candidates(SVD, gpus)))


def test_one_video_is_soonest_where_its_forward_pass_is_split():
    table = simple("latency")
    assert table["layout"][:2].tolist() == ["cfg 2 × frames 2", "frames 4"]
    assert table["latency_s"][0] == pytest.approx(28 * (13 / 25 + 1e6 / 1e9))
    assert row(table, "pp 4")["latency_s"] > row(table, "1 rank")["latency_s"]
    places = table["place"].dropna().tolist()
    assert places == [*range(1, len(places) + 1)]
    fitting = table["latency_s"][table["place"].notna()]
    assert fitting.is_monotonic_increasing


def test_many_videos_are_soonest_in_replicas():
    table = simple("throughput", config=SVD.replace(num_samples=12))
    assert table["layout"][0] == "dp 4"
    assert "4 videos in parallel, 3 rounds" in table["reason"][0]
    assert table["makespan_s"][0] == pytest.approx(3 * 28 * 2)
    assert table["utilisation"][0] == pytest.approx(1)
    assert row(table, "pp 4")["makespan_s"] > table["makespan_s"][0]


def test_videos_come_most_evenly_out_of_stages():
    table = simple("cadence", config=SVD.replace(num_samples=12, guidance_scale=1))
    by_layout = {layout: row(table, layout)["longest_interval_s"] for layout in ("pp 4", "dp 4", "1 rank")}
    assert by_layout["pp 4"] == pytest.approx(28 / 4)
    assert by_layout["dp 4"] == by_layout["1 rank"] == pytest.approx(28)
    assert table["longest_interval_s"][table["place"].notna()].is_monotonic_increasing
    assert row(table, "pp 4")["place"] == 1


def test_least_memory_is_split_and_sharded():
    table = simple("memory")
    assert table["layout"][0] == "cfg 2 × frames 2 × fsdp" or table["layout"][0] == "frames 4 × fsdp"
    assert row(table, "1 rank")["guidance"] == "sequential"
    assert table["needed_gib"][table["place"].notna()].is_monotonic_increasing


def test_what_does_not_fit_is_excluded_with_its_reason():
    table = simple("latency", capacity_gib=24)
    assert row(table, "frames 2")["guidance"] == "sequential"  # both passes at once are too large there
    assert row(table, "frames 4")["guidance"] == "batched"
    for layout in ("1 rank", "pp 4"):
        assert pd.isna(row(table, layout)["place"])
        assert row(table, layout)["reason"].startswith("needs 25 GiB, 23.52 of 24 GiB usable: ")
    assert "splitting steps or samples saves no memory" in row(table, "pp 4")["reason"]
    assert "all activations of one guidance pass" in row(table, "cfg 2")["reason"]
    assert row(table, "frames 4 × fsdp")["reason"] == "fits without sharding, which would only slow it down"
    assert row(table, "dp 4")["reason"] == "more replicas than samples (1)"
    assert "2 replica(s) only hold parameters" in row(table, "dp 3 × fsdp")["reason"]
    assert table["place"].isna().tolist() == sorted(table["place"].isna())  # they come last
    close = simple("latency", capacity_gib=21 / (1 - planner.SPARE) - 0.01)
    assert "sharding does not reduce the activations" in row(close, "dp 4 × fsdp")["reason"]


def test_layouts_that_cannot_be_say_why():
    dummy = RunConfig(model="dummy", device="cpu", total_steps=3, latent_shape=(1, 4, 2, 8, 8), guidance_scale=1)
    table = advise(dummy, 4, "throughput", CARD, predictor=Simple())
    assert row(table, "pp 4")["reason"] == "pp 4: must be at most total_steps, 3"
    assert "buys nothing without guidance" in row(table, "cfg 2")["reason"]
    assert "only a spatio-temporal UNet" in row(table, "frames 2")["reason"]
    assert row(table, "frames 4")["reason"] == "frames 4: must be at most num_frames, 2"


def test_one_mode_of_the_guidance_may_be_asked_for():
    table = simple("latency", capacity_gib=24, modes=("batched",))
    assert pd.isna(row(table, "frames 2")["place"])
    assert set(table["guidance"][table["place"].notna()]) == {"batched", "–"}


def test_arrivals_are_waited_for():
    config = SVD.replace(num_samples=6)
    at_once, apart = (simple("throughput", config=config, arrivals=schedule.periodic(6, s)) for s in (0, 100))
    assert row(apart, "1 rank")["makespan_s"] == pytest.approx(500 + 56)
    assert row(apart, "dp 4")["utilisation"] < row(at_once, "dp 4")["utilisation"]


GENERATE = SVD.replace(command="generate", random_weights=False, num_samples=8, total_steps=28)


def test_a_last_stage_that_decodes_has_fewer_steps():
    """28 steps of 2 s, and 8 s of decoding."""
    known = Rates(1e12, Link(math.inf), decode_s=8 / math.prod(GENERATE.shape))
    at_end, as_ready = (
        advise(GENERATE.replace(decode=mode), 4, "throughput", known, predictor=Simple())
        for mode in ("at-end", "as-ready")
    )
    before, after = row(at_end, "pp 4"), row(as_ready, "pp 4")
    assert (before["longest_interval_s"], after["longest_interval_s"]) == pytest.approx((14, 16))
    assert after["reason"].endswith("latency as on one GPU, with --stage-weights 8 8 8 4")
    assert "stage-weights" not in before["reason"]
    assert before["time_to_first_video_s"] == pytest.approx(56 + 7 * 14 + 8)
    assert after["time_to_first_video_s"] == pytest.approx(56 + 8)
    assert at_end.attrs["decoding"] == "decoding is included: 8 s for each sample, after all denoising"
    assert as_ready.attrs["decoding"].endswith("8 s for each sample, by the last stage between its samples")
    given = GENERATE.replace(decode="as-ready", parallel=Parallel(pp=2), stage_weights=(1, 1))
    assert rates.balanced(given, Simple().per_stage(given), known) == given
    assert simple("throughput", config=GENERATE).attrs["decoding"].endswith("how long it takes is not known")


def test_a_plan_with_decoding(capsys):
    flags = "--model svd --latent-shape 1 4 14 72 128 --num-samples 3 --decode as-ready --top 1 --dtype fp16"
    main(["plan", "--gpus", "1", *flags.split()])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("3 samples of 25 steps")  # as generate makes them
    decoding = lines.index("decoding is included: 4.9 s for each sample, by the last stage between its samples")
    assert "first video (s)" in lines[decoding + 1]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Parallel(), Parallel(dp=2, fsdp=True), Parallel(cfg=2, frames=2)])
def test_counted_for_one_sample_it_is_as_counted_for_all(layout):
    config = RunConfig(device="cuda", num_samples=9, latent_shape=(1, 4, 6, 24, 24), parallel=layout)
    room = Predictor().room(config)
    assert room.peak == pytest.approx(memory.predict(config).total, rel=1e-3)
    assert room.needed == pytest.approx(memory.needed(config), abs=32 * 2**20)
    assert Predictor().cost(config) == costs.cost(config)


@pytest.mark.slow
def test_the_documents_hardest_video_on_seven_cards_is_soonest_by_frames():
    known = published.rates(3)
    ways = [planner.Way(layout) for layout in planner.layouts(7) if layout.tp == 1]  # tp would take as long again
    table = advise(SVD, 7, "latency", known, capacity_gib=24, ways=ways)
    assert row(table, table["layout"][0])["frames"] > 1
    assert row(table, "frames 7")["place"] <= 2
    for layout, words in (("1 rank", "on one GPU"), ("pp 7", "splitting steps or samples saves no memory")):
        assert pd.isna(row(table, layout)["place"])
        assert words in row(table, layout)["reason"]
        assert "GiB, 23.52 of 24 GiB usable" in row(table, layout)["reason"]
    fsdp, by_frames = row(table, "dp 7 × fsdp"), row(table, "frames 7")
    assert by_frames["latency_s"] < 0.5 * fsdp["latency_s"]
    assert fsdp["latency_s"] == pytest.approx(811.8659, rel=0.1)  # as published
    assert by_frames["peak_gib"] < fsdp["peak_gib"]


def test_a_plan_says_so_where_decoding_is_what_does_not_fit():
    config = SVD.replace(command="generate", random_weights=False, latent_shape=(1, 4, 4, 160, 288))
    table = advise(config, 1, "latency", CARD, capacity_gib=24)
    assert table["reason"][0].endswith("decoding 4 frames at once; --decode-chunk-size 1 needs least")


@pytest.mark.slow
def test_the_documents_comparison_is_won_by_seven_replicas(capsys):
    flags = "--model svd --latent-shape 1 4 14 40 72 --num-samples 14 --guidance-scale 1 --goal throughput"
    card = "--capacity-gib 24 --tflops 47 --link-gb-per-s 0.87"  # as published for the A5000
    main(["plan", "--gpus", "7", "--json", *flags.split(), *card.split()])
    found = json.loads(capsys.readouterr().out)
    first, second = found["layouts"][:2]
    assert (first["layout"], first["place"]) == ("dp 7", 1)
    assert "7 videos in parallel, 2 rounds" in first["reason"]
    assert second["makespan_s"] > first["makespan_s"]
    assert found["error"] is None


def test_the_command_prints_places_reasons_and_where_they_are_known_from(capsys):
    flags = "--device cpu --tflops 0.1 --link-gb-per-s 2 --link-us 500 --num-samples 3 --top 2"
    main(["plan", "--gpus", "2", *flags.split()])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("3 samples of 28 steps, latents 14 × 8 × 8, float32, on up to 2 GPUs; goal latency: ")
    said = " ".join(" ".join(lines).split())
    assert "0.1 TFLOP/s (given; not checked against a measurement); link: 2 GB/s, given" in said
    first = lines.index("decoding is not included (--decode includes it)") + 2
    assert [line.split()[0] for line in lines[first : first + 4 : 2]] == ["1", "2"]
    assert lines[first + 1].startswith("     each rank runs one guidance pass")
    assert max(map(len, lines)) <= WIDTH
    assert any(line.startswith("and ") and "more that fit" in line for line in lines)
    assert any(line.startswith("excluded: ") and "fits without sharding" in line for line in lines)


def test_arrivals_on_the_command_line(capsys):
    given = "--model dummy --device cpu --tflops 1 --num-samples 4 --every-s 9 --json"
    flags = ["plan", "--gpus", "1", *given.split()]
    main(flags)
    periodic = json.loads(capsys.readouterr().out)["layouts"][0]["makespan_s"]
    assert periodic == pytest.approx(27, abs=1)
    main([*flags, "--poisson"])
    assert json.loads(capsys.readouterr().out)["layouts"][0]["makespan_s"] != pytest.approx(periodic, abs=0.5)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--gpus 0", "--gpus 0: must be a whole number from 1 to 16"),
        ("--gpus -3", "--gpus -3: must be"),
        ("--gpus 100", "--gpus 100: must be a whole number from 1 to 16"),
        ("--gpus 2 --goal speed", "--goal speed: must be latency, throughput, cadence, memory"),
        (
            "--gpus 2 --goal cadence",
            "--goal cadence: compares the time between videos and needs more samples",
        ),
        ("--gpus 2 --capacity-gib -1", "--capacity-gib -1.0: must be finite and above 0"),
        ("--gpus 2 --capacity-gib nan", "--capacity-gib nan: must be a finite number"),
        (
            "--gpus 2 --capacity-gib 0.001",
            "--capacity-gib 0.001: must be above the parameters of a rank",
        ),
        ("--gpus 2 --link-gb-per-s 0", "--link-gb-per-s 0.0: must be at least 1e-9, or hand-offs would never arrive"),
        ("--gpus 2 --link-gb-per-s 1 --link-us -5", "--link-us -5.0: must be from 0 to 1e9 microseconds"),
        ("--gpus 2 --link-us 5", "--link-us 5.0: only with --link-gb-per-s"),
        ("--gpus 2 --tflops -2", "--tflops -2.0: must be from 1e-9 to 1e9"),
        ("--gpus 2 --every-s -1", "--every-s -1.0: must be greater than or equal to 0"),
        ("--gpus 2 --poisson", "--poisson True: only with --every-s"),
        ("--gpus 2 --pp 2", "--pp 2: not in a plan, which looks for the layout"),
        ("--gpus 2 --fsdp", "--fsdp True: not in a plan, which looks for the layout"),
        ("--gpus 2 --latent-shape 1 4 100000 100000 100000", "--latent-shape 1 4 100000 100000 100000: is too large"),
        ("--gpus 2 --device cpu", "--device cpu: needs --calibrate RUN or --tflops"),
        (f"--gpus 2 --calibrate {'x' * 5000}", "--calibrate xxx"),
        (f"--gpus 2 --model-id {'x' * 5000}", "--model-id xxx"),
        ("--gpus 2 --calibrate nowhere", "--calibrate nowhere: must be published, or a run's id or folder"),
        ("--gpus 2 --top 0", "--top 0: must be a whole number from 1 to 4096"),
        ("--gpus 2 --total-steps 0", "--total-steps 0: must be greater than or equal to 1"),
    ],
)
def test_what_cannot_be_is_one_line(flags, line, capsys):
    with pytest.raises(SystemExit) as end:
        main(["plan", *flags.split()])
    assert end.value.code == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"error: {line}")
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_a_memory_limit_is_a_capacity(capsys):
    """That of PyTorch's allocator: the context comes on top, as with `memory`."""
    main(["plan", "--gpus", "1", "--tflops", "1", "--link-gb-per-s", "1", "--memory-limit-gib", "0.001"])
    assert f"of {0.001 + memory.CONTEXT_GIB:g} GiB usable" in " ".join(capsys.readouterr().out.split())


def test_more_stages_than_steps_fall_out_of_a_plan(capsys):
    main(["plan", "--gpus", "3", "--model", "dummy", "--device", "cpu", "--tflops", "1", "--total-steps", "2"])
    assert "pp 3: must be at most total_steps, 2" in " ".join(capsys.readouterr().out.split())


def test_parameters_larger_than_the_capacity_can_be_shared():
    config = RunConfig(device="cuda", dtype="fp16")
    whole = costs.parameters(config) / GIB
    with pytest.raises(ConfigError, match="capacity_gib"):
        advise(config, 2, "memory", CARD, whole / 2, predictor=Simple())
    assert len(advise(config, 2, "memory", CARD, whole / 2 * 1.01, predictor=Simple()))
    assert resolve(config).element_size == 2
