"""Renews figures/panel.png: the panel after two runs, which it compares. Needs Chromium and half a minute.

python -m tests.browser.panel_picture
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import nbformat
from PIL import Image
from playwright.sync_api import expect, sync_playwright

from tests.browser.lab import CHROMIUM, PATIENCE_S, QUIET, Lab, server

PICTURE = Path(__file__).parents[2] / "figures" / "panel.png"
WINDOW = {"width": 1280, "height": 1900}
SOURCE = """
import launch
from launch.widgets.predictions import Predictions
from vdpp_core import Parallel, RunConfig

config = RunConfig(num_frames=7, total_steps=12, num_samples=6, warmup_samples=1, threads=1, parallel=Parallel(pp=2))
first = launch.start(config)
first.wait()
other = config.replace(parallel=Parallel(dp=2))
launch.start(other, predicted=Predictions().of(other, [first.folder]).record).wait()
launch.panel(config)
"""


def main() -> None:
    """Run two layouts in a folder of their own, and take the picture."""
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        root = Path(place) / "root"
        root.mkdir()
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(SOURCE.strip())])
        book.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
        nbformat.write(book, root / "panel.ipynb")
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        with server(Path(place), root) as contact:
            lab = Lab(browser.new_page(viewport=WINDOW), contact["url"], contact["token"], root)
            lab.page.evaluate("jupyterapp.commands.execute('application:toggle-left-area')")
            lab.open("panel.ipynb")
            lab.run_all()
            take(lab)
        browser.close()


def take(lab: Lab) -> None:
    """The picture of the panel with both runs selected, with few colours so that the file is small."""
    panel = lab.page.locator(".lab-panel")
    expect(panel.locator("select[multiple] option")).to_have_count(2, timeout=PATIENCE_S * 1000)
    panel.locator("select[multiple]").focus()
    lab.page.keyboard.press("Home")
    lab.page.keyboard.press("Shift+ArrowDown")
    expect(panel.locator(".lab-scroll thead th")).to_have_count(1 + 2, timeout=PATIENCE_S * 1000)
    expect(panel.get_by_label("Log of rank")).to_be_hidden()  # what is shown last has changed, too
    lab.wait("document.querySelector('.lab-panel .widget-image').complete")
    panel.screenshot(path=PICTURE)
    with Image.open(PICTURE) as picture:
        picture.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(PICTURE, optimize=True)


if __name__ == "__main__":
    main()
