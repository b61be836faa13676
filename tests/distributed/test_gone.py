"""Runs whose folder is removed, or damaged, while they are at work: they end within seconds, and can be ended."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import launch
from launch.__main__ import main
from vdpp_core import Parallel, RunConfig
from vdpp_core.runs.run import Run

WaitUntil = Callable[[Callable[[], Any], float], Any]
LONG = RunConfig(
    model="dummy",
    total_steps=100,
    num_samples=200,
    latent_shape=(1, 4, 8, 32, 32),
    device="cpu",
    threads=1,
    parallel=Parallel(pp=2),
)


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def finished(folder: Path) -> int:
    return sum(event.kind == "sample" for event in Run(folder).events())


@pytest.fixture
def at_work(tmp_path: Path, wait_until: WaitUntil) -> Iterator[Callable[..., tuple[Path, list[psutil.Process]]]]:
    """at_work(**arguments): the folder of a run in the middle, and its processes: its ranks and the launcher."""
    family: list[psutil.Process] = []

    def start(**arguments: Any) -> tuple[Path, list[psutil.Process]]:
        job = launch.start(LONG.replace(output_dir=tmp_path / "runs" / "run", **arguments))
        wait_until(lambda: finished(job.folder) >= 2, 90)
        starts = [event for event in job.run.events() if event.kind == "start"]
        starts.sort(key=lambda event: event.rank)
        launcher = json.loads((job.folder / "job.json").read_text())
        family.extend(psutil.Process(pid) for pid in [*(start.pid for start in starts), launcher["pid"]])
        return job.folder, family

    yield start
    for process in filter(lives, family):
        process.kill()


def remove(folder: Path) -> None:
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)  # ranks may write in the middle of it


@pytest.mark.parametrize(("save_latents", "frozen"), [(False, False), (True, True)])
def test_a_run_ends_when_its_folder_is_gone(
    save_latents: bool, frozen: bool, at_work, tmp_path: Path, wait_until: WaitUntil
):
    """Also one of whose ranks stands still; and nothing is written into the folder that comes after it."""
    folder, family = at_work(save_latents=save_latents)
    if frozen:
        family[1].suspend()
    folder.rename(tmp_path / "removed")
    (folder / "events").mkdir(parents=True)
    remove(tmp_path / "removed")
    wait_until(lambda: not any(map(lives, family)), 10)
    assert [path.name for path in folder.rglob("*")] == ["events"]


def test_a_folder_that_was_removed_stays_so(at_work, wait_until: WaitUntil):
    folder, family = at_work()
    remove(folder)
    wait_until(lambda: not any(map(lives, family)), 10)
    assert not folder.exists()
    assert launch.Job(folder).wait(1)["failure"]["cause"] == "its folder is gone"


@pytest.mark.parametrize("content", ["{", None])
def test_a_run_is_stopped_without_its_configuration(
    content: str | None, at_work, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys
):
    """job.json says who watches over it."""
    monkeypatch.chdir(tmp_path)
    folder, family = at_work()
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    main(["status", "run"])
    assert "must have a run's config.json" in capsys.readouterr().out
    assert all(map(lives, family))
    main(["stop", "run"])
    assert capsys.readouterr().out.startswith("run: stopped")
    assert not any(map(lives, family))


def test_ranks_without_a_configuration_do_not_outlive_their_launcher(at_work, wait_until: WaitUntil):
    folder, family = at_work()
    (folder / "config.json").write_text("{")
    family[-1].send_signal(signal.SIGKILL)
    wait_until(lambda: not any(map(lives, family)), 10)


def test_a_sweep_goes_on_when_the_folder_of_a_run_is_gone(tmp_path: Path, wait_until: WaitUntil):
    short = LONG.replace(total_steps=2, num_samples=2, latent_shape=(1, 4, 2, 8, 8))
    sweep = launch.sweep([LONG, short], root=tmp_path)
    try:
        wait_until(lambda: finished(sweep.jobs[0].folder), 90)
        remove(sweep.jobs[0].folder)
        table = sweep.wait(60)
    finally:
        sweep.stop()
    assert list(table["outcome"]) == ["ok"]
    assert sweep.status() == "1 of 2 not ok: failed"
    assert (sweep.folder / "table.csv").exists()
    assert not sweep.jobs[0].folder.exists()
