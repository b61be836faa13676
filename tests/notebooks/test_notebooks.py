"""The notebooks as files; those of the basics executed with small parameters, and rendered."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks.conftest import IN_OTHER_FILES, NOTEBOOKS, SMALL, assert_renders, page_of, read, texts


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


def test_the_panel_comes_third_and_its_picture_next():
    book = read(next(path for path in NOTEBOOKS if path.stem == "06_lab"))
    assert "launch.panel(" in book.cells[2].source
    assert "(../figures/panel.png)" in book.cells[3].source


@pytest.mark.parametrize("name", [name for name in SMALL if name not in IN_OTHER_FILES])
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


def test_videos_are_embedded_and_equal_to_the_official_ones(executed: Callable[[str], Any], tmp_path: Path):
    assert page_of(executed("00_setup"), tmp_path).count('src="data:video/mp4;base64,') == 2
    page = page_of(executed("05_quality"), tmp_path)
    assert page.count('src="data:video/mp4;base64,') == 2 + 4 + 4  # official and split, seeds, right and wrong
    shown = texts(executed("05_quality"))
    assert "<td>bit-equal to the official pipeline, all 4 samples</td>" in shown
    assert "<td>equal to the official pipeline's, all 4 samples</td>" in shown
    assert "ball.png, 256 × 256 pixels, resized to 64 × 64" in shown


def test_the_second_notebook_shows_equality_and_the_corrected_published_rate(executed: Callable[[str], Any]):
    shown = texts(executed("01_pipeline_vs_data_parallel"))
    equality = shown[shown.index("equal to the official pipeline") :]
    assert equality.count("<td>True</td>") == 9
    assert "<td>False</td>" not in equality
    assert "<td>0.410</td>" in shown  # 14 / (⌈14/4⌉ · 8.54 s), published as 0.409
