"""Bad ends under torchrun: the run ends soon, says who was first and where, and leaves no process behind.

One of each kind is under plain torchrun; ranks of the others are forked, which takes a fifth of the time.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.patience import exit_code, wait_for_end
from vdpp_core import Parallel, RunConfig
from vdpp_core.config.fields import MODELS
from vdpp_core.runs import processes, runfolder
from vdpp_core.runs.run import Run

LONG = {
    "parallel": Parallel(pp=2),
    "total_steps": 8,
    "num_samples": 150,
    "num_frames": 5,
    "save_latents": True,
    "threads": 1,
}


@pytest.fixture
def long_run(tmp_path):
    """The folder of a run on two stages that would take a while."""

    def create(**arguments):
        config = RunConfig(output_dir=tmp_path / "run", **LONG | arguments)
        return runfolder.create(config)

    return create


def start_of(folder, rank):
    return next(event for event in Run(folder).events() if (event.rank, event.kind) == (rank, "start"))


def some_are_finished(folder, number=3):
    return lambda: sum(event.kind == "sample" for event in Run(folder).events()) >= number


def assert_where_it_was(folder, failure, rank):
    """Sample and step of a failure are those at which the rank's own events stop."""
    config = RunConfig.read(folder)
    steps = config.stages()[config.layout.place(rank).stage]
    own = [event for event in Run(folder).events() if event.rank == rank]
    last = [event for event in own if event.kind in ("take", "step")][-1]
    expected = steps[0] if last.kind == "take" else min(last.step + 1, steps[-1])
    assert (failure["rank"], failure["sample"], failure["step"]) == (rank, last.sample, expected)


def assert_what_is_finished_is_whole(folder):
    config = RunConfig.read(folder)
    finished = [event.sample for event in Run(folder).events() if event.kind == "sample"]
    assert len(finished) >= 3
    assert Run(folder).result()["samples_finished"] == len(finished)
    for sample in finished:
        latents = Run(folder).load_latents(sample)
        assert latents.shape == config.shape
        assert torch.isfinite(latents).all()


def assert_last_words_are_last(folder):
    """Nothing is computed, written or counted after a rank has said that it ends."""
    for rank in range(2):
        kinds = [event.kind for event in Run(folder).events() if event.rank == rank]
        said = [kind for kind in kinds if kind in ("done", "error", "terminated")]
        assert len(said) == 1, kinds[-4:]
        assert kinds[-1] == said[0], kinds[-4:]


def assert_no_rank_is_left(folder, ranks=2):
    starts = [event for event in Run(folder).events() if event.kind == "start"]
    assert len(starts) == ranks
    assert [start.rank for start in starts if processes.is_rank(start)] == []


