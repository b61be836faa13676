"""The panel and the sliders as people use them: by keyboard, in JupyterLab, across reloads and restarts."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Locator, expect

from launch.widgets.controls import EXPLAINED
from tests.browser.lab import PATIENCE_S, WINDOW, Lab

PROJECT = Path(__file__).parents[2]
SCREENSHOTS = Path(__file__).parent / "screenshots"
SLIDERS = """
import ipywidgets as widgets
import launch
from vdpp_core import Parallel, RunConfig, split
from vdpp_core.plots import gantt
from vdpp_core.predict import schedule


def draw(ranks, height):
    RunConfig(height=height)
    layout = Parallel(pp=ranks)
    sizes = [len(steps) for steps in split(8, ranks)]
    spans = schedule.make(layout, sizes, 4, schedule.Seconds(0.1)).spans()
    return gantt.gantt([("a caption", spans, layout)], f"{ranks} ranks", "small print", predicted=True)


launch.sliders(
    draw,
    ranks=widgets.IntSlider(2, 1, 4, continuous_update=False),
    height=widgets.IntSlider(256, 64, 1280, step=64, continuous_update=False),
)
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


def field(panel: Locator, name: str) -> Locator:
    """A control by its label."""
    return panel.get_by_label(name, exact=True)


def picture_loaded(lab: Lab, besides: str = "") -> str:
    """The address of the figure, once one other than `besides` is loaded."""
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


def in_view_at_every_width(lab: Lab, panel: Locator, name: str) -> None:
    """Run, bar and prediction stay in view while people scroll, and nothing overflows."""
    scroller = "document.querySelector('.jp-NotebookPanel:not(.lm-mod-hidden) .jp-WindowedPanel-outer')"
    for width in (853, 1000, 1280):
        lab.page.set_viewport_size({"width": width, "height": 900})
        for theme in ("Dark", "Light"):
            lab.theme(f"JupyterLab {theme}")
            lab.page.evaluate(f"{scroller}.scrollTop = 0")
            lab.page.screenshot(path=SCREENSHOTS / f"{name}-{width}-{theme.lower()}.png")
        assert overflowing(panel) == []
        lab.page.evaluate(f"{scroller}.scrollTop = 450")
        for part in (
            button(panel, "Run"),
            panel.locator(".lab-card progress"),
            panel.locator(".lab-prediction b").first,
        ):
            expect(part).to_be_in_viewport(ratio=1)
        lab.page.screenshot(path=SCREENSHOTS / f"{name}-{width}-scrolled.png")
    lab.page.set_viewport_size(WINDOW)


def test_the_first_page_is_a_table_of_questions_that_opens_their_notebooks(lab: Lab):
    assert "default_url=/lab/tree/notebooks/README.md" in (PROJECT / "Makefile").read_text()
    shutil.copy(PROJECT / "notebooks" / "README.md", lab.root)
    notebooks = sorted(path.name for path in (PROJECT / "notebooks").glob("*.ipynb"))
    lab.page.evaluate("void jupyterapp.commands.execute('docmanager:open', {path: 'README.md'})")
    links = lab.page.locator(".jp-MarkdownViewer td a")
    expect(links).to_have_count(len(notebooks))
    addresses = links.evaluate_all("all => all.map(link => new URL(link.href).pathname.split('/').pop())")
    assert addresses == notebooks
    SCREENSHOTS.mkdir(exist_ok=True)
    lab.page.screenshot(path=SCREENSHOTS / "first-page.png")
    lab.page.evaluate("void jupyterapp.commands.execute('application:close-all')")


def test_sliders_by_keyboard_draw_another_figure_or_say_why_not(show):
    lab = show(SLIDERS)
    page, keys, cells = lab.page, lab.page.keyboard, "jupyterapp.shell.currentWidget.content.model.cells.length"
    before = picture_loaded(lab)
    ranks, height = page.get_by_role("slider", name="ranks"), page.locator(".widget-readout[aria-label=height]")
    ranks.focus()
    keys.press("ArrowRight")
    drawn = picture_loaded(lab, besides=before)
    expect(page.locator(".widget-readout").first).to_have_text("3")
    keys.press("d")
    keys.press("d")
    assert page.evaluate(cells) == 1

    for value, old in (("300", "lab-old"), ("320", "")):
        height.click()
        keys.press("ControlOrMeta+a")
        keys.type(value)
        keys.press("Enter")
        if old:
            expect(page.get_by_role("alert")).to_contain_text("height 300: must be a multiple of 8")
            ranks.press("ArrowLeft")  # no remedy
            expect(page.get_by_role("alert")).to_contain_text("shows ranks 3, height 256")
        expect(page.locator(f".widget-image{'.' * bool(old)}{old}")).to_have_count(1)
    picture_loaded(lab, besides=drawn)
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.locator(".lab-old")).to_have_count(0)


