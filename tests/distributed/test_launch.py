"""Jobs and sweeps in the background: they return at once, can be found again, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import launch
from launch.__main__ import main
from tests.distributed.conftest import launch_command
from tests.patience import FairClock, result_of
from vdpp_core import Parallel, RunConfig
from vdpp_core.runs import runfolder
from vdpp_core.runs.run import Run

WaitUntil = Callable[[Callable[[], Any], float], Any]
LONG = RunConfig(num_samples=150, total_steps=20, num_frames=4, save_latents=True, threads=1)
SHORT = RunConfig(model="dummy", total_steps=4, num_samples=3, latent_shape=(1, 4, 2, 8, 8), device="cpu")


def pids(folder: Path) -> dict[int, int]:
    return {event.rank: event.pid for event in Run(folder).events() if event.kind == "start"}


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def finished(folder: Path) -> int:
    return sum(event.kind == "sample" for event in Run(folder).events())


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
        assert job.run.load_latents(sample).shape == LONG.shape


def test_start_returns_at_once_and_the_run_can_be_watched_to_its_end(tmp_path: Path):
    with FairClock() as clock:
        job = launch.start(SHORT.replace(output_dir=tmp_path / "run", save_latents=True), nproc=2)
    assert clock.seconds < 3
    assert job.status() in ("starting", "loading")
    with pytest.raises(RuntimeError, match="no result yet"):
        job.result()
    with pytest.raises(TimeoutError):
        job.wait(timeout=0.1)

    result = result_of(job, 60)
    assert result["outcome"] == job.status() == "ok"
    assert result == job.result()
    assert result["parallel"] == Parallel(pp=2).model_dump()
    progress = job.progress()
    assert (progress["share"], progress["samples_finished"]) == (1.0, 3)
    assert [rank["phase"] for rank in progress["ranks"]] == ["done", "done"]


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
    result = result_of(job, 15)
    assert (result["outcome"], result["failure"]["rank"]) == ("failed", 0)
    assert "stalled" in result["failure"]["cause"]
    assert_nothing_left(job, ranks, wait_until)


def test_looking_at_a_run_that_somebody_started_by_hand_leaves_it_alone(tmp_path: Path, wait_until: WaitUntil):
    folder = runfolder.create(SHORT.replace(output_dir=tmp_path / "run", total_steps=50, num_samples=20).for_ranks(1))
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
    assert {job.outcome() for job in sweep.jobs} <= {None, "ok"}
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


def test_a_stopped_sweep_drops_what_waits(tmp_path: Path, wait_until: WaitUntil):
    sweep = launch.sweep([LONG.replace(parallel=Parallel())] * 2, root=tmp_path)
    first = sweep.jobs[0]
    wait_until(lambda: finished(first.folder) >= 1, 60)
    table = sweep.stop()
    assert list(table["outcome"]) == ["stopped", "stopped"]
    assert list(table["config"]) == [0, 1]
    assert all(is_gone(pid) for pid in pids(first.folder).values())
    assert not pids(sweep.jobs[1].folder)


@pytest.mark.slow
def test_the_same_from_a_terminal(
    tmp_path: Path, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """`start` and `stop` as processes of their own; `test_standstill.py` has one of `status`."""
    monkeypatch.chdir(tmp_path)

    def printed(*words: str) -> str:
        main(list(words))
        return capsys.readouterr().out

    flags = ["benchmark", "--num-samples", "150", "--num-frames", "4", "--threads", "1", "--json"]
    started = launch_command(tmp_path, "start", "--nproc", "2", *flags)
    assert started.returncode == 0, started.stderr
    run = json.loads(started.stdout)["run_id"]
    try:
        wait_until(lambda: finished(tmp_path / "runs" / run), 90)
        row = json.loads(printed("status", run, "--json"))[0]
        assert (row["run"], row["status"]) == (run, "running")
        printed("tail", run, "--rank", "1")
    finally:
        stopped = launch_command(tmp_path, "stop", run)
    assert "stopped" in stopped.stdout
    assert run in printed("status")
