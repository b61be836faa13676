"""The panel without a browser: widgets from RunConfig's fields, predictions from runs, runs from their folders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from annotated_types import Ge, Le

import launch
import launch.__main__
from launch.widgets.controls import GROUPS, Controls
from launch.widgets.panel import Panel, Worker
from launch.widgets.predictions import Predictions
from tests.conftest import write_run
from vdpp_core import ConfigError, Parallel, RunConfig
from vdpp_core.runs import results, runfolder
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


def test_every_widget_has_its_description_and_stays_within_the_bounds_of_its_field():
    fields = Parallel.model_fields | RunConfig.model_fields
    of = Controls(RunConfig(), lambda: None).of
    assert set(of) == {name for names in GROUPS.values() for name in names}
    for name, control in of.items():
        assert control.tooltip.startswith(fields[name].description or name)
        for bound in fields[name].metadata:
            assert not isinstance(bound, Le) or control.max <= bound.le
            assert (
                not isinstance(bound, Ge) or control.min >= bound.ge or control.tooltip.endswith("0 uses the default")
            )


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
    page = predictions.page(alone, [other, same])
    assert "run same-size" in page
    assert f"<th>makespan</th><td>{2 * 3 * 0.5:.3g} s</td>" in page
    assert "run another-size" in predictions.page(alone, [other])
    assert "no finished run here" in predictions.page(alone.replace(threads=2), [other, same])


def test_an_impossible_run_is_explained_and_not_started(panel: Panel):
    panel._predict()
    assert not panel.buttons["Run"].disabled
    panel.controls.of["cfg"].value = 2
    panel.controls.of["guidance_scale"].value = 1.0
    assert "cfg 2: buys nothing without guidance" in panel.prediction.value
    assert panel.buttons["Run"].disabled
    panel.controls.of["cfg"].value = 1
    panel.controls.of["image"].value = "no/such.png"
    panel._predict()  # only the disk shows it
    assert "no/such.png" in panel.prediction.value
    assert panel.buttons["Run"].disabled


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
    assert "no finished run here" in Predictions().page(alone, [stopped])
    assert "run calm" in Predictions().page(alone, [stopped, calm])
    launch.__main__.main(["status"])
    rows = [row for row in capsys.readouterr().out.splitlines() if line in row]
    assert [row.split()[0] for row in rows] == ["stopped"]
    launch.__main__.main(["status", "stopped"])
    assert f"warning: disturbed: {line}" in capsys.readouterr().err
    launch.__main__.main(["status", "calm", "--json"])
    assert json.loads(capsys.readouterr().out)[0]["disturbed"] is None


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
    controls.of["height"].max, controls.of["height"].value = 100, 100
    with pytest.raises(ConfigError, match="height 100: must be a multiple of 8"):
        controls.config()
