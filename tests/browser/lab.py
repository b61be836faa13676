"""JupyterLab and a real browser: what people see. Their settings are their own, nothing of the machine's is touched."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium")
NEEDED = bool(os.environ.get("VDPP_NEEDS_BROWSER"))  # then its absence is a failure, not a reason to skip
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
QUIET += ["--disable-component-update", "--disable-sync"]
SETTINGS = Path(__file__).parents[2] / "launch" / "jupyterlab"  # those of `make lab`
WINDOW = {"width": 1200, "height": 2000}  # high enough for a screenshot of all of a panel
PATIENCE_S = 120.0  # for anything that a quiet machine does in seconds


class Lab:
    """One page of JupyterLab with one notebook open at a time; `root` is the folder that it serves."""

    def __init__(self, page: Page, url: str, token: str, root: Path) -> None:
        self.page, self.url, self.token, self.root = page, url, token, root
        self.page.set_default_timeout(PATIENCE_S * 1000)
        self.page.on("dialog", lambda dialog: dialog.accept())
        self.page.goto(f"{url}lab?token={token}")
        self.wait("window.jupyterapp !== undefined")
        self.page.evaluate("() => jupyterapp.restored.then(() => true)")

    def wait(self, condition: str, seconds: float = PATIENCE_S) -> None:
        """Until a JavaScript expression is true; TimeoutError after so many seconds."""
        self.page.wait_for_function(condition, timeout=seconds * 1000)

    def open(self, name: str) -> None:
        """Show a notebook, with its kernel ready."""
        self.page.evaluate("path => void jupyterapp.commands.execute('docmanager:open', {path})", name)
        self.ready(name)

    def ready(self, name: str) -> None:
        """Until a notebook is shown and its kernel has nothing to do."""
        self.wait(f"window.jupyterapp?.shell.currentWidget?.context?.path === {json.dumps(name)}")
        self.wait("jupyterapp.shell.currentWidget.context.isReady")
        self.wait("jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === 'idle'")

    def run_all(self, seconds: float = PATIENCE_S) -> None:
        """Run all cells of the notebook that is shown, until they are done or one of them failed."""
        run = "jupyterapp.commands.execute('notebook:run-all-cells')"
        self.page.evaluate(f"() => {{window.done = false; {run}.finally(() => {{window.done = true}})}}")
        self.wait("window.done", seconds)

    def save(self) -> None:
        self.page.evaluate("() => jupyterapp.shell.currentWidget.context.save()")

    def restart_kernel(self) -> None:
        """As the menu does, without its question."""
        self.page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
        self.wait("jupyterapp.shell.currentWidget.sessionContext.session.kernel.status === 'idle'")

    def close(self) -> None:
        """Save the notebook, end its kernel and close it."""
        self.save()
        self.page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.shutdown()")
        self.page.evaluate("() => jupyterapp.commands.execute('application:close-all')")

    def theme(self, name: str) -> None:
        """JupyterLab Light or JupyterLab Dark."""
        self.page.evaluate("theme => jupyterapp.commands.execute('apputils:change-theme', {theme})", name)
        self.wait(f"document.body.dataset.jpThemeName === {json.dumps(name)}")
        self.wait("!document.querySelector('#jupyterlab-splash')")


def needs_browser() -> None:
    """Skip, or fail where a browser has to be there, without Chromium."""
    if CHROMIUM is None:
        (pytest.fail if NEEDED else pytest.skip)("no chromium here")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """The one browser of these tests: Playwright drives one at a time."""
    needs_browser()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def lab(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab over an empty folder, in Chromium."""
    home = tmp_path_factory.mktemp("lab")
    root = home / "root"
    root.mkdir()
    with server(home, root) as contact:
        yield Lab(chromium.new_page(viewport=WINDOW), contact["url"], contact["token"], root)


@contextmanager
def server(home: Path, root: Path) -> Iterator[dict[str, Any]]:
    """JupyterLab on a free port of 127.0.0.1, with a token, in the background: its url and token."""
    places = ["JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"]
    places += ["JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR"]
    environment = os.environ | {place: str(home / place) for place in places}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", "--port=0", "--allow-root"]
    command += ["--expose-app-in-browser", f"--ServerApp.root_dir={root}", f"--LabApp.app_settings_dir={SETTINGS}"]
    with (home / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, cwd=root, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield _contact(process, home)
    finally:
        process.terminate()
        process.wait()


def _contact(process: subprocess.Popen[bytes], home: Path) -> dict[str, Any]:
    """What a server says of itself once it listens."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        for path in (home / "JUPYTER_RUNTIME_DIR").glob("jpserver-*.json"):
            try:
                return json.loads(path.read_text())
            except ValueError:
                pass  # half written
        time.sleep(0.1)
    raise RuntimeError((home / "server.log").read_text())
