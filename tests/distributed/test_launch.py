"""Jobs and sweeps in the background: they return at once, can be found again, and leave nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
from safetensors.torch import load_file, save_file

import launch
from launch.__main__ import main
from vdpp_core import ConfigError, Parallel, RunConfig, runfolder

pytestmark = pytest.mark.alone

WaitUntil = Callable[[Callable[[], Any], float], Any]
LONG = RunConfig(num_samples=500, total_steps=20, num_frames=4, save_latents=True, threads=1)
SHORT = RunConfig(model="dummy", total_steps=4, num_samples=3, latent_shape=(1, 4, 2, 8, 8), device="cpu")


def pids(folder: Path) -> dict[int, int]:
    return {event["rank"]: event["pid"] for event in runfolder.read_events(folder) if event["kind"] == "start"}


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def finished(folder: Path) -> int:
    return sum(event["kind"] == "sample" for event in runfolder.read_events(folder))


@pytest.fixture
def long_job(tmp_path: Path, wait_until: WaitUntil) -> Iterator[launch.Job]:
    """A step pipeline on two ranks in mid-run."""
    job = launch.start(LONG.replace(output_dir=tmp_path / "long", parallel=Parallel(pp=2)))
    wait_until(lambda: finished(job.folder) >= 2, 90)
    yield job
    job.stop()


def assert_nothing_left(job: launch.Job, ranks: dict[int, int], wait_until: WaitUntil) -> None:
    launcher = json.loads((job.folder / "job.json").read_text())["pid"]
    wait_until(lambda: all(is_gone(pid) for pid in [*ranks.values(), launcher]), 15)
    for sample in range(job.result()["samples_finished"]):
        assert runfolder.load_latents(job.folder, sample).shape == LONG.shape


def test_start_returns_at_once_and_the_run_can_be_watched_to_its_end(tmp_path: Path):
    began = time.monotonic()
    job = launch.start(SHORT.replace(output_dir=tmp_path / "run", save_latents=True), nproc=2)
    assert time.monotonic() - began < 3
    assert job.status() in ("starting", "loading")
    with pytest.raises(RuntimeError, match="no result yet"):
        job.result()
    with pytest.raises(TimeoutError):
        job.wait(timeout=0.1)

    result = job.wait(60)
    assert result["outcome"] == job.status() == "ok"
    assert result == job.result()
    assert result["parallel"] == Parallel(pp=2).model_dump()
    progress = job.progress()
    assert (progress["share"], progress["samples_finished"]) == (1.0, 3)
    assert [rank["phase"] for rank in progress["ranks"]] == ["done", "done"]


def test_a_killed_rank_is_named_within_15_s_and_nothing_is_left(long_job: launch.Job, wait_until: WaitUntil):
    ranks = pids(long_job.folder)
    os.kill(ranks[1], signal.SIGKILL)
    result = long_job.wait(15)
    assert result["outcome"] == long_job.status() == "failed"
    failure = result["failure"]
    assert (failure["rank"], failure["cause"]) == (1, "killed by SIGKILL")
    assert failure["sample"] >= 1
    assert 10 <= failure["step"] < 20
    assert result["samples_finished"] >= 2
    assert_nothing_left(long_job, ranks, wait_until)


def test_a_killed_launcher_leaves_no_ranks(long_job: launch.Job, wait_until: WaitUntil):
    ranks = pids(long_job.folder)
    os.kill(json.loads((long_job.folder / "job.json").read_text())["pid"], signal.SIGKILL)
    result = long_job.wait(15)
    assert (result["outcome"], result["failure"]["cause"]) == ("failed", "the launcher was killed")
    assert_nothing_left(long_job, ranks, wait_until)


def test_a_stopped_run_keeps_its_samples(long_job: launch.Job, wait_until: WaitUntil):
    ranks = pids(long_job.folder)
    result = long_job.stop()
    assert result["outcome"] == long_job.status() == "stopped"
    assert result["samples_finished"] >= 2
    assert_nothing_left(long_job, ranks, wait_until)
    assert long_job.stop() == result


def test_a_frozen_rank_does_not_outlive_a_stop(long_job: launch.Job, wait_until: WaitUntil):
    ranks = pids(long_job.folder)
    os.kill(ranks[0], signal.SIGSTOP)
    long_job.stop()
    assert_nothing_left(long_job, ranks, wait_until)


def test_a_rank_that_stands_still_alone_is_named_within_its_timeout(tmp_path: Path, wait_until: WaitUntil):
    """No guard of another rank can see it; the launcher does."""
    job = launch.start(LONG.replace(output_dir=tmp_path / "run", timeout_s=4))
    wait_until(lambda: finished(job.folder) >= 1, 60)
    ranks = pids(job.folder)
    os.kill(ranks[0], signal.SIGSTOP)
    result = job.wait(15)
    assert (result["outcome"], result["failure"]["rank"]) == ("failed", 0)
    assert "stalled" in result["failure"]["cause"]
    assert_nothing_left(job, ranks, wait_until)


def test_a_rank_that_stands_still_is_named_and_ended_soon(tmp_path: Path, wait_until: WaitUntil):
    """torchrun's agent would give it 30 s to hear SIGTERM."""
    job = launch.start(LONG.replace(output_dir=tmp_path / "run", timeout_s=4, parallel=Parallel(pp=2)))
    wait_until(lambda: finished(job.folder) >= 1, 60)
    ranks = pids(job.folder)
    os.kill(ranks[0], signal.SIGSTOP)
    result = job.wait(20)
    assert (result["outcome"], result["failure"]["rank"]) == ("failed", 0)
    assert_nothing_left(job, ranks, wait_until)


