"""Seconds from costs: calibrated on one measurement, tried on the others."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from vdpp_core import ConfigError, Parallel, RunConfig
from vdpp_core.compare import tables
from vdpp_core.engine import worker
from vdpp_core.predict import accuracy, costs, published, rates
from vdpp_core.predict.rates import Link, Rates, others_busy
from vdpp_core.runs import other_runs, results, runfolder
from vdpp_core.runs.metrics import Span
from vdpp_core.runs.run import Run

PUBLISHED = published.figures()
ROWS = {row["id"]: row for row in PUBLISHED["memory_cfg3_28steps_1sample"]}
TINY = RunConfig(device="cpu", latent_shape=(1, 4, 4, 9, 16), parallel=Parallel())


@pytest.fixture(scope="module")
def card() -> Rates:
    """Known from 14 × 72 × 128 on one card."""
    return published.rates(row=1)


def test_calibrated_on_the_smallest_video_the_larger_ones_are_within_10_percent(card):
    table = accuracy.against_published(card)
    assert table.index[table["calibrated on"]].tolist() == ["memory, row 1", "memory, row 5"]
    for row in (2, 3):
        assert table["predicted_s"][f"memory, row {row}"] == pytest.approx(ROWS[row]["first_sample_time_s"], rel=0.1)
    assert table["error"][table["calibrated on"]].abs().max() < 1e-9
    assert table["error"].filter(like="memory").abs().max() < 0.1
    assert table["error"].filter(like="throughput").abs().max() < 0.05
    assert table["error"].filter(like="comparison").between(-0.2, 0).all()  # small videos keep a card less busy
    assert len(table) == 6 + 4 + 8
    checked, others = card.checked(table), table["error"][~table["calibrated on"]]
    assert checked.error == (others.min(), others.max())
    assert "14 × 72 × 128" in str(checked)
    assert f"checked against {len(others)} measurements: 9 in 10 within " in str(checked)
    assert f"the worst {others.abs().max():.0%} off" in str(checked)
    assert "not checked" in str(card)


@pytest.mark.parametrize("row", [1, 2, 3])
def test_any_row_of_one_card_predicts_the_others(row):
    table = accuracy.against_published(published.rates(row))
    assert table["error"].filter(like="memory").abs().max() < 0.1


@pytest.mark.parametrize("gpus", [2, 4, 7])
def test_published_rates_of_the_step_pipeline_within_5_percent(card, gpus):
    """Interval by interval, in the steady state, 10 samples of 28 steps; hand-offs over the link that row 5 implies."""
    experiment = PUBLISHED["throughput_cfg3_14x72x128"]
    known = next(row for row in experiment["rows"] if row["world_size"] == gpus)["throughput_samples_per_s"]
    config = published.memory_config(ROWS[1]).replace(num_samples=experiment["num_samples"], parallel=Parallel(pp=gpus))
    result = rates.predict(config, card).numbers()
    assert result["steady_state_samples_per_s"] == pytest.approx(known, rel=0.05)
    assert result["throughput_samples_per_s"] == pytest.approx(known, rel=0.05)


def test_the_published_rate_of_data_parallel_on_four_cards_is_that_of_four_rounds(card):
    """14 samples of 8.55 s on 4 cards: ⌈14/4⌉ = 4 rounds, whatever a step takes."""
    rows = PUBLISHED["pipeline_vs_data_parallel"]["svd_fp16"]
    known = next(row for row in rows if row["world_size"] == 4)
    config = published.memory_config(ROWS[1]).replace(num_samples=14, parallel=Parallel(dp=4))
    alone = known["data_avg_s"] / 28
    cost = costs.cost(config)
    result = rates.predict(config, Rates(cost.flops / alone, Link(1e9))).numbers()
    assert result["samples_per_s"] == pytest.approx(known["data_samples_per_s"], rel=0.01)
    assert result["samples_per_s"] == pytest.approx(14 / (math.ceil(14 / 4) * known["data_avg_s"]))


def test_the_nearest_published_video():
    sizes = [(14, 40, 72), (14, 72, 128), (25, 72, 128), (25, 96, 160), (25, 160, 288)]
    assert [published.nearest_row(TINY.replace(latent_shape=(1, 4, *size))) for size in sizes] == [1, 1, 2, 3, 3]


def test_messages_take_their_time_and_so_do_bytes():
    config = TINY.replace(parallel=Parallel(frames=2))
    cost = costs.cost(config)
    computing = cost.flops / 1e9

    def step(link: Link) -> float:
        return rates.step_s(config, Rates(1e9, link))

    assert step(Link(math.inf)) == pytest.approx(computing)
    assert step(Link(1e6)) == pytest.approx(computing + sum(cost.sent.values()) / 1e6)
    assert step(Link(math.inf, 1e-3)) == pytest.approx(computing + cost.exchanges / 1e3)


def test_parameters_are_gathered_beside_computing():
    config = TINY.replace(parallel=Parallel(dp=2, fsdp=True))
    cost = costs.cost(config)
    for speed in (1e5, 1e9):
        step = rates.step_s(config, Rates(1e9, Link(speed)))
        assert step == pytest.approx(max(cost.flops / 1e9, cost.gathered / speed))


def test_a_hop_moves_the_latents_of_one_sample():
    assert rates.hop_s(TINY, Rates(1e9, Link(1e6, 0.5))) == pytest.approx(0.5 + 4 * 4 * 4 * 9 * 16 / 1e6)


@pytest.mark.parametrize(
    ("change", "num_samples", "share"),
    [({"dp": 4}, 4, 0.5), ({"dp": 4}, 1, 1), ({"pp": 4}, 1, 1), ({"pp": 4}, 3, 2 / 3), ({"frames": 4}, 1, 0.5)],
)
def test_ranks_that_are_more_than_the_cores_share_them(change, num_samples, share):
    config = TINY.replace(num_samples=num_samples, parallel=Parallel(**change))
    own = Rates(1e9, Link(1e9))
    assert rates.step_s(config, own) == rates.seconds(costs.cost(config), own)
    of_two = Rates(1e9, Link(1e9), cores=2)
    assert rates.step_s(config, of_two) == pytest.approx(rates.step_s(config, own) / share)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """The runs of other tests, which may be at work meanwhile, are seen by nobody here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(other_runs, "busy_ranks", lambda: 0)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of three samples on one rank."""
    shape = (1, 4, 3, 8, 8)
    config = RunConfig(device="cpu", threads=1, latent_shape=shape, total_steps=4, num_samples=3)
    return worker.run(config.replace(output_dir=tmp_path_factory.mktemp("runs") / "of-three"))


def test_a_run_predicts_itself(run):
    """All of its time lies in spans; what is left are the moments between samples."""
    known = rates.from_run(run, Link(1e9))
    table = accuracy.against_runs([run], known)
    assert table["calibrated on"].tolist() == [True]
    assert table["error"].abs().max() < 0.05
    assert table["predicted_latency_s"][0] == pytest.approx(fmean(Run(run).result()["latency_s"]), rel=0.05)
    assert known.checked(table).error is None
    assert known.cores == Run(run).result()["hardware"]["cores"]
    assert "of-three" in known.source


def test_runs_of_another_kind_say_nothing(run, tmp_path):
    other = worker.run(RunConfig.read(run).replace(output_dir=tmp_path / "run", shortcuts=True, num_samples=1))
    same = worker.run(RunConfig.read(run).replace(output_dir=tmp_path / "same", num_samples=1, total_steps=2))
    failed = runfolder.create(RunConfig.read(run).replace(output_dir=tmp_path / "failed"))
    table = accuracy.against_runs([run, other, same, failed], rates.from_run(run, Link(1e9)))
    assert table["run"].tolist() == ["of-three", "same"]
    assert rates.from_run(run, Link(1e9)).checked(table).error == (table["error"][1], table["error"][1])


def test_runs_of_this_machine_are_predicted_from_one_another(run, tmp_path):
    """Those of one folder, setting and video, from the one with most samples where there is no step pipeline."""
    known = RunConfig.read(run)
    folders = [
        worker.run(known.replace(output_dir=tmp_path / name, num_samples=samples, seed=7))
        for name, samples in (("a", 1), ("b", 2), ("c", 1))
    ]
    other_video = worker.run(known.replace(output_dir=tmp_path / "d", latent_shape=(1, 4, 2, 8, 8), num_samples=1))
    table = accuracy.among([run, *folders, other_video])
    assert table["run"].tolist() == ["a", "b", "c"]  # the others are alone
    assert table["calibrated on"].tolist() == [False, True, False]
    assert table["predicted_makespan_s"][1] == pytest.approx(2 * table["predicted_makespan_s"][0], rel=1e-6)
    assert accuracy.among([run]).empty


def test_ranks_that_are_alone_for_a_while_tell_how_others_slow_them_down():
    """A step pipeline on two ranks: a step takes 1 s alone and 1.2 s in company."""
    spans = [
        Span(0, 0, 0.0, 4.0, 4.0),
        Span(0, 1, 4.0, 8.8, 4.8),
        Span(1, 0, 4.0, 8.8, 4.8),
        Span(1, 1, 8.8, 12.8, 4.0),
    ]
    assert others_busy(spans).tolist() == pytest.approx([0, 1, 1, 0])
    alone, slowdown = rates._step_alone(others_busy(spans), np.array([1.0, 1.2, 1.2, 1.0]), np.full(4, 4))
    assert (alone, slowdown) == (pytest.approx(1.0), pytest.approx(0.2))
    known = Rates(costs.cost(TINY).flops / alone, Link(math.inf), cores=2.0, slowdown=slowdown)
    pipeline = TINY.replace(num_samples=2, total_steps=8, parallel=Parallel(pp=2))
    assert rates.predict(pipeline, known).numbers()["makespan_s"] == pytest.approx(4 + 4.8 + 4)
    assert rates.predict(pipeline.replace(parallel=Parallel()), known).numbers()["makespan_s"] == pytest.approx(16)
    replicas = pipeline.replace(parallel=Parallel(dp=2))
    assert rates.predict(replicas, known).numbers()["makespan_s"] == pytest.approx(8 * 1.2)


def test_ranks_that_always_had_the_same_company_tell_nothing_of_it():
    together = [Span(rank, rank, 0.0, 4.8, 4.8) for rank in range(2)]
    assert rates._step_alone(others_busy(together), np.full(2, 1.2), np.full(2, 4)) == (pytest.approx(1.2), 0.0)
    alone = [Span(0, 0, 0.0, 4.0, 4.0), Span(0, 1, 4.0, 8.0, 4.0)]
    assert rates._step_alone(others_busy(alone), np.full(2, 1.0), np.full(2, 4)) == (pytest.approx(1.0), 0.0)


def test_what_cannot_be_calibrated_on(run, tmp_path):
    unfinished = runfolder.create(RunConfig.read(run).replace(output_dir=tmp_path / "unfinished"))
    with pytest.raises(ConfigError, match=r"calibrate .*unfinished: must be a run that finished"):
        rates.from_run(unfinished)
    together = runfolder.create(RunConfig.read(run).replace(output_dir=tmp_path / "f", parallel=Parallel(frames=2)))
    result = Run(run).result() | {"parallel": Parallel(frames=2).model_dump()}
    (together / "result.json").write_text(json.dumps(result))
    with pytest.raises(ConfigError, match="must be without cfg, frames, tp and fsdp, not frames 2"):
        rates.from_run(together)
    with pytest.raises(ConfigError, match=r"row 4: must be a published run of one card that finished: \(1, 2, 3\)"):
        published.rates(4)


STEP_S = 0.1
FACTS = {"host": "elsewhere", "pid": 1, "created": 0, "device": "cpu", "dtype": "float32", "backend": "gloo"}


@pytest.fixture
def written(tmp_path, write_events):
    """written(name, seconds of each step, layout, **facts of its end): a run of four samples of eight steps, of which
    each rank of a lockstep group does all."""

    def write(name: str, seconds: Sequence[float], layout: Parallel | None = None, **facts) -> Path:
        shape, layout = (1, 4, 3, 8, 8), layout or Parallel()
        config = RunConfig(device="cpu", latent_shape=shape, total_steps=8, num_samples=4, output_dir=tmp_path / name)
        folder, t = runfolder.create(config.replace(parallel=layout)), 0.0
        events = [(-2.0, "start", FACTS | {"threads": 1}), (0.0, "clock", dict.fromkeys(facts, 0))]
        for number, each in enumerate(seconds):
            sample, step = divmod(number, 8)
            t += each
            events.append((t, "step", {"sample": sample, "step": step, "seconds": each}))
            events += [(t, "sample", {"sample": sample})] * (step == 7)
        for rank in range(layout.world_size):
            write_events(folder, rank, *events, (t, "done", {"memory": {"allocated_gb": 1.0}, **facts}))
        results.write(Run(folder), "ok")
        return folder

    return write


def test_a_disturbed_run_is_refused_and_left_out_of_comparisons(written):
    steady = np.full(32, STEP_S)
    calm, stopped = written("calm", steady), written("stopped", [*steady[:11], 20.0, *steady[12:]])
    slept = written("slept", steady, asleep_s=60.0)
    moment = "rank 0 took 20.0 s at sample 1, step 3 (usually 0.1 s)"
    for folder, words in ((stopped, moment), (slept, "the machine slept for 60 s during the run")):
        with pytest.raises(ConfigError) as error:
            rates.from_run(folder, Link(1e9))
        assert str(error.value) == f"calibrate {folder}: was disturbed: {words}; take another run, or run it again"
    known, anyway = rates.from_run(calm, Link(1e9)), rates.from_run(stopped, Link(1e9), though_disturbed=True)
    assert anyway.flops_per_s == pytest.approx(known.flops_per_s)
    assert anyway.source == f"measured: run stopped, which was disturbed: {moment}"
    assert accuracy.against_runs([calm, stopped, slept], known)["run"].tolist() == ["calm"]
    assert accuracy.among([calm, stopped, slept]).empty  # nothing is left to compare with
    again = written("again", steady)
    assert accuracy.among([calm, stopped, slept, again])["run"].tolist() == ["calm", "again"]


def test_a_run_beside_others_is_calibrated_on_and_says_so(written):
    """Its steps are longer than alone, and stay so as long as the others are there."""
    calm, beside = written("calm", np.full(32, STEP_S)), written("beside", np.full(32, 0.2), other_ranks=2)
    known = rates.from_run(beside, Link(1e9))
    assert known.source == "measured: run beside beside 2 ranks of other runs"
    assert accuracy.against_runs([calm, beside], known)["run"].tolist() == ["calm", "beside"]
    assert accuracy.against_runs([calm, beside], rates.from_run(calm, Link(1e9)))["run"].tolist() == ["calm"]
    assert accuracy.among([calm, beside]).empty


def test_rates_that_nothing_was_compared_with_are_unchecked(written):
    known = rates.from_run(written("calm", np.full(32, STEP_S)), Link(1e9))
    nothing = accuracy.against_runs([], known)
    assert nothing.empty
    assert known.checked(nothing).error is None


def test_decoding_takes_its_time_in_proportion_to_the_latents(written):
    """Four samples of 0.8 s, decoded in 0.2 s each, predict eight of twice the size."""
    folder = written("calm", np.full(32, STEP_S))
    result = Run(folder).result() | {"decode_s": [0.2, 0.2, 0.9, 0.2]}
    (folder / "result.json").write_text(json.dumps(result))
    known, config = rates.from_run(folder, Link(math.inf)), RunConfig.read(folder)
    video = config.replace(command="generate", decode="as-ready", latent_shape=(1, 4, 6, 8, 8), num_samples=8)
    assert rates.decode_s(video, known) == pytest.approx(0.4)
    assert rates.decode_s(config, known) == 0.0  # a benchmark decodes nothing
    planned = rates.predict(video, known)
    step_s = rates.step_s(video, known)
    assert planned.numbers()["interval_s"] == pytest.approx([8 * step_s + 0.4] * 7)
    assert planned.first_video_s == pytest.approx(8 * step_s + 0.4)


OF_AN_EXCHANGE = {"cfg": 0.005, "frames": 0.002}  # seconds


def test_runs_that_communicate_say_what_an_exchange_takes_on_their_axis(written):
    plain = written("plain", np.full(32, STEP_S))
    known = rates.from_run(plain, Link(math.inf))
    together = []
    for axis, each in OF_AN_EXCHANGE.items():
        cost = costs.cost(RunConfig.read(plain).replace(parallel=Parallel(**{axis: 2})))
        step_s = cost.flops / known.flops_per_s + cost.exchanges * each
        together.append(written(axis, np.full(32, step_s), Parallel(**{axis: 2})))
    known = rates.from_run([*together, plain])
    assert known.link.exchange_s == pytest.approx(OF_AN_EXCHANGE, rel=1e-3)
    assert known.source == "measured: run plain"
    assert known.link.source.endswith("; 5 ms per exchange (cfg), 2 ms per exchange (frames) in runs cfg, frames")
    assert accuracy.against_runs([*together, plain], known)["error"].abs().max() < 1e-6
    both = RunConfig.read(plain).replace(parallel=Parallel(cfg=2, frames=2))
    assert rates.step_s(both, replace(known, cores=4.0)) == pytest.approx(
        costs.cost(both).flops / known.flops_per_s + 1 * 0.005 + (costs.cost(both).exchanges - 1) * 0.002, rel=1e-3
    )
    given = rates.from_run([plain, *together], Link(1e9, 1e-5))
    assert (given.link.bytes_per_s, given.link.exchange_s) == (1e9, {})
    with pytest.raises(ConfigError, match="must be without cfg, frames, tp and fsdp, not cfg 2, or beside such a run"):
        rates.from_run(together)


def test_only_runs_in_one_setting_are_calibrated_on_together(run, written):
    other = written("plain", np.full(32, STEP_S))
    result = Run(other).result() | {"dtype": "float16"}
    (other / "result.json").write_text(json.dumps(result))
    with pytest.raises(ConfigError, match=r"plain: was in another setting \(tiny on "):
        rates.from_run([run, other])


@pytest.mark.parametrize(("dp", "waits"), [(2, 1), (4, 25 / 18)])
def test_gathers_wait_for_the_slowest_rank_and_on_a_cpu_for_computing(dp, waits):
    cost, link = (
        costs.cost(TINY.replace(parallel=Parallel(dp=dp, fsdp=True))),
        Link(math.inf, exchange_s={"fsdp": 5e-3}),
    )
    computing, gathering = cost.flops / 1e9, cost.gathers * 5e-3 * waits
    assert rates.seconds(cost, Rates(1e9, link, cores=2)) == pytest.approx(computing + gathering)
    assert rates.seconds(cost, Rates(1e9, link)) == pytest.approx(max(computing, gathering))


def test_one_run_of_each_axis_is_calibrated_on():
    layouts = {
        "replicas": Parallel(dp=2),
        "stages": Parallel(pp=2),
        "both": Parallel(cfg=2, frames=2),
        "stages of frames": Parallel(pp=2, frames=2),
        "frames": Parallel(frames=2),
        "sharded frames": Parallel(frames=2, fsdp=True),
        "sharded": Parallel(dp=2, fsdp=True),
    }
    runs = {Path(name): TINY.replace(parallel=layout) for name, layout in layouts.items()}
    assert [str(folder) for folder in accuracy.to_calibrate_on(runs)] == ["stages", "frames", "sharded"]
    assert accuracy.to_calibrate_on({Path("frames"): runs[Path("frames")]}) == []


@pytest.mark.parametrize(
    ("errors", "words"),
    [
        ([], "not checked against a measurement"),
        ([-0.031], "checked against 1 measurement: at most 3.1% off"),
        ([0.01] * 19 + [-0.5], "checked against 20 measurements: 9 in 10 within 1%, the worst 50% off"),
    ],
)
def test_how_far_off_predictions_are_is_said_in_words(errors, words):
    assert rates.how_far_off(errors) == words


def test_the_measured_link_also_of_an_earlier_version(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "not measured" in rates.measured_link("cpu").source
    facts = {"date": "2026-01-01", "rows": [{"bytes": 4, "seconds": 1e-5, "gb_per_s": 2.0}]}
    rates.link_path("cpu").parent.mkdir(parents=True)
    rates.link_path("cpu").write_text(json.dumps(facts))
    link = rates.measured_link("cpu")
    assert (link.bytes_per_s, link.latency_s, link.exchange_s) == (2e9, 1e-5, {})
    rates.link_path("cpu").write_text(json.dumps(facts | {"exchange_s": {"frames": 2e-3, "fsdp": 1e-3}}))
    link = rates.measured_link("cpu")
    assert link.exchange_s == {"frames": 2e-3, "fsdp": 1e-3}
    assert link.source.endswith("; while they compute 2 ms per exchange (frames), 1 ms per gather")


@pytest.mark.parametrize("hiccup", [0.5, 1.9])
def test_a_short_hiccup_moves_no_prediction(written, hiccup):
    """Steps that vary by a few percent count as they are; one that took far longer counts for nothing."""
    steps = STEP_S * np.random.default_rng(0).lognormal(0, 0.1, 32)
    calm = rates.from_run(written("calm", steps), Link(1e9))
    per_step = costs.cost(RunConfig.read(written("same", steps))).flops / calm.flops_per_s
    assert per_step == pytest.approx(steps.mean(), rel=1e-9)
    steps[13] = hiccup
    moved = rates.from_run(written("hiccup", steps), Link(1e9))
    assert moved.flops_per_s == pytest.approx(calm.flops_per_s, rel=0.01)


def test_tables_and_small_print_name_disturbed_runs(written):
    steady = np.full(32, STEP_S)
    calm, beside = written("calm", steady), written("beside", steady, other_ranks=1)
    slept = written("slept", steady, asleep_s=60.0, other_ranks=1)
    company, slept_words = "1 rank of another run used the same cores", "the machine slept for 60 s during the run"
    told = tables.table([calm, beside, slept])["disturbed"].fillna("nothing").tolist()
    assert told == ["nothing", company, f"{slept_words}; {company}"]
    assert tables.source([calm]).endswith("runs calm")
    assert tables.source([calm, beside]).endswith("runs calm, beside; 1 of these runs was disturbed")
    assert tables.source([calm, beside, slept]).endswith("; 2 of these runs were disturbed")


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "result.json").write_text("{"),
        lambda folder: (folder / "result.json").write_text("[1]"),
        lambda folder: (folder / "result.json").write_text('{"outcome": "ok"}'),
        lambda folder: (folder / "config.json").write_text("nothing"),
        lambda folder: (folder / "config.json").write_text(RunConfig.read(folder).replace(num_samples=9).to_json()),
        lambda folder: (folder / "events" / "rank-0.jsonl").write_text(""),
    ],
)
def test_a_damaged_run_is_not_calibrated_on_and_left_out_of_comparisons(run, tmp_path, damage):
    broken = Path(shutil.copytree(run, tmp_path / "broken"))
    damage(broken)
    with pytest.raises(ConfigError, match=r"^calibrate .*broken: must "):
        rates.from_run(broken, Link(1e9))
    if (broken / "events" / "rank-0.jsonl").read_text():
        assert accuracy.against_runs([run, broken], rates.from_run(run, Link(1e9)))["run"].tolist() == ["of-three"]


def test_company_is_counted_without_comparing_all_with_all():
    """Hundreds of thousands of spans: what grows with their square would not end."""
    many = [
        Span(rank, sample, sample + 0.5 * rank, sample + 1 + 0.5 * rank, 1.0)
        for sample in range(50_000)
        for rank in (0, 1)
    ]
    others = others_busy(many)
    assert others[2:-2] == pytest.approx(np.ones(len(many) - 4))
    assert (others[0], others[-1]) == (pytest.approx(0.5), pytest.approx(0.5))


def test_a_link_is_what_the_probe_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where runs/ is
    assert rates.measured_link("cpu") == Link(math.inf, 0.0, rates.measured_link("cpu").source)
    assert "not measured" in rates.measured_link("cpu").source
    rows = [{"bytes": 4, "seconds": 1e-4, "gb_per_s": 4e-5}, {"bytes": 4**12, "seconds": 8e-3, "gb_per_s": 2.1}]
    rates.link_path("cpu").parent.mkdir()
    rates.link_path("cpu").write_text(json.dumps({"date": "2026-11-28", "rows": rows}))
    link = rates.measured_link("cpu")
    assert (link.bytes_per_s, link.latency_s) == (2.1e9, 1e-4)
    assert "2.1 GB/s, 100 µs" in link.source


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (lambda: Link(0), "link_gb_per_s 0.0: must be at least 1e-9, or hand-offs would never arrive"),
        (lambda: Link(-1e9), "link_gb_per_s -1.0: must be at least 1e-9"),
        (lambda: Link(math.nan), "link_gb_per_s nan: must be at least 1e-9"),
        (lambda: Link(1e9, -1), "link_us -1000000.0: must be from 0 to 1e9 microseconds"),
        (lambda: Rates(0, Link(1e9)), "tflops 0.0: must be from 1e-9 to 1e9"),
        (lambda: Rates(math.inf, Link(1e9)), "tflops inf: must be from 1e-9 to 1e9"),
        (lambda: Rates(1e9, Link(1e9), cores=0), "cores 0: must be greater than 0"),
        (lambda: Rates(1e9, Link(1e9), slowdown=-1), "slowdown -1: must be greater than or equal to 0"),
    ],
)
def test_what_cannot_be_is_one_line(wrong, line):
    with pytest.raises(ConfigError) as error:
        wrong()
    assert str(error.value).startswith(line)


def test_what_exchanges_take_is_not_negative():
    counts = np.array([[1.0, 0.0], [1.0, 1.0], [2.0, 1.0]])
    assert rates._not_negative(counts, counts @ [2.0, 3.0]) == pytest.approx([2.0, 3.0])
    found = rates._not_negative(counts, counts @ [2.0, -0.5])
    assert found[1] == 0
    assert found[0] == pytest.approx(np.linalg.lstsq(counts[:, :1], counts @ [2.0, -0.5], rcond=None)[0][0])