@pytest.mark.parametrize(
    ("rank", "parallel", "start"),
    [
        pytest.param(0, Parallel(pp=2), "forked_in_background", marks=pytest.mark.slow),
        pytest.param(1, Parallel(dp=2, fsdp=True), "forked_in_background", marks=pytest.mark.slow),
        (0, Parallel(frames=2), "torchrun_in_background"),
        pytest.param(1, Parallel(cfg=2), "forked_in_background", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_rank_is_killed(rank, parallel, start, long_run, wait_until, request):
    folder = long_run(parallel=parallel)
    with request.getfixturevalue(start)(2, "run", folder) as process:
        wait_until(some_are_finished(folder), 60)
        os.kill(start_of(folder, rank).pid, signal.SIGKILL)
        if start == "torchrun_in_background":
            assert exit_code(process, 15) != 0
        else:
            wait_for_end(process, 15)
        assert_no_rank_is_left(folder)
    result = Run(folder).result()
    assert result["outcome"] == "failed"
    assert "killed" in result["failure"]["cause"]
    assert_where_it_was(folder, result["failure"], rank)
    assert_what_is_finished_is_whole(folder)


def test_torchrun_itself_is_killed(long_run, torchrun_in_background, wait_until):
    folder = long_run()
    with torchrun_in_background(2, "run", folder) as process:
        wait_until(some_are_finished(folder), 60)
        starts = [start_of(folder, rank) for rank in range(2)]
        process.kill()
        process.wait()
        wait_until(lambda: not any(processes.is_rank(start) for start in starts), 15)
    result = Run(folder).result()
    assert result["outcome"] == "stopped"
    assert_last_words_are_last(folder)
    assert_what_is_finished_is_whole(folder)


@pytest.mark.parametrize(
    ("number", "start"),
    [
        (signal.SIGTERM, "torchrun_in_background"),
        pytest.param(signal.SIGINT, "forked_in_background", marks=pytest.mark.slow),
    ],
)
def test_torchrun_is_told_to_end(number, start, long_run, wait_until, request):
    folder = long_run()
    with request.getfixturevalue(start)(2, "run", folder) as process:
        wait_until(some_are_finished(folder), 60)
        process.send_signal(number)
        wait_for_end(psutil.Process(process.pid), 15)
        assert_no_rank_is_left(folder)
    result = Run(folder).result()
    assert result["outcome"] == "stopped"
    assert "failure" not in result
    assert_last_words_are_last(folder)
    assert_what_is_finished_is_whole(folder)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_stands_still(rank, long_run, forked_in_background, wait_until):
    folder = long_run(timeout_s=5)
    with forked_in_background(2, "run", folder):
        wait_until(some_are_finished(folder), 60)
        stopped = start_of(folder, rank).pid
        os.kill(stopped, signal.SIGSTOP)
        try:
            began = time.monotonic()
            result = wait_until(lambda: Run(folder).result(), 30)
            assert time.monotonic() - began > 4  # not before the time it was given
        finally:
            os.kill(stopped, signal.SIGKILL)
    assert result["outcome"] == "failed"
    assert "timeout_s" in result["failure"]["cause"]
    assert_where_it_was(folder, result["failure"], rank)
    assert_what_is_finished_is_whole(folder)


@pytest.mark.slow
def test_a_rank_stands_still_when_the_others_are_done(long_run, forked_in_background, wait_until):
    folder = long_run(timeout_s=5, total_steps=3000, num_samples=1, stage_weights=(1, 3000), warmup_samples=0)

    def done():
        return any(event.rank == 0 and event.kind == "done" for event in Run(folder).events())

    with forked_in_background(2, "run", folder):
        wait_until(done, 60)
        stopped = start_of(folder, 1).pid
        os.kill(stopped, signal.SIGSTOP)
        try:
            result = wait_until(lambda: Run(folder).result(), 30)
        finally:
            os.kill(stopped, signal.SIGKILL)
    assert result["outcome"] == "failed"
    assert_where_it_was(folder, result["failure"], 1)


@pytest.mark.slow
def test_a_run_alone_is_interrupted(long_run, tmp_path, wait_until):
    """Ctrl-C, without torchrun."""
    folder = long_run(parallel=Parallel())
    process = subprocess.Popen(
        [sys.executable, "-m", "vdpp_core", "run", str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(some_are_finished(folder), 60)
        process.send_signal(signal.SIGINT)
        assert exit_code(process, 15) == 130
    finally:
        process.kill()
        process.wait()
    assert Run(folder).result()["outcome"] == "stopped"
    assert_what_is_finished_is_whole(folder)


def test_a_rank_that_raises_in_the_middle(long_run, forked_in_background, wait_until):
    """Its disk is taken away: the folder that finished latents are written to."""
    folder = long_run()
    with forked_in_background(2, "run", folder) as process:
        wait_until(some_are_finished(folder), 60)
        (folder / "latents").rename(folder / "moved away")
        wait_for_end(process, 15)
        assert_no_rank_is_left(folder)
    result = Run(folder).result()
    assert result["outcome"] == "failed"
    assert_where_it_was(folder, result["failure"], 1)
    assert "No such file or directory" in result["failure"]["cause"]


def test_weights_that_are_cut_off(tmp_path, forked_in_background):
    pipeline = Path(shutil.copytree(MODELS["tiny"], tmp_path / "pipeline"))
    weights = pipeline / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    config = RunConfig(model_id=str(pipeline), total_steps=4, latent_shape=(1, 4, 2, 8, 8), output_dir=tmp_path / "run")
    folder = runfolder.create(config.for_ranks(2))
    with forked_in_background(2, "run", folder) as process:
        wait_for_end(process, 60)
    result = Run(folder).result()
    assert result["outcome"] == "failed"
    assert "afetensor" in result["failure"]["cause"]
    assert not result["failure"]["cause"].startswith("LostRankError")
    assert_no_rank_is_left(folder)