def test_looking_at_a_run_that_somebody_started_by_hand_leaves_it_alone(tmp_path: Path, wait_until: WaitUntil):
    folder = runfolder.create(SHORT.replace(output_dir=tmp_path / "run", total_steps=50, num_samples=100).for_ranks(1))
    job = launch.attach("run", root=tmp_path)
    assert job.status() == "starting"
    by_hand = subprocess.Popen([sys.executable, "-m", "vdpp_core", "run", str(folder)])
    while by_hand.poll() is None:
        assert job.status() in ("starting", "loading", "warming up", "running", "ok")
        time.sleep(0.05)
    assert (by_hand.returncode, job.status()) == (0, "ok")


def test_a_sweep_that_is_watched_from_its_first_moment_is_not_disturbed(tmp_path: Path):
    code = f"""
import launch
from pathlib import Path
from vdpp_core import RunConfig
config = RunConfig(**{SHORT.model_dump(mode="json", exclude_none=True)!r})
launch.sweep([config] * 2, repeats=10, root=Path({str(tmp_path)!r}))
"""
    starting = subprocess.Popen([sys.executable, "-c", code])
    while starting.poll() is None:
        for job in launch.jobs(tmp_path):
            job.status()
    (sweep,) = launch.jobs(tmp_path)
    assert isinstance(sweep, launch.Sweep)
    assert sweep.table().empty
    assert [job.outcome() for job in sweep.jobs] == [None] * 20
    sweep.stop()


def test_a_run_goes_on_when_the_process_that_started_it_is_killed(tmp_path: Path, wait_until: WaitUntil):
    """As after a kernel restart: another process attaches and sees it go on."""
    folder = tmp_path / "run"
    code = f"""
import launch, time
from vdpp_core import Parallel, RunConfig
config = RunConfig(**{LONG.model_dump(mode="json", exclude_none=True)!r})
launch.start(config.replace(output_dir={str(folder)!r}, parallel=Parallel(pp=2)))
print("started", flush=True)
time.sleep(600)
"""
    kernel = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert kernel.stdout is not None
        assert kernel.stdout.readline() == b"started\n"
        os.killpg(kernel.pid, signal.SIGKILL)
        job = launch.attach("run", root=tmp_path)
        assert isinstance(job, launch.Job)
        before = wait_until(lambda: finished(job.folder), 90)
        wait_until(lambda: job.progress()["samples_finished"] > before, 30)
        assert job.status() == "running"
        assert [each.run_id for each in launch.jobs(tmp_path)] == ["run"]
    finally:
        kernel.kill()
        kernel.wait()
        launch.attach("run", root=tmp_path).stop()


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
    configs = [SHORT.replace(parallel=Parallel()), broken, SHORT.replace(parallel=Parallel(dp=2))]
    sweep = launch.sweep(configs, repeats=2, root=tmp_path / "runs")
    assert sweep.progress()["num_runs"] == 6
    table = sweep.wait(200)
    assert list(table["config"]) == [0, 1, 2, 2, 1, 0]
    assert list(table["outcome"]) == ["ok", "failed", "ok", "ok", "failed", "ok"]
    assert sweep.status() == "2 of 6 not ok: failed"
    again = launch.attach(sweep.run_id, root=tmp_path / "runs")
    assert isinstance(again, launch.Sweep)
    pd.testing.assert_frame_equal(pd.read_csv(sweep.folder / "table.csv"), again.table(), check_dtype=False)


