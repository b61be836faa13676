"""Runs of six samples that end badly in the middle: named, nothing left behind, nothing finished lost, resumed."""

from __future__ import annotations

import itertools
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import launch
from tests.patience import result_of
from vdpp_core import Parallel, RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.runs import files
from vdpp_core.runs.run import Run

SAMPLES = 6
CONFIG = RunConfig(
    total_steps=24,
    num_samples=SAMPLES,
    num_frames=5,
    save_latents=True,
    threads=1,
    timeout_s=4,
    parallel=Parallel(pp=2),
)
WaitUntil = Callable[[Callable[[], Any], float], Any]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory, wait_until: WaitUntil) -> Path:
    """The folder of an undisturbed run; of another layout, which gives the same bits."""
    job = launch.start(CONFIG.replace(output_dir=tmp_path_factory.mktemp("whole") / "run", parallel=Parallel()))
    assert job.wait(120)["outcome"] == "ok"
    wait_until(lambda: not job.run.launcher_alive(), 15)
    return job.folder


@pytest.fixture(scope="module")
def undisturbed(whole_run: Path) -> list[torch.Tensor]:
    return [Run(whole_run).load_latents(sample) for sample in range(SAMPLES)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 8 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place], check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def finished(folder: Path) -> int:
    return sum(event.kind == "sample" for event in Run(folder).events())


def processes_of(folder: Path) -> list[psutil.Process]:
    """The ranks in their order, and the process that watches over them."""
    starts = [event for event in Run(folder).events() if event.kind == "start"]
    starts.sort(key=lambda event: event.rank)
    launcher = Run(folder).launcher()
    assert launcher is not None
    return [psutil.Process(pid) for pid in [*(start.pid for start in starts), launcher["pid"]]]


def in_the_middle(folder: Path, wait_until: WaitUntil) -> list[psutil.Process]:
    wait_until(lambda: finished(folder) >= 2, 90)
    return processes_of(folder)


def assert_none_is_left(family: list[psutil.Process], seconds: float = 15) -> None:
    left = psutil.wait_procs([process for process in family if process.is_running()], seconds)[1]
    assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []


def assert_resumes(job: launch.Job, undisturbed: list[torch.Tensor]) -> None:
    """Finished samples are kept, the others computed, all of them as if nothing had happened."""
    kept = {path: path.stat().st_mtime_ns for path in (job.folder / "latents").glob("*.safetensors")}
    assert 2 <= len(kept) < SAMPLES
    assert job.result()["samples_finished"] in (len(kept), len(kept) - 1)  # one may be there and not be told of
    result = result_of(job.resume(), 60)
    assert (result["outcome"], result["samples_finished"]) == ("ok", SAMPLES)
    assert result["resumed"] == {"attempt": 2, "samples_kept": len(kept)}
    assert kept == {path: path.stat().st_mtime_ns for path in kept}
    assert_whole(job.folder, undisturbed)
    computed = {event.sample for event in job.run.events() if event.kind == "sample"}
    assert computed == set(range(SAMPLES)) - {int(path.stem.partition("-")[2]) for path in kept}
    with pytest.raises(ConfigError, match="has all its samples"):
        job.resume()


def kill_rank(family: list[psutil.Process]) -> None:
    family[1].kill()


def kill_agent(family: list[psutil.Process]) -> None:
    family[-1].kill()


def stop_rank(family: list[psutil.Process]) -> None:
    family[1].suspend()


@pytest.mark.parametrize(
    ("harm", "rank", "cause"),
    [
        (kill_rank, 1, "killed by SIGKILL"),
        (kill_agent, None, "the launcher was killed"),
        (stop_rank, 1, "stalled: rank 1 has been silent for"),
    ],
)
def test_harm_in_the_middle(harm, rank, cause, tmp_path: Path, undisturbed, wait_until: WaitUntil):
    job = launch.start(CONFIG.replace(output_dir=tmp_path / "run"))
    with pytest.raises(ConfigError, match="has not ended"):
        job.resume()
    family = in_the_middle(job.folder, wait_until)
    harm(family)
    if harm is stop_rank:
        # it is named before it is ended
        wait_until(lambda: "rank 1 has been silent" in (job.progress()["stalled"] or ""), 15)
    result = result_of(job, 15)
    failure = result["failure"]
    assert (result["outcome"], failure["rank"]) == ("failed", rank)
    assert failure["cause"].startswith(cause)
    if rank is not None:
        assert (1, 23) <= (failure["sample"], failure["step"]) < (SAMPLES, 0)  # two samples are finished at the least
        assert failure["step"] in range(12, 24)  # of its stage
    assert_none_is_left(family)
    assert_resumes(job, undisturbed)