def test_runs_are_described_predicted_started_shown_and_compared_by_keyboard(show):
    lab = show(PANEL)
    panel, keys = lab.page.locator(".lab-panel"), lab.page.keyboard
    run, prediction = button(panel, "Run"), panel.locator(".lab-prediction")
    expect(run).to_be_enabled()
    expect(panel).to_contain_text("no finished run here")
    screenshots(lab, panel, "idle")
    assert overflowing(panel) == []
    for heading in ("More about the video", "Guidance", "Uneven stages", "Device, memory and measuring"):
        button(panel, f"▸ {heading}").press("Enter")
    expect(field(panel, "Threads of a rank")).to_be_visible()
    assert explained(panel) == EXPLAINED
    screenshots(lab, panel, "unfolded")
    assert overflowing(panel) == []

    field(panel, "Stages (pp)").fill("8")
    keys.press("Enter")
    expect(prediction.locator(".lab-wrong")).to_have_text("Stages (pp) 8: must be at most “Steps”, 3")
    expect(run).to_be_disabled()
    screenshots(lab, panel, "impossible")
    field(panel, "Stages (pp)").fill("1")
    field(panel, "Samples").fill("500")
    keys.press("Enter")
    expect(field(panel, "Samples")).to_have_value("500")
    field(panel, "Samples").fill("2")
    keys.press("Enter")
    expect(run).to_be_enabled()

    menu = field(panel, "Passes")
    menu.focus()
    expect(panel.locator(".lab-help")).to_have_text(EXPLAINED["Passes"])
    keys.press("ArrowDown")
    expect(menu).to_have_value("sequential")
    first, reached = reached_by_tab(lab, panel)
    assert first == "Run"
    assert {"Task", "Image", "Seed", "Guidance split (cfg)", "Share parameters (fsdp)", "Passes", "Runs"} <= reached
    run.focus()
    for key in "dd":
        keys.press(key)
    keys.press("Enter")
    expect(panel.locator(".lab-card")).to_contain_text(re.compile("Starting|starting"), timeout=5000)
    expect(panel.locator(".lab-card")).to_contain_text("ok, 2 of 2 samples")
    expect(panel.locator("table", has_text="makespan_s").last).to_contain_text("1 rank")
    picture_loaded(lab)
    screenshots(lab, panel, "finished")
    assert overflowing(panel) == []

    run.focus()
    keys.press("Space")
    running = panel.locator("select[multiple] option", has_text="running")
    expect(running).to_have_count(1)
    expect(running).to_have_count(0)
    panel.locator("select[multiple]").focus()
    keys.press("Home")
    keys.press("Shift+ArrowDown")
    expect(panel.locator(".lab-scroll thead th")).to_have_count(1 + 2)
    picture_loaded(lab)
    screenshots(lab, panel, "compared")
    in_view_at_every_width(lab, panel, "compared")

    field(panel, "Stages (pp)").fill("2")
    keys.press("Enter")
    panel.locator("select[multiple]").focus()
    keys.press("Home")
    button(panel, "Use its parameters").press("Enter")
    expect(field(panel, "Stages (pp)")).to_have_value("1")


def test_a_run_outlives_page_and_kernel_and_is_stopped(show):
    lab = show(PANEL)
    path = lab.page.evaluate("jupyterapp.shell.currentWidget.context.path")
    panel, keys = lab.page.locator(".lab-panel"), lab.page.keyboard
    for name, value in (("Samples", "64"), ("Steps", "100")):
        field(panel, name).fill(value)
        keys.press("Enter")
    button(panel, "▸ All that is predicted").press("Enter")
    expect(panel.locator("table").first).to_contain_text("50, 50")  # steps per stage: the last change has arrived
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
    expect(panel.locator(".lab-card")).to_contain_text(re.compile(r"stopped, \d+ of 64 samples"))
    expect(button(panel, "Stop")).to_be_disabled()
    expect(button(panel, "Resume")).to_have_count(0)  # it kept no latents
    screenshots(lab, panel, "stopped")


def further(lab: Lab) -> None:
    """Wait until the panel's bars have moved."""
    lab.wait("document.querySelector('.lab-panel progress')")
    now = "document.querySelector('.lab-panel progress').value"
    share = lab.page.evaluate(now)
    lab.wait(f"{now} > {share}")


def reached_by_tab(lab: Lab, panel: Locator) -> tuple[str, set[str]]:
    """The name of the first element of the panel that Tab focuses, and of all of them up to the list of runs."""
    panel.locator(".lab-card").evaluate("card => {card.tabIndex = -1; card.focus()}")
    name = "document.activeElement.ariaLabel || document.activeElement.textContent.trim()"
    found: list[str] = []
    while "Runs" not in found:
        lab.page.keyboard.press("Tab")
        found.append(lab.page.evaluate(name))
        assert len(found) < 120, found
    return found[0], set(found)


def explained(panel: Locator) -> dict[str, str]:
    """Name -> explanation of every control, as a screen reader has them."""
    controls = panel.locator("[aria-description]:is(select, input, [role=slider])")
    return dict(controls.evaluate_all("all => all.map(one => [one.ariaLabel, one.getAttribute('aria-description')])"))


def overflowing(panel: Locator) -> list[str]:
    """Elements that reach beyond the panel's right edge and do not scroll."""
    return panel.evaluate(
        """panel => {
            const edge = panel.getBoundingClientRect().right + 1;
            return [...panel.querySelectorAll('*')]
                .filter(one => !one.closest('.lab-scroll, pre, svg') && one.getBoundingClientRect().right > edge)
                .map(one => one.outerHTML.slice(0, 200));
        }"""
    )