def test_a_stopped_sweep_drops_what_waits(tmp_path: Path, wait_until: WaitUntil):
    sweep = launch.sweep([LONG.replace(parallel=Parallel())] * 2, root=tmp_path)
    first = sweep.jobs[0]
    wait_until(lambda: finished(first.folder) >= 1, 60)
    table = sweep.stop()
    assert list(table["outcome"]) == ["stopped", "stopped"]
    assert list(table["config"]) == [0, 1]
    assert all(is_gone(pid) for pid in pids(first.folder).values())
    assert not pids(sweep.jobs[1].folder)


def test_what_cannot_run_is_refused_before_anything_starts(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"dp × pp"):
        launch.start(SHORT.replace(parallel=Parallel(pp=2), output_dir=tmp_path / "a"), nproc=3)
    with pytest.raises(ConfigError, match=r"^device "):
        launch.start(SHORT.replace(device="cuda:77", output_dir=tmp_path / "a"))
    with pytest.raises(ConfigError, match=r"^repeats 0"):
        launch.sweep([SHORT], repeats=0, root=tmp_path)
    with pytest.raises(ConfigError, match=r"^run_id nowhere"):
        launch.attach("nowhere", root=tmp_path)
    assert not list(tmp_path.iterdir())


def launch_command(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200)


def test_the_same_from_a_terminal(tmp_path: Path, wait_until: WaitUntil):
    flags = ["benchmark", "--num-samples", "500", "--num-frames", "4", "--threads", "1", "--json"]
    started = launch_command(tmp_path, "start", "--nproc", "2", *flags)
    assert started.returncode == 0, started.stderr
    run = json.loads(started.stdout)["run_id"]
    try:
        wait_until(lambda: finished(tmp_path / "runs" / run), 90)
        row = json.loads(launch_command(tmp_path, "status", run, "--json").stdout)[0]
        assert (row["run"], row["status"]) == (run, "running")
        assert launch_command(tmp_path, "tail", run, "--rank", "1").returncode == 0
    finally:
        stopped = launch_command(tmp_path, "stop", run)
    assert "stopped" in stopped.stdout
    assert run in launch_command(tmp_path, "status").stdout


def test_a_sweep_from_a_terminal_prints_its_table(tmp_path: Path):
    flags = ["--total-steps", "4", "--num-samples", "2", "--latent-shape", "1", "4", "2", "8", "8", "--json"]
    done = launch_command(tmp_path, "sweep", "--ranks", "1,2", "--layouts", "pp,dp,cfg", "simulate", *flags)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["layout"] for row in rows] == ["1 rank", "cfg 2", "pp 2", "dp 2"]
    assert {row["outcome"] for row in rows} == {"ok"}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["sweep", "--ranks", "0", "simulate"], "--ranks 0"),
        (["sweep", "--ranks", "1,x", "simulate"], "--ranks 1,x"),
        (["sweep", "--ranks", "1", "--layouts", "tp", "simulate"], "--layouts tp"),
        (["sweep", "--ranks", "3", "--layouts", "cfg", "benchmark"], "--layouts cfg"),
        (["sweep", "--ranks", "2", "--layouts", "frames", "benchmark", "--num-frames", "1"], "--frames 2"),
        (["sweep", "--ranks", "2", "simulate", "--fsdp"], "--fsdp True"),
        (["sweep", "--ranks", "2", "simulate", "--dp", "2"], "--dp 2"),
        (["sweep", "--ranks", "2", "simulate", "--fsdp-same-sample"], "--fsdp-same-sample True"),
        (["start", "--nproc", "0", "simulate"], "--nproc 0"),
        (["start", "--nproc", "4", "simulate", "--fsdp", "--dp", "3"], "--dp 3"),
        (["start", "--nproc", "2", "simulate", "--total-steps", "1"], "--pp 2"),
        (["status", "nowhere"], "--run-id nowhere"),
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