def test_a_full_disk(small_disk: Path, undisturbed, wait_until: WaitUntil):
    job = launch.start(CONFIG.replace(output_dir=small_disk / "run"))
    family = in_the_middle(job.folder, wait_until)
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        file.writelines(itertools.repeat(bytes(4096)))
    result = result_of(job, 15)
    assert result["outcome"] == "failed"
    assert result["failure"]["cause"].startswith("the disk is full: ")
    assert result == job.run.result()
    assert_none_is_left(family)
    for sample in range(result["samples_finished"]):
        assert torch.equal(job.run.load_latents(sample), undisturbed[sample])
    ballast.unlink()
    assert_resumes(job, undisturbed)


def assert_whole(folder: Path, undisturbed: list[torch.Tensor]) -> None:
    for sample, latents in enumerate(undisturbed):
        assert torch.equal(Run(folder).load_latents(sample), latents), sample


def test_two_runs_at_once_and_the_death_of_a_kernel_that_started_one(
    tmp_path: Path, undisturbed, wait_until: WaitUntil
):
    """Neither disturbs the other, and nothing disturbs the one whose kernel is killed."""
    from jupyter_client.manager import start_new_kernel

    other = launch.start(CONFIG.replace(output_dir=tmp_path / "other", timeout_s=60))
    kernel, client = start_new_kernel(kernel_name="python3")
    try:
        client.execute(f"""
import launch
from vdpp_core import RunConfig
launch.start(RunConfig.model_validate_json({CONFIG.replace(output_dir=tmp_path / "run", timeout_s=60).to_json()!r}))
""")
        job = wait_until(lambda: (tmp_path / "run" / "job.json").exists() and launch.attach("run", tmp_path), 60)
        family = in_the_middle(job.folder, wait_until)
        kernel.signal_kernel(signal.SIGKILL)
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    assert [each.wait(120)["outcome"] for each in (job, other)] == ["ok", "ok"]
    assert_none_is_left(family)
    for folder in (job.folder, other.folder):
        assert_whole(folder, undisturbed)


def test_what_is_damaged_is_named_and_computed_again(tmp_path: Path, whole_run: Path, undisturbed):
    job = launch.Job(Path(shutil.copytree(whole_run, tmp_path / "run")))
    whole = job.result()
    changed, cut, missing = (job.run.latents_path(sample) for sample in (1, 2, 4))
    changed.write_bytes(changed.read_bytes()[:-4] + b"\0\0\0\0")
    cut.write_bytes(cut.read_bytes()[:100])
    missing.unlink()
    events = job.folder / "events" / "rank-0.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    events.write_text("".join([*lines[:20], lines[20][:30] + "\n", "[]\n", *lines[21:]]))
    (job.folder / "result.json").write_text("{")

    with pytest.warns(UserWarning, match=r"not trusted: .*result\.json"):
        again = job.result()
    assert (again["outcome"], again["makespan_s"]) == ("ok", whole["makespan_s"])
    assert again["damaged"] == [f"events/rank-0.jsonl, line {n}, is not an event: skipped" for n in (21, 22)]
    with pytest.warns(UserWarning, match="computed again") as told:
        job.resume()
    named = [str(line.message).partition(": ")[0] for line in told if line.category is UserWarning]
    assert named == [str(changed), str(cut)]
    assert result_of(job, 60)["resumed"] == {"attempt": 2, "samples_kept": 3}
    assert_whole(job.folder, undisturbed)


def test_videos_are_made_of_samples_that_were_finished_before(tmp_path: Path):
    arguments = {"command": "generate", "total_steps": 2, "num_frames": 2, "num_samples": 3, "threads": 1}
    job = launch.start(RunConfig(**arguments, output_dir=tmp_path / "run", parallel=Parallel(dp=2)))
    assert job.wait(120)["videos_written"] == 3
    videos = job.folder / "videos"
    before = {path.name: path.read_bytes() for path in videos.iterdir()}
    for name in ("sample-000.mp4", "sample-001.gif"):
        (videos / name).unlink()
    job.run.latents_path(2).unlink()
    for name in ("sample-002.mp4", "sample-002.gif", "sample-002.png", "contact-sheet.png"):
        (videos / name).unlink()
    assert job.resume().wait(120)["videos_written"] == 3
    assert {path.name: path.read_bytes() for path in videos.iterdir()} == before
    shutil.rmtree(job.folder)


def test_what_cannot_be_resumed(tmp_path: Path, whole_run: Path):
    job = launch.Job(Path(shutil.copytree(whole_run, tmp_path / "run")))
    with pytest.raises(ConfigError, match="nothing is missing"):
        job.resume()
    config = RunConfig.read(job.folder)
    job.run.latents_path(0).unlink()
    files.write_atomically(job.folder / "config.json", config.replace(save_latents=False).to_json())
    with pytest.raises(ConfigError, match="saved no latents"):
        job.resume()
    files.write_atomically(job.folder / "config.json", config.replace(dtype="bf16").to_json())
    with pytest.raises(ConfigError, match=r"computed on cpu in float32; here, cpu in bfloat16 gives other latents"):
        job.resume()
    assert not (job.folder / "attempts").exists()
    assert job.status() == "ok"
