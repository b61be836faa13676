"""What is ended of a run is known by its path in the process table, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from launch.__main__ import main
from launch.job import Job
from vdpp_core import RunConfig
from vdpp_core.compare import tables
from vdpp_core.runs import files, processes, results, runfolder
from vdpp_core.runs.run import Run

Start = Callable[..., psutil.Process]
SLEEPS = "import time; print(flush=True); time.sleep(600)"


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """called(*words): a process `python WORDS` whose modules are called as ours are, and only sleep."""
    for name in ("launch/__init__.py", "vdpp_core/__init__.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    for name in ("launch/supervisor.py", "vdpp_core/__main__.py", "script.py"):
        (tmp_path / name).write_text(SLEEPS)
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: object) -> psutil.Process:
        started.append(subprocess.Popen([sys.executable, *map(str, words)], cwd=tmp_path, stdout=subprocess.PIPE))
        out = started[-1].stdout
        assert out is not None
        out.readline()
        return psutil.Process(started[-1].pid)

    yield start
    for process in started:
        process.kill()
        process.communicate()


def lives(process: psutil.Process) -> bool:
    return process.status() != psutil.STATUS_ZOMBIE


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command that is refused says."""
    with pytest.raises(SystemExit):
        main(arguments)
    return capsys.readouterr().err


def test_a_run_whose_folder_is_gone_is_ended_by_its_path(called: Start, tmp_path: Path, capsys):
    run, other = tmp_path / "runs" / "run", tmp_path / "runs" / "other"
    ours = [
        called("-m", "launch.supervisor", run),
        called("-u", "-m", "vdpp_core", "run", run),
        called("-m", "vdpp_core", "run", "runs/run"),
    ]
    others = [
        called("-m", "launch.supervisor", run, other),  # it goes on with the next one
        called("-m", "launch.supervisor", tmp_path / "runs" / "run-2"),
        called("-m", "vdpp_core", "run", other),
        called("-m", "vdpp_core", "memory", run),
        called("script.py", "-m", "vdpp_core", "run", run),
        called("-c", SLEEPS, "-m", "vdpp_core", "run", run),
    ]
    main(["stop", "run"])
    assert capsys.readouterr().out.startswith("run: stopped; its folder is gone")
    assert [lives(process) for process in ours] == [False] * 3
    assert [lives(process) for process in others] == [True] * 6
    refusal = said(["stop", "run"], capsys)
    assert "No run 'run' in runs/" in refusal
    assert refusal.count("\n") == 1
    assert not run.exists()


def test_a_sweep_whose_folder_is_gone_is_ended_by_its_path(called: Start, tmp_path: Path):
    sweep = tmp_path / "runs" / "sweep"
    ours = called("-m", "launch.supervisor", sweep / "000", sweep / "001", "--sweep", sweep)
    others = called("-m", "launch.supervisor", sweep / "000", sweep / "001", "--sweep", tmp_path / "runs" / "sweep-2")
    main(["stop", "sweep"])
    assert not lives(ours)
    assert lives(others)


def test_the_process_of_somebody_else_is_not_touched(called: Start, tmp_path: Path, monkeypatch, capsys):
    process = called("-m", "launch.supervisor", tmp_path / "runs" / "run")
    monkeypatch.setattr("os.getuid", lambda: os.geteuid() + 1)
    assert "No run 'run' in runs/" in said(["stop", "run"], capsys)
    assert lives(process)


def test_a_launcher_is_found_without_its_record(called: Start, tmp_path: Path, capsys):
    """job.json is damaged, and the run goes on."""
    folder = runfolder.create(RunConfig(model="dummy", output_dir=tmp_path / "runs" / "run").for_ranks(1))
    process = called("-m", "launch.supervisor", folder)
    (folder / "job.json").write_text("{")
    with pytest.warns(UserWarning, match="not trusted"):
        assert Job(folder).stop()["outcome"] == "stopped"
    assert not lives(process)


def test_a_run_whose_folder_is_gone_has_failed(tmp_path: Path):
    """Nobody waits for it for ever."""
    job = Job(tmp_path / "gone")
    assert job.status() == "failed"
    assert job.wait(1)["failure"]["cause"] == "its folder is gone"
    assert job.stop()["outcome"] == "failed"
    assert not job.folder.exists()


@pytest.mark.parametrize("content", ["{", None])
def test_looking_at_a_run_without_a_whole_configuration(content: str | None, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    whole = runfolder.create(RunConfig(model="dummy", output_dir=tmp_path / "runs" / "whole").for_ranks(1))
    folder = runfolder.create(RunConfig(model="dummy", output_dir=tmp_path / "runs" / "run").for_ranks(1))
    processes.write_launcher(folder, os.getpid())
    for each in (whole, folder):
        results.settle(Run(each), reason="stopped")
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    main(["status", "run"])
    assert "must have a run's config.json" in capsys.readouterr().out
    main(["status"])
    assert "whole" in capsys.readouterr().out
    with pytest.warns(UserWarning, match="left out: .*config"):
        assert list(tables.table([folder, whole, tmp_path / "gone"]).run_id) == ["whole"]


def test_a_folder_is_gone_when_it_is_removed_moved_or_replaced(tmp_path: Path):
    place = tmp_path / "place"
    place.mkdir()
    here = files.Place(place)
    assert not here.is_gone()
    place.rmdir()
    assert here.is_gone()
    place.mkdir()  # as file systems like to do, with the number that has just become free
    assert here.is_gone()
    here.close()
    there = files.Place(place)
    place.rename(tmp_path / "elsewhere")
    assert there.is_gone()
    (tmp_path / "elsewhere").rename(place)
    assert not there.is_gone()
    there.close()
