"""The panel without a browser: widgets from RunConfig's fields, predictions from runs, runs from their folders."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import launch
import launch.__main__
from launch.job import Job
from launch.widgets.controls import EXPLAINED, Controls
from launch.widgets.panel import Panel, Worker
from launch.widgets.predictions import Predictions
from tests.conftest import write_run
from vdpp_core import ConfigError, Parallel, RunConfig
from vdpp_core.compare import tables
from vdpp_core.predict import cores_and_disk, memory, prediction
from vdpp_core.runs import other_runs, results, runfolder
from vdpp_core.runs.run import Run

SHORT = RunConfig(num_frames=2, total_steps=3, num_samples=2, threads=1, parallel=Parallel(pp=2))


@pytest.fixture
def panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Panel]:
    """A panel over an empty folder of runs. Its worker does not run; the test calls its tasks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Worker, "start", lambda _: None)
    shown = launch.panel(SHORT)
    yield shown
    shown.close()


@pytest.mark.parametrize(
    "config",
    [
        RunConfig(),
        RunConfig(command="generate", num_samples=1000, seed=7, guidance_scale=1.5, parallel=Parallel(dp=2, fsdp=True)),
        RunConfig(model="svd", random_weights=True, memory_limit_gib=3.5, threads=9, timeout_s=20, dtype="bf16"),
    ],
    ids=["defaults", "generate", "svd"],
)
def test_the_widgets_describe_the_run_that_they_were_given(config: RunConfig):
    found = Controls(config, lambda: None).config()
    assert found.replace(latent_shape=found.shape) == config.replace(
        latent_shape=config.shape, parallel=config.parallel or Parallel()
    )


def test_every_control_has_a_label_and_an_explanation_without_flags_and_refuses_nothing_in_silence():
    seen: list[bool] = []
    controls = Controls(RunConfig(), lambda: seen.append(True))
    for control in controls.of.values():
        assert control.description in EXPLAINED
        assert len(EXPLAINED[control.description].split()) >= 3
        assert "--" not in EXPLAINED[control.description]
    assert len(EXPLAINED) == len(controls.of) >= 30
    controls.of["num_samples"].value = 500
    assert controls.config().num_samples == 500
    controls.of["num_samples"].value = 1_000_000
    with pytest.raises(ConfigError, match="num_samples 1000000: must be less than or equal to 100000"):
        controls.config()


def test_the_parameters_of_an_earlier_run_are_shown_at_once():
    changes: list[RunConfig] = []
    controls = Controls(RunConfig(), lambda: changes.append(controls.config()))
    earlier = RunConfig(model="svd", random_weights=True, num_frames=3, device="cuda:1", stall_steps=20, threads=2)
    controls.load(earlier)
    (found,) = changes
    assert found.replace(latent_shape=found.shape) == earlier.replace(
        latent_shape=earlier.shape, parallel=Parallel(), output_dir=None
    )
    with pytest.raises(ConfigError, match="Stable Video Diffusion only"):
        controls.load(RunConfig(model="wan22"))
    assert controls.of["num_frames"].value == 3


def test_another_model_brings_its_usual_size():
    controls = Controls(RunConfig(), lambda: None)
    assert "wan22" not in controls.of["model"].options  # it has other parameters
    controls.of["model"].value = "medium"
    controls.of["random_weights"].value = True
    assert controls.config().shape == RunConfig(model="medium", random_weights=True).shape


def test_seconds_come_from_a_run_in_the_same_setting_one_of_the_same_size_first(tmp_path):
    alone = SHORT.replace(parallel=Parallel(), device="cpu")
    same = write_run(tmp_path, "same-size", alone, step_s=0.5)
    other = write_run(tmp_path, "another-size", alone.replace(num_frames=4), step_s=0.5)
    predictions = Predictions()
    found = predictions.of(alone, [other, same])
    assert "run same-size; not checked against a measurement" in found.page
    assert f"<th>makespan</th><td>{2 * 3 * 0.5:.3g} s</td>" in found.page
    assert "run another-size" in predictions.of(alone, [other]).page
    assert "no finished run here" in predictions.of(alone.replace(threads=2), [other, same]).page


def test_the_range_is_how_far_off_predictions_were_for_other_runs(tmp_path):
    alone = SHORT.replace(parallel=Parallel(), device="cpu")
    runs = [write_run(tmp_path, f"run-{step_s}", alone, step_s) for step_s in (0.5, 0.45, 0.6)]
    found = Predictions().of(alone, runs)
    assert found.record["makespan_range_s"] == pytest.approx([2 * 3 * 0.45, 2 * 3 * 0.6], rel=1e-3)
    assert "<b>3 s (2.7 to 3.6 s)</b>" in found.headline
    assert "checked against 2 measurements" in found.headline


