"""What `launch status` says of one run in lines and of all in a table, and what `launch start` says to type next."""

import os
import sys

import pandas as pd
import pytest

import launch
from launch import commands, status
from vdpp_core import Parallel, RunConfig
from vdpp_core.cli import main as cli
from vdpp_core.cli.words import WIDTH
from vdpp_core.compare import tables
from vdpp_core.runs import results, runfolder
from vdpp_core.runs.run import Run

FACTS = {"device": "cpu", "dtype": "float32", "backend": "gloo", "threads": 1, "pid": 1, "created": 1.0, "host": "away"}


@pytest.fixture
def killed(tmp_path, write_events):
    """A run of two stages in runs/, whose second rank was killed in its second step."""
    config = RunConfig(total_steps=4, num_samples=2, parallel=Parallel(pp=2), output_dir=tmp_path / "runs" / "a-run")
    folder = runfolder.create(config)
    begin = [(90.0, "start", FACTS), (95.0, "loaded", {}), (96.0, "warm", {"seconds": 0.5}), (100.0, "clock", {})]
    step = (103.0, "step", {"sample": 0, "step": 2, "seconds": 1.0})
    write_events(folder, 0, *begin, (104.0, "error", {"error": "LostRankError: lost rank 1", "lost_rank": 1}))
    write_events(folder, 1, *begin, (102.0, "take", {"sample": 0, "seconds": 2.0}), step)
    log = folder / "logs" / "x" / "attempt_0" / "1" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text("Killed\n")
    results.settle(Run(folder), exits={1: -9})
    return launch.attach("a-run", root=tmp_path / "runs"), log


def test_a_failed_run_in_lines(killed):
    job, log = killed
    lines = dict(line.split(maxsplit=1) for line in status.in_lines(job) if not line.startswith("show it"))
    assert lines == {
        "run": "a-run",
        "outcome": "failed",
        "cause": "killed by SIGKILL",
        "rank": "1",
        "sample": "0",
        "step": "3",
        "done": "0 of 2 samples (12%)",
        "log": str(log),
    }
    assert status.in_lines(job)[-1].split(maxsplit=2)[2] == "python -m launch tail a-run --rank 1"


def test_the_table_of_all_runs_fits_a_terminal(killed):
    (line,) = status.table([killed[0]])
    assert line == "a-run  failed  0 of 2 samples (12%)  rank 1, sample 0, step 3: killed by SIGKILL"
    job = killed[0]
    long = job.run.result() | {"failure": {"rank": 1, "sample": 0, "step": 3, "cause": "why " * 50}}
    runfolder.write_result(job.folder, long)
    (line,) = status.table([job])
    assert len(line) == WIDTH
    assert line.endswith(" …")
    assert status.table([]) == ["no runs"]


def test_what_to_type_next(killed, monkeypatch):
    job, _ = killed
    monkeypatch.setattr(runfolder, "runs_root", lambda: job.folder.parent)
    words = [line.partition("#")[0].split() for line in commands._what_next(job)]
    assert words == [["python", "-m", "launch", verb, "a-run"] for verb in ("status", "tail", "stop")]
    for line in words:
        commands.parse(line[3:])
    monkeypatch.setattr(runfolder, "runs_root", lambda: job.folder)
    assert "is not in" in " ".join(commands._what_next(job))


def test_the_table_of_a_sweep():
    rows = [
        {
            "run_id": f"{repeat}{config}",
            "config": config,
            "repeat": repeat,
            "ranks": ranks,
            "steps_per_gpu": 28 // ranks,
        }
        | {
            "layout": ["1 rank", "pp 7"][config],
            "outcome": "ok",
            "disturbed": None,
            "samples_per_s": rate,
            "steps_per_gpu": 28 // ranks,
        }
        | dict.fromkeys(("first_sample_time_s", "latency_s", "makespan_s", "predicted_makespan_s"), 1.0)
        | {"max_peak_memory_gb": None}
        for repeat, config, ranks, rate in ((0, 0, 1, 2.0), (0, 1, 7, 14.0), (1, 1, 7, 13.0), (1, 0, 1, 1.0))
    ]
    table = pd.DataFrame(rows)
    table["scaling"] = tables.scaling(table)
    assert list(table["scaling"]) == [1.0, 7.0, 13.0, 1.0]
    lines = tables.by_layout_in_words(table)
    assert lines[0].split()[:3] == ["layout", "ranks", "steps/GPU"]
    assert lines[2].split() == ["pp", "7", "7", "4", *["1.000"] * 4, "13.5000", "10.00"]
    assert max(map(len, lines)) <= WIDTH
    assert lines[-2:] == [
        "samples/s: samples / makespan, fill included; scaling: samples/s over that of 1 rank",
        "medians of 2 repeats",
    ]
    failed = table.assign(outcome=["ok", "ok", "failed", "ok"], disturbed=[None, "slept", None, None])
    lines = tables.by_layout_in_words(failed)
    assert lines[2].endswith("1 ok, 1 failed")
    assert lines[-1] == "disturbed: 01: slept"


@pytest.mark.parametrize("main", [cli.main, commands.main])
def test_a_reader_that_leaves_ends_a_command_without_a_word(main, monkeypatch, capfd):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as end:
            main(["--help"])
    assert end.value.code == 141
    assert capfd.readouterr().err == ""
