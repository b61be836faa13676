"""The notebooks of the planner, of the panel and of training, executed with small parameters, and rendered."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import launch
from tests.conftest import write_run
from tests.notebooks.conftest import NOTEBOOKS, PLANNING, SAID_TWICE, assert_renders, read, texts
from vdpp_core import ConfigError, Parallel, RunConfig
from vdpp_core.compare import tables
from vdpp_core.plots import plan_overview
from vdpp_core.predict import accuracy, published, rates
from vdpp_core.runs import runfolder

NOTEBOOKS_OF = {path.stem: path for path in NOTEBOOKS}


@pytest.mark.parametrize("name", PLANNING)
def test_executes_and_renders_to_a_page_that_needs_no_network(
    executed: Callable[[str], Any], name: str, tmp_path: Path
):
    assert_renders(executed(name), name, tmp_path)


def test_every_slider_of_the_planner_moves_to_both_ends_and_says_what_cannot_be(executed: Callable[[str], Any]):
    shown = texts(executed("04_planner"))
    moved = re.findall(r"^moved ([\w ]+): (.*)$", shown, re.M)
    assert len(moved) == 15
    assert {name for name, words in moved if words != "redrawn"} == set()
    said = dict(re.findall(r"^(.*) -> (.*)$", shown, re.M))
    assert said["{'dp': 4, 'pp': 2}"] == "layout dp 4 × pp 2: needs 8 GPUs, but only 6 are available"
    assert said["{'pp': 6, 'total_steps': 5}"] == "pp 6: must be at most total_steps, 5"
    assert said["{'frames': 3, 'num_frames': 2}"] == "frames 3: must be at most num_frames, 2"
    assert "at least two ranks per stage" in said["{'fsdp': True}"]
    assert said["one video"].startswith("goal cadence: compares the time between videos")
    assert "nothing fits on 1 GPU for latency" in said["too large"]
    assert SAID_TWICE in shown


def test_the_planner_predicts_published_times_and_runs_of_this_machine(executed: Callable[[str], Any]):
    shown = texts(executed("04_planner"))
    assert "one A5000 at 14 × 72 × 128; checked against 16 measurements: 9 in 10 within " in shown
    assert re.search(r"<th>4</th>\s*<td>0.409</td>\s*<td>0.4094</td>", shown)  # ⌈14/4⌉ rounds
    assert "error of the makespan, median" in shown


def test_the_planner_says_so_where_all_runs_were_disturbed(tmp_path: Path, monkeypatch, capsys):
    """Also its own, made where there are none: a sentence, and no figure."""
    monkeypatch.chdir(tmp_path)
    short = RunConfig(num_samples=2, total_steps=3, device="cpu", parallel=Parallel())
    stopped = [launch.Job(write_run(tmp_path, name, short, 0.1, stopped_s=20.0)) for name in "ab"]
    stub = SimpleNamespace(sweep=lambda _: SimpleNamespace(jobs=stopped), watch=lambda _: None)
    cells = [cell.source for cell in read(NOTEBOOKS_OF["04_planner"]).cells]
    compare = next(number for number, source in enumerate(cells) if "accuracy.among(" in source)
    names = {"launch": stub, "accuracy": accuracy, "runfolder": runfolder, "plan_overview": plan_overview}
    names |= {"tables": tables, "RunConfig": RunConfig, "Parallel": Parallel}
    for source in cells[compare : compare + 2]:
        exec(source, names)
    assert capsys.readouterr().out.startswith("There are no two undisturbed runs of one kind: ")
    assert names["figure"] is None


def test_the_planner_takes_no_disturbed_run_to_calibrate_on(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    short = RunConfig(num_samples=2, total_steps=3, device="cpu", parallel=Parallel())
    write_run(tmp_path, "stopped", short, 0.1, stopped_s=20.0)
    source = next(cell.source for cell in read(NOTEBOOKS_OF["04_planner"]).cells if "rates.from_run(" in cell.source)
    names = {"launch": launch, "accuracy": accuracy, "published": published, "rates": rates}
    names |= {"RunConfig": RunConfig, "ConfigError": ConfigError}
    exec(source, names | {"CALIBRATE": "stopped", "MODEL": "svd"})
    said = capsys.readouterr().out
    assert "was disturbed: rank 0 took 20.1 s at sample 1, step 2" in said
    assert "The published row is used instead.\n" in said
    assert "one A5000 at 14 × 72 × 128" in said


def test_the_lab_runs_what_its_panel_would_and_predicts_one_layout_from_another(executed: Callable[[str], Any]):
    shown = texts(executed("06_lab"))
    assert "no finished run here" in shown
    disturbed = "used the same cores" in shown  # by other tests' runs: then its times predict nothing
    assert disturbed or "Times based on: measured: run " in shown
    assert re.search(r"<th>outcome</th>\s*<td>ok</td>\s*<td>ok</td>\s*<td>stopped</td>", shown)
    assert re.search(r"stopped after [1-9]\d* of 1000 samples", shown)


def test_every_technique_trains_the_same_model_and_the_articles_figures_have_verdicts(executed: Callable[[str], Any]):
    shown = texts(executed("10_training_parallelism"))
    assert shown.count("<td>transformer</td>") == 0  # the small one
    assert re.search(r"<th>(PP × TP × FSDP)</th>\s*<td>[0-9.]+e-0[78]</td>", shown)
    assert re.search(r"47 figures, 20 hold, (2\d|3\d) measured here", shown)
    assert "<td>9.33</td>" in shown  # a corrected bound
    assert re.search(r"<td>245 GB</td>\s*<td>245 GB</td>\s*<td>False</td>\s*<td>367.5 GB[^<]*</td>", shown)
    assert "2.25 P, without the second all-gather 1.5 P" in shown
