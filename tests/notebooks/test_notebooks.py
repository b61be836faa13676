"""The notebooks as files, executed with small parameters, and rendered."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import launch
from launch.report import pages
from tests.conftest import write_run
from tests.notebooks.conftest import NOTEBOOKS, PREDICTING, SMALL, assert_renders, read, texts
from vdpp_core import ConfigError, Parallel, RunConfig
from vdpp_core.compare import tables
from vdpp_core.plots import plan_overview
from vdpp_core.predict import accuracy, published, rates
from vdpp_core.runs import runfolder

NOTEBOOKS_OF = {path.stem: path for path in NOTEBOOKS}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_without_outputs_and_with_one_parameters_cell(path: Path):
    book = read(path)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert sum("parameters" in cell.metadata.get("tags", []) for cell in code) == 1
    assert not any(re.search(r"^class ", cell.source, re.M) for cell in code)
    assert 20 <= len(book.cells) <= 30
    assert book.cells[0].source.startswith("# ")
    assert "**Question.**" in book.cells[0].source
    assert "## What we learned" in book.cells[-1].source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_slider_cell_is_followed_by_a_static_figure_of_the_same_function(path: Path):
    code = [cell.source for cell in read(path).cells if cell.cell_type == "code"]
    for source, following in zip(code, [*code[1:], ""], strict=True):
        if "launch.sliders(" in source:
            function = re.search(r"launch\.sliders\(\s*(\w+)", source)
            assert function is not None
            assert f"{function[1]}(" in following
        if "launch.panel(" in source:
            assert "launch.compare(" in following


@pytest.mark.parametrize("name", [name for name in SMALL if name not in PREDICTING])
def test_executes_and_renders_to_a_page_that_needs_no_network(
    executed: Callable[[str], Any], name: str, tmp_path: Path
):
    if name == "07_plots":
        executed("01_pipeline_vs_data_parallel")  # its sweep is what the plots show
    assert_renders(executed(name), name, tmp_path)


def test_the_first_notebook_asserts_equality_of_one_and_two_ranks(executed: Callable[[str], Any]):
    shown = texts(executed("00_setup"))
    assert "2 stages = 1 rank" in shown
    assert "gb_per_s" in shown


def test_videos_are_embedded_and_equal_to_the_official_ones(executed: Callable[[str], Any]):
    assert pages.render(executed("00_setup"), "set-up").count('src="data:video/mp4;base64,') == 2
    page = pages.render(executed("05_quality"), "quality")
    assert page.count('src="data:video/mp4;base64,') == 2 + 4 + 4  # official and split, seeds, right and wrong
    shown = texts(executed("05_quality"))
    equality = shown[shown.index("equal_latents") :]
    assert re.findall(r"<th>equal_frames</th>\s*<td>([\d.]+)</td>", equality) == ["4.0"]
    assert "ball.png, 256 × 256 pixels, resized to 64 × 64" in shown


def test_the_second_notebook_shows_equality_and_the_corrected_published_rate(executed: Callable[[str], Any]):
    shown = texts(executed("01_pipeline_vs_data_parallel"))
    equality = shown[shown.index("equal to the official pipeline") :]
    assert equality.count("<td>True</td>") == 9
    assert "<td>False</td>" not in equality
    assert "<td>0.410</td>" in shown  # 14 / (⌈14/4⌉ · 8.54 s), published as 0.409


def test_every_slider_of_the_planner_moves_to_both_ends_and_says_what_cannot_be(executed: Callable[[str], Any]):
    shown = texts(executed("04_planner"))
    moved = re.findall(r"^moved (\w+): (.*)$", shown, re.M)
    assert len(moved) == 15
    assert {name for name, words in moved if words != "redrawn"} == set()
    said = dict(re.findall(r"^(.*) -> (.*)$", shown, re.M))
    assert said["{'dp': 4, 'pp': 2}"] == "layout dp 4 × pp 2: needs 8 GPUs, but only 6 are available"
    assert said["{'pp': 6, 'total_steps': 5}"] == "pp 6: must be at most total_steps, 5"
    assert said["{'frames': 3, 'num_frames': 2}"] == "frames 3: must be at most num_frames, 2"
    assert "at least two ranks per stage" in said["{'fsdp': True}"]
    assert said["one video"].startswith("goal cadence: compares the time between videos")
    assert said["too large"].endswith("nothing fits")


def test_the_planner_predicts_published_times_and_runs_of_this_machine(executed: Callable[[str], Any]):
    shown = texts(executed("04_planner"))
    assert "one A5000 at 14 × 72 × 128; checked against 16 measurements: 9 in 10 within " in shown
    assert re.search(r"<th>4</th>\s*<td>0.409</td>\s*<td>0.4094</td>", shown)  # ⌈14/4⌉ rounds
    assert "error of the makespan, median" in shown
    assert "47 figures, 20 hold" in shown
    assert "<td>9.33</td>" in shown  # a corrected bound


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
    assert "Times based on: measured: run " in shown
    assert re.search(r"<th>outcome</th>\s*<td>ok</td>\s*<td>ok</td>\s*<td>stopped</td>", shown)
    assert re.search(r"stopped after [1-9]\d* of 1000 samples", shown)


def test_the_notebook_of_any_pipeline_compares_with_the_official_ones_and_says_what_is_refused(
    executed: Callable[[str], Any],
):
    shown = texts(executed("08_any_pipeline"))
    rows = re.findall(r"<th>((?:animatediff|hunyuan-video) \w+)</th>\s*((?:<td>[^<]+</td>\s*){5})", shown)
    equality = {name: re.findall(r"<td>([^<]+)</td>", cells) for name, cells in rows}
    assert {name: cells[:2] for name, cells in equality.items()} == dict.fromkeys(equality, ["bit-equal"] * 2)
    assert len(equality) == 2
    cfg, _, fsdp = equality["animatediff PNDMScheduler"][2:]
    assert {cfg, fsdp} <= {"bit-equal", *(f"{digit}e-0{power}" for digit in range(1, 10) for power in (6, 7, 8))}
    assert "the call of LTXLatentUpsamplePipeline has no num_inference_steps" in shown
    assert "call guidance: must be one of " in shown
    assert re.search(r"<th[^>]*>as-ready</th>", shown)


def test_the_notebook_of_experts_shows_what_fits_and_that_all_ways_give_the_official_latents(
    executed: Callable[[str], Any],
):
    shown = texts(executed("09_experts"))
    assert "out of memory while loading" in shown
    assert shown.count("equal to the official pipeline") == 2
    who = dict(re.findall(r"<th>([0-3])</th>\s*<td>[0-3]–[0-3]</td>\s*<td>([0-9, ]+)</td>", shown))
    assert who == {"0": "0, 1, 2, 3", "1": "0, 3", "2": "1", "3": "2"}
    assert re.search(r"stages beat two loads a video, 4 steps, 2 GPUs, predicted</th>\s*<td[^>]*>(below|at any)", shown)
