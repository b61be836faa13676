"""The panel and the sliders as people use them: by keyboard, in JupyterLab, over reloads and restarts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Locator, expect

from launch.widgets.controls import BREAKABLE
from tests.browser.lab import PATIENCE_S, Lab

SCREENSHOTS = Path(__file__).parent / "screenshots"
SLIDERS = """
import ipywidgets as widgets
import launch
from vdpp_core import Parallel, split
from vdpp_core.plots import gantt
from vdpp_core.predict import schedule


def draw(ranks):
    layout = Parallel(pp=ranks)
    sizes = [len(steps) for steps in split(8, ranks)]
    spans = schedule.make(layout, sizes, 4, schedule.Seconds(0.1)).spans()
    return gantt.gantt([("a caption", spans, layout)], f"{ranks} ranks", "small print", predicted=True)


launch.sliders(draw, ranks=widgets.IntSlider(2, 1, 4, continuous_update=False))
"""
PANEL = """
import launch
from vdpp_core import RunConfig, Parallel

launch.panel(RunConfig(num_frames=2, total_steps=3, num_samples=2, threads=1, parallel=Parallel(pp=2)))
"""
expect.set_options(timeout=PATIENCE_S * 1000)


@pytest.fixture
def show(lab: Lab, tmp_path: Path) -> Iterator[object]:
    """show(source): a notebook of one cell in a folder of its own, executed; closed at the end of the test."""
    folder = lab.root / tmp_path.name
    folder.mkdir()

    def run(source: str) -> Lab:
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source.strip())])
        book.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
        nbformat.write(book, folder / "one.ipynb")
        lab.open(f"{folder.name}/one.ipynb")
        lab.run_all()
        return lab

    yield run
    lab.close()


def button(panel: Locator, name: str) -> Locator:
    return panel.get_by_role("button", name=name, exact=True)


def handle(panel: Locator, name: str) -> Locator:
    return panel.locator(".widget-slider").filter(has=label(panel, name)).locator(".noUi-handle")


def label(panel: Locator, name: str) -> Locator:
    return panel.page.locator(".widget-label", has_text=re.compile(f"^{name.replace('_', BREAKABLE)}$"))


def picture_loaded(lab: Lab, besides: str = "") -> str:
    """The address of a figure that is there and not the one known before."""
    found = ".jp-OutputArea .widget-image"
    lab.wait(
        f"(() => {{const one = document.querySelector('{found}');"
        f" return one && one.src !== '{besides}' && one.complete && one.naturalWidth > 100}})()"
    )
    return str(lab.page.locator(found).first.get_attribute("src"))


def screenshots(lab: Lab, panel: Locator, name: str) -> None:
    """The panel in both themes, for people to look at."""
    SCREENSHOTS.mkdir(exist_ok=True)
    for theme in ("Dark", "Light"):
        lab.theme(f"JupyterLab {theme}")
        panel.screenshot(path=SCREENSHOTS / f"{name}-{theme.lower()}.png")


def test_a_slider_moved_by_keyboard_draws_another_figure(show):
    lab = show(SLIDERS)
    before = picture_loaded(lab)
    lab.page.locator(".noUi-handle").focus()
    lab.page.keyboard.press("ArrowRight")
    picture_loaded(lab, besides=before)
    expect(lab.page.locator(".widget-readout")).to_have_text("3")


def test_runs_are_described_foretold_started_shown_and_compared_by_keyboard(show):
    lab = show(PANEL)
    panel, keys = lab.page.locator(".lab-panel"), lab.page.keyboard
    run = button(panel, "Run")
    expect(run).to_be_enabled()
    expect(panel).to_contain_text("no run here tells the seconds")
    screenshots(lab, panel, "idle")
    assert overflowing(panel) == []

    handle(panel, "pp").focus()
    keys.press("End")
    expect(panel.locator(".lab-foretold .lab-wrong")).to_have_text("pp 8: must be at most total_steps, 3")
    expect(run).to_be_disabled()
    screenshots(lab, panel, "impossible")
    keys.press("Home")
    expect(run).to_be_enabled()

    menu = panel.locator(".widget-dropdown").filter(has=label(panel, "guidance_mode")).locator("select")
    before = panel.locator(".lab-foretold").inner_text()
    menu.focus()
    keys.press("ArrowDown")
    expect(menu).to_have_value("sequential")
    lab.wait(f"document.querySelector('.lab-foretold').innerText !== {json.dumps(before)}")
    expect(run).to_be_enabled()  # until the prediction is there, Tab passes it by
    assert {"Run", "command", "image", "seed", "cfg", "fsdp", "threads"} <= reached_by_tab(lab, panel, until="Run")
    keys.press("Enter")
    expect(panel).to_contain_text("ok, 2 of 2 samples")
    expect(panel.locator("table", has_text="makespan_s").last).to_contain_text("1 rank")
    expect(panel.locator(".lab-foretold")).to_contain_text("seconds: measured: run ")
    picture_loaded(lab)
    screenshots(lab, panel, "finished")
    assert overflowing(panel) == []

    button(panel, "Run").focus()
    keys.press("Space")
    goes_on = panel.locator("select[multiple] option", has_text="goes on")
    expect(goes_on).to_have_count(1)
    expect(goes_on).to_have_count(0)
    panel.locator("select[multiple]").focus()
    keys.press("Home")
    keys.press("Shift+ArrowDown")
    expect(panel.locator(".lab-scroll thead th")).to_have_count(1 + 2)
    picture_loaded(lab)
    screenshots(lab, panel, "compared")
    assert overflowing(panel) == []


def test_a_run_outlives_page_and_kernel_and_is_stopped(show):
    lab = show(PANEL)
    path = lab.page.evaluate("jupyterapp.shell.currentWidget.context.path")
    panel, keys = lab.page.locator(".lab-panel"), lab.page.keyboard
    for name in ("num_samples", "total_steps"):
        handle(panel, name).focus()
        keys.press("End")
    expect(panel.locator(".lab-foretold")).to_contain_text("50, 50")  # steps of the stages: the last change is known
    expect(button(panel, "Run")).to_be_enabled()
    button(panel, "Run").focus()
    keys.press("Space")
    expect(panel).to_contain_text(re.compile(r"rank 1\s*sample \d+, step \d+"))
    run_id = panel.locator("progress").first.get_attribute("aria-label")
    screenshots(lab, panel, "running")
    assert overflowing(panel) == []

    lab.save()
    lab.page.reload()
    lab.ready(path)
    further(lab)

    lab.restart_kernel()
    lab.run_all()
    expect(panel.locator("progress").first).to_have_attribute("aria-label", run_id)
    further(lab)

    button(panel, "Stop").focus()
    keys.press("Enter")
    expect(panel).to_contain_text(re.compile(r"stopped, \d+ of 64 samples"))
    expect(button(panel, "Stop")).to_be_disabled()
    screenshots(lab, panel, "stopped")


def further(lab: Lab) -> None:
    """Until the bars of the panel have moved on."""
    lab.wait("document.querySelector('.lab-panel progress')")
    now = "document.querySelector('.lab-panel progress').value"
    share = lab.page.evaluate(now)
    lab.wait(f"{now} > {share}")


def reached_by_tab(lab: Lab, panel: Locator, until: str) -> set[str]:
    """What has the focus one after the other from the first control on, by label or text."""
    panel.locator("select").first.focus()
    words = """() => {
        const one = document.activeElement, row = one.closest('.widget-inline-hbox');
        const labels = [...(row?.querySelectorAll('.widget-label, .widget-label-basic') ?? [one])];
        return labels.map(label => label.textContent.replace('\u200b', '')).join('').trim();
    }"""
    found: list[str] = []
    while until not in found:
        found.append(lab.page.evaluate(words))
        assert len(found) < 120, found
        if found[-1] != until:
            lab.page.keyboard.press("Tab")
    return set(found)


def overflowing(panel: Locator) -> list[str]:
    """What reaches beyond the right edge of the panel and cannot be scrolled to by itself."""
    return panel.evaluate(
        """panel => {
            const edge = panel.getBoundingClientRect().right + 1;
            return [...panel.querySelectorAll('*')]
                .filter(one => !one.closest('.lab-scroll, pre, svg') && one.getBoundingClientRect().right > edge)
                .map(one => one.outerHTML.slice(0, 200));
        }"""
    )