def test_a_run_is_compared_with_the_prediction_that_was_shown_and_no_other(tmp_path):
    alone = SHORT.replace(parallel=Parallel(), device="cpu")
    shown = Predictions().of(alone, [write_run(tmp_path, "first", alone, step_s=0.5)])
    assert f"{shown.record['memory']['peak_gb']:.3g} GB a rank without allowances" in shown.headline
    folder = write_run(tmp_path, "second", alone, step_s=0.25)
    runfolder.write_prediction(folder, shown.record)
    prediction.record(folder)  # by the launcher
    assert results.write(Run(folder), "ok")["predicted"]["source"] == shown.record["source"]
    (row,) = tables.table([folder]).to_dict("records")
    assert (row["makespan_s"], row["predicted_makespan_s"]) == pytest.approx((1.5, 3.0))
    assert row["predicted_peak_memory_gb"] == memory.predict(alone).total / 1e9
    results.write(Run(folder), "stopped")
    (row,) = tables.table([folder]).to_dict("records")
    assert row["predicted_makespan_s"] != row["predicted_makespan_s"]  # NaN: it was predicted for all samples
    assert row["predicted_peak_memory_gb"] > 0


def test_a_run_beside_another_warns_before_and_predicts_nothing_afterwards(tmp_path, monkeypatch):
    alone = SHORT.replace(parallel=Parallel(), device="cpu", threads=None)
    beside = write_run(tmp_path, "beside", alone, step_s=0.5)
    result = Run(beside).result()
    assert result is not None
    result |= {"disturbed": ["2 ranks of other runs used the same cores"], "other_ranks_at_work": 2}
    runfolder.write_result(beside, result)
    monkeypatch.setattr(other_runs, "busy_ranks", lambda: 2)
    found = Predictions().of(alone, [beside])
    assert found.record["makespan_s"] is None
    assert "Warning: 2 ranks of other runs are running on these" in found.headline
    monkeypatch.setattr(cores_and_disk, "cores", lambda: 2)
    crowded = SHORT.replace(parallel=Parallel(dp=3), device="cpu")
    assert "Warning: 3 × 1 threads on 2 cores: ranks take turns" in Predictions().of(crowded, []).headline


def test_an_impossible_run_is_explained_and_not_started(panel: Panel):
    panel._predict()
    assert not panel.buttons["Run"].disabled
    panel.controls.of["cfg"].value = 2
    panel.controls.of["guidance_scale"].value = 1.0
    assert "Guidance split (cfg) 2: buys nothing without guidance" in panel.prediction.value
    assert panel.buttons["Run"].disabled
    panel.controls.of["cfg"].value = 1
    panel.controls.of["image"].value = "no/such.png"
    panel._predict()  # only the disk shows it
    assert "no/such.png" in panel.prediction.value
    assert panel.buttons["Run"].disabled
    panel.controls.of["image"].value, panel.controls.of["model"].value = "", "svd"
    panel._predict()
    assert "or pass a folder with “Weights folder”, or tick “Random weights”" in panel.prediction.value
    assert panel.buttons["Run"].disabled


def test_run_waits_for_the_prediction_and_starts_once(panel: Panel, monkeypatch: pytest.MonkeyPatch):
    started: list[tuple[RunConfig, object]] = []

    def start(config: RunConfig, predicted: object) -> Job:
        assert panel.buttons["Run"].disabled
        started.append((config, predicted))
        return Job(runfolder.create(config))

    def work() -> None:
        while not panel.worker.tasks.empty():
            task = panel.worker.tasks.get()
            assert task is not None
            task()

    monkeypatch.setattr(f"{Panel.__module__}.start", start)
    work()
    panel.controls.of["num_samples"].value = 3
    assert panel.predicted is None
    assert not panel.buttons["Run"].disabled  # so the Tab key finds it
    panel.buttons["Run"].click()
    panel._enable()
    assert panel.buttons["Run"].disabled
    work()
    ((config, predicted),) = started
    assert config.num_samples == 3
    assert panel.predicted is not None
    assert predicted == panel.predicted.record
    panel.runs.value = []
    panel.buttons["Run"].click()
    panel.controls.of["num_samples"].value = 4
    work()
    assert len(started) == 1
    assert "changed after Run was pressed" in panel.message.value


def test_runs_are_listed_shown_and_compared_also_damaged_ones(panel: Panel, tmp_path: Path):
    first, second = (write_run(tmp_path, name, SHORT.replace(parallel=Parallel()), step_s=0.1) for name in "ab")
    (runfolder.create(SHORT.replace(output_dir=tmp_path / "runs" / "c")) / "result.json").write_text("{")
    panel.refresh([first])
    assert {label for label, _ in panel.runs.options} == {"a: ok", "b: ok", "c: stopped"}
    assert "makespan_s" in panel.table.value
    before = bytes(panel.picture.value)
    assert before.startswith(b"\x89PNG")
    panel.runs.value = [first, second]
    panel.refresh()
    assert panel.table.value.count("<td>1 rank</td>") == 2
    assert bytes(panel.picture.value) != before
    panel.refresh()
    assert set(panel.runs.value) == {first, second}


