"""What background runs leave when nothing is said of how soon: tables of sweeps, a failed rank's words, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from safetensors.torch import load_file, save_file

import launch
from launch.__main__ import main
from tests.distributed.conftest import launch_command
from vdpp_core import ConfigError, Parallel, RunConfig

SHORT = RunConfig(model="dummy", total_steps=4, num_samples=3, latent_shape=(1, 4, 2, 8, 8), device="cpu")


@pytest.fixture
def broken(tmp_path: Path) -> RunConfig:
    """A run whose model computes no numbers, which no check before the start can see."""
    model = tmp_path / "model"
    shutil.copytree(str(RunConfig().source), model)
    path = model / "unet" / "diffusion_pytorch_model.safetensors"
    save_file({name: tensor * float("nan") for name, tensor in load_file(path).items()}, path)
    more = {"latent_shape": (1, 4, 2, 8, 8), "total_steps": 2, "save_latents": True}
    return RunConfig(model_id=str(model), device="cpu", parallel=Parallel(pp=2), **more)


def test_the_tail_shows_what_a_rank_wrote(tmp_path: Path, broken: RunConfig):
    """A rank whose latents are no numbers says so; the result names it."""
    job = launch.start(broken.replace(output_dir=tmp_path / "run"))
    result = job.wait(90)
    assert result["outcome"] == "failed"
    assert result["failure"]["rank"] == 1
    assert "sample 0: latents are not finite" in result["failure"]["cause"]
    assert "Traceback" in job.tail(result["failure"]["rank"], lines=200)


def test_a_sweep_interleaves_its_repeats_and_goes_on_after_a_failed_run(tmp_path: Path, broken: RunConfig):
    configs = [
        SHORT.replace(parallel=Parallel()),
        broken.replace(parallel=Parallel()),
        SHORT.replace(parallel=Parallel(dp=2)),
    ]
    sweep = launch.sweep(configs, repeats=2, root=tmp_path / "runs")
    assert sweep.progress()["num_runs"] == 6
    table = sweep.wait(200)
    assert list(table["config"]) == [0, 1, 2, 2, 1, 0]
    assert list(table["outcome"]) == ["ok", "failed", "ok", "ok", "failed", "ok"]
    assert sweep.status() == "2 of 6 not ok: failed"
    again = launch.attach(sweep.run_id, root=tmp_path / "runs")
    assert isinstance(again, launch.Sweep)
    written, shown = (
        each.astype(object).where(each.notna(), None)  # a run that was not disturbed has an empty cell
        for each in (pd.read_csv(sweep.folder / "table.csv"), again.table())
    )
    pd.testing.assert_frame_equal(written, shown)


def test_what_cannot_run_is_refused_before_anything_starts(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"dp × pp"):
        launch.start(SHORT.replace(parallel=Parallel(pp=2), output_dir=tmp_path / "a"), nproc=3)
    with pytest.raises(ConfigError, match=r"^device "):
        launch.start(SHORT.replace(device="cuda:77", output_dir=tmp_path / "a"))
    with pytest.raises(ConfigError, match=r"^repeats 0"):
        launch.sweep([SHORT], repeats=0, root=tmp_path)
    with pytest.raises(ConfigError, match=r"^No run 'nowhere' in "):
        launch.attach("nowhere", root=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_sweep_from_a_terminal_prints_its_table(tmp_path: Path):
    flags = ["--total-steps", "4", "--num-samples", "2", "--latent-shape", "1", "4", "2", "8", "8", "--json"]
    done = launch_command(tmp_path, "sweep", "--ranks", "1,2", "--layouts", "pp,dp,cfg", "simulate", *flags)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["layout"] for row in rows] == ["1 rank", "cfg 2", "pp 2", "dp 2"]
    assert [row["steps_per_gpu"] for row in rows] == [4, 4, 2, 4]
    assert [row["scaling"] for row in rows] == pytest.approx(
        [row["samples_per_s"] / rows[0]["samples_per_s"] for row in rows]
    )
    assert {row["outcome"] for row in rows} == {"ok"}
    results = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/*/result.json")]
    assert len({threads for result in results for threads in result["threads_per_rank"]}) == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["sweep", "--ranks", "0", "simulate"], "--ranks 0"),
        (["sweep", "--ranks", "1,x", "simulate"], "--ranks 1,x"),
        (["sweep", "--ranks", "1", "--layouts", "ep", "simulate"], "--layouts ep"),
        (["sweep", "--ranks", "3", "--layouts", "cfg", "benchmark"], "--layouts cfg"),
        (["sweep", "--ranks", "3", "simulate", "--stage-ranks", "1", "2"], "--stage-ranks 1 2"),
        (["sweep", "--ranks", "2", "--layouts", "frames", "benchmark", "--num-frames", "1"], "--frames 2"),
        (["sweep", "--ranks", "2", "simulate", "--fsdp"], "--fsdp True"),
        (["sweep", "--ranks", "2", "simulate", "--dp", "2"], "--dp 2"),
        (["sweep", "--ranks", "2", "simulate", "--fsdp-same-sample"], "--fsdp-same-sample True"),
        (["start", "--nproc", "0", "simulate"], "--nproc 0"),
        (["start", "--nproc", "4", "simulate", "--fsdp", "--dp", "3"], "--dp 3"),
        (["start", "--nproc", "2", "simulate", "--total-steps", "1"], "--nproc 2"),
        (["status", "nowhere"], "No run 'nowhere' in runs/; `python -m launch status` lists them"),
        (["start", "simulate", "--num-samples", "0"], "--num-samples 0"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    named: str,
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert said.startswith(f"error: {named}")
    assert not (tmp_path / "runs").exists()
