"""A report in a browser without a network: every page opens, every picture is there, nothing else is asked for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from playwright.sync_api import Browser, Page

from launch.report.execute import PROJECT, report
from vdpp_core import Parallel, RunConfig
from vdpp_core.runs import results, runfolder
from vdpp_core.runs.run import Run

FACTS = {"host": "a", "device": "cpu", "dtype": "float32", "backend": "gloo", "threads": 1}
STEP_S = 0.25
WIDTHS = (800, 1280)
BEYOND = """limit => [...document.querySelectorAll("main *")].filter(
    one => !one.parentElement.closest(".scroll") && one.getBoundingClientRect().right > limit + 1
).map(one => one.outerHTML.slice(0, 80))"""


def write_sweep(folder: Path, write_events: Callable[..., None]) -> None:
    """A sweep that was run: one rank, two stages, two replicas, as fast as they can be."""
    runs = []
    for number, layout in enumerate([Parallel(), Parallel(pp=2), Parallel(dp=2)]):
        run_id = f"{number:03d}-{layout}".replace(" ", "")
        config = RunConfig(
            command="benchmark", total_steps=4, num_samples=4, parallel=layout, output_dir=folder / run_id
        )
        run = runfolder.create(config)
        for rank in range(layout.world_size):
            write_events(run, rank, *events(config, rank))
        results.write(Run(run), "ok")
        runs.append({"run_id": run_id, "config": number, "repeat": 0})
    (folder / "sweep.json").write_text(json.dumps(runs))


def events(config: RunConfig, rank: int) -> list[tuple[float, str, dict[str, Any]]]:
    replica, stage, *_ = config.layout.place(rank)
    steps = config.stages()[stage]
    told: list[tuple[float, str, dict[str, Any]]] = [(1.0, "start", FACTS), (2.0, "warm", {"seconds": STEP_S})]
    told.append((10.0, "clock", {}))
    for turn, sample in enumerate(config.samples(replica), start=stage):
        t = 10 + turn * len(steps) * STEP_S
        told.append((t, "take", {"sample": sample, "seconds": 0.0}))
        for done, step in enumerate(steps, start=1):
            told.append((t + done * STEP_S, "step", {"sample": sample, "step": step, "seconds": STEP_S}))
        told.append(
            (t + len(steps) * STEP_S, "sample" if steps[-1] == 3 else "send", {"sample": sample, "seconds": 0.0})
        )
    return [*told, (30.0, "done", {"memory": {"allocated_gb": 0.5}})]


@pytest.fixture
def reports(tmp_path: Path, write_events: Callable[..., None]) -> Path:
    """figures/ with a report of the notebook of the plots, of a sweep written by hand, and of one that fails."""
    write_sweep(tmp_path / "runs" / "sweep", write_events)
    fails = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    nbformat.write(fails, tmp_path / "00_fails.ipynb")
    plots = shutil.copy(next((PROJECT / "notebooks").glob("*_plots.ipynb")), tmp_path)
    failed, plotted = report([str(tmp_path / "00_fails.ipynb"), plots], ["sweep=sweep"], figures=tmp_path / "figures")
    assert failed.error == "failed in cell 1: ZeroDivisionError: division by zero"
    assert plotted.error is None
    return tmp_path / "figures" / "reports"


def test_every_picture_of_a_report_is_drawn_without_a_network(chromium: Browser, reports: Path):
    assert not list(reports.parent.glob("*.png"))  # which a report of some notebooks leaves as they are
    requests: list[str] = []
    with chromium.new_context(offline=True) as context:
        page = context.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.goto((reports / "index.html").as_uri())
        page.wait_for_url("**/*-*-*/index.html")  # led on to the latest
        pictures = [widths(page)]
        assert overflow(page) == {width: [] for width in WIDTHS}
        for link in page.eval_on_selector_all("h3 a", "links => links.map(link => link.href)"):
            page.goto(link)
            pictures.append(widths(page))
            assert overflow(page) == {width: [] for width in WIDTHS}
        assert len(page.locator("figure").all()) == len(pictures[-1])
        assert all(words.strip() for words in page.locator("figcaption b").all_inner_texts())
        alternatives = page.eval_on_selector_all("img", "images => images.map(image => image.alt)")
        assert all(len(words) > 20 for words in alternatives)
        assert not page.get_by_text("import pandas").is_visible()  # code is folded
        page.locator("summary").first.click()
        assert page.get_by_text("import pandas").is_visible()
        assert printed(page) == []
    index, failed, plots = pictures
    assert failed == []
    assert len(index) == 1
    assert len(plots) > 2
    assert all(width > 0 for width in index + plots)
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []


def widths(page: Page) -> list[int]:
    page.wait_for_load_state("load")
    return page.eval_on_selector_all("img", "images => images.map(image => image.naturalWidth)")


def overflow(page: Page) -> dict[int, list[str]]:
    """For each width of the window: what reaches beyond it, other than inside a box that scrolls."""
    found = {}
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        found[width] = page.evaluate(BEYOND, width)
    return found


def printed(page: Page) -> list[str]:
    """Cells of tables that reach beyond a sheet of A4, which does not scroll."""
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 1031, "height": 700})  # 297 mm less the margins
    cells = "limit => [...document.querySelectorAll('td, th')].filter(one => one.getBoundingClientRect().right > limit)"
    return page.evaluate(f"{cells}.map(one => one.innerText)", 1031)