def test_a_failed_run_says_which_rank_where_and_why(panel: Panel, tmp_path: Path, write_events):
    folder = runfolder.create(SHORT.replace(output_dir=tmp_path / "runs" / "failed"))
    start = {"host": "elsewhere", "pid": 1, "created": 0, "device": "cpu", "dtype": "float32", "backend": "gloo"}
    step = {"sample": 0, "step": 0, "seconds": 0.1}
    write_events(folder, 0, (0.0, "start", start | {"threads": 1}), (1.0, "clock", {}), (1.1, "step", step))
    results.settle(Run(folder), {0: "killed by SIGKILL"})
    panel.refresh([folder])
    assert "failed, rank 0, sample 0, step 1: killed by SIGKILL" in panel.progress.value
    assert panel.buttons["Stop"].disabled


def test_a_disturbed_run_is_shown_as_one_and_predicts_nothing(panel: Panel, tmp_path: Path, capsys):
    alone = SHORT.replace(parallel=Parallel(), device="cpu")
    calm, stopped = (
        write_run(tmp_path, name, alone, 0.5, stopped_s) for name, stopped_s in (("calm", 0.0), ("stopped", 20.0))
    )
    line = "rank 0 took 20.5 s at sample 1, step 2 (usually 0.5 s)"
    panel.refresh([stopped])
    assert f"<p>disturbed: {line}</p>" in panel.progress.value
    assert "rank 0 took 20.5 s at sample 1, step" in panel.table.value
    panel.refresh([calm])
    assert "disturbed" not in panel.progress.value + panel.table.value
    assert "no finished run here" in Predictions().of(alone, [stopped]).page
    assert "run calm" in Predictions().of(alone, [stopped, calm]).page
    launch.__main__.main(["status"])
    rows = [row for row in capsys.readouterr().out.splitlines() if line[:40] in row]  # as much as fits
    assert [row.split()[0] for row in rows] == ["stopped"]
    launch.__main__.main(["status", "stopped"])
    assert f"disturbed {line}" in capsys.readouterr().out
    launch.__main__.main(["status", "calm", "--json"])
    assert json.loads(capsys.readouterr().out)[0]["disturbed"] is None


def test_runs_are_listed_by_their_start_and_resumed_only_where_that_can_work(panel: Panel, tmp_path: Path):
    alone = SHORT.replace(parallel=Parallel(), device="cpu")
    folders = [write_run(tmp_path, name, alone, 0.1) for name in ("one", "two")]
    os.utime(folders[0] / "events" / "rank-0.jsonl")
    (folders[0] / ".resuming").touch()  # as a refused resume does
    events = folders[1] / "events" / "rank-0.jsonl"
    events.write_text(events.read_text().replace('"t": 0.0', '"t": 0.5', 1))
    results.write(Run(folders[0]), "stopped")
    panel.refresh([folders[0]])
    assert [folder.name for _, folder in panel.runs.options] == ["two", "one"]
    assert panel.buttons["Resume"].layout.display == "none"  # it saved no latents
    assert not panel.buttons["Use"].disabled
    kept = runfolder.create(alone.replace(save_latents=True, output_dir=tmp_path / "runs" / "kept"))
    results.write(Run(kept), "stopped")
    panel.refresh([kept])
    assert not panel.buttons["Resume"].disabled
    panel._use()
    assert panel.config is not None
    assert panel.config.save_latents


def test_one_panel_at_a_time_and_errors_end_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    first = launch.panel(SHORT)

    def fails() -> None:
        raise RuntimeError("a folder vanished")

    first.worker.submit(fails)
    second = launch.panel(SHORT)
    first.worker.join(60)
    assert not first.worker.is_alive()
    assert "RuntimeError: a folder vanished" in first.message.value
    second.close()
    second.worker.join(60)
    assert not second.worker.is_alive()


def test_the_timeline_of_runs_without_a_step_is_no_figure(tmp_path: Path):
    folder = runfolder.create(SHORT.replace(output_dir=tmp_path / "none"))
    results.write(Run(folder), "stopped")
    assert launch.timeline([launch.Job(folder)]) is None
    assert list(launch.compare([launch.Job(folder)]).columns) == ["none"]


def test_config_errors_name_the_parameter():
    controls = Controls(RunConfig(), lambda: None)
    controls.of["height"].value = 100
    with pytest.raises(ConfigError, match="height 100: must be a multiple of 8"):
        controls.config()
