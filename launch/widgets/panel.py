"""The panel: describe a run, see its prediction, start it, watch it, stop it, and compare it with earlier runs.

It is stateless: everything comes from the run folders, so a new panel after a kernel restart finds the running run. It
uses no Output widgets; `launch.widgets.sliders` says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import ipywidgets as widgets

from launch.job import Job, jobs, start
from launch.sweep import Sweep
from launch.widgets.comparison import compare, timeline
from launch.widgets.controls import Controls
from launch.widgets.gallery import gallery
from launch.widgets.predictions import Predictions
from launch.widgets.sliders import png
from launch.widgets.watch import REFRESH_S, page
from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.runs import processes, runfolder

LOG_LINES = 12
MOST_VIDEOS = 8
MOST_RUNS = 200
BUSY = {"Run": "Starting …", "Stop": "Stopping …", "Resume": "Resuming …"}
STYLE = """<style>
.lab-panel {color: var(--jp-ui-font-color1); font-size: var(--jp-ui-font-size1, 13px); overflow: hidden}
.lab-panel .lab-top {display: flex; flex-flow: row wrap; gap: 14px; align-items: flex-start}
.lab-panel .lab-top > :first-child {flex: 2 1 500px; min-width: 0}
.lab-panel .lab-top > :last-child {flex: 1 1 225px; min-width: 0}
.lab-panel .lab-controls {display: grid; grid-template-columns: repeat(auto-fill, minmax(228px, 1fr)); gap: 2px 14px}
.lab-panel .lab-controls .widget-label {white-space: normal; height: auto; line-height: 1.1; align-self: center}
.lab-panel .lab-controls .widget-readout {min-width: 0; width: 3.6em; margin: 0 0 0 6px; padding: 0}
.lab-panel table {border-collapse: collapse; font-variant-numeric: tabular-nums}
.lab-panel th, .lab-panel td {padding: 3px 10px 3px 0; text-align: left; vertical-align: top; line-height: 1.3}
.lab-panel th {font-weight: 500}
.lab-panel tr {border-bottom: 1px solid var(--jp-border-color2)}
.lab-panel p {margin: 6px 0; line-height: 1.35; overflow-wrap: anywhere}
.lab-panel .lab-wrong {color: var(--jp-error-color1); font-weight: bold}
.lab-panel .lab-scroll {overflow-x: auto}
.lab-panel pre {white-space: pre-wrap; overflow-wrap: anywhere; max-height: 16em; overflow-y: auto; margin: 0;
  background: var(--jp-layout-color2); color: var(--jp-content-font-color1); padding: 6px; line-height: 1.3}
.lab-panel :focus-visible {outline: 2px solid var(--jp-brand-color1); outline-offset: 1px}
@keyframes lab-shown {from {opacity: 0}}
.lab-panel .lab-keys {animation: lab-shown 1ms}
</style>"""
# JupyterLab uses the arrow keys to move between cells unless the focused element carries an attribute. Python can only
# set classes, so the page sets the attribute once the panel is shown.
KEYS = """<i class="lab-keys" onanimationstart="this.closest('.lab-panel')?.addEventListener('focusin', event => {
  if (event.target.matches('select, [role=slider]')) event.target.setAttribute('data-lm-suppress-shortcuts', '')
})"></i>"""
_latest: Panel | None = None


def panel(config: RunConfig | None = None) -> Panel:
    """The panel of this kernel, to be shown as the last line of a cell; closes an earlier panel.

    Args:
        config: the run described at first. Parameters without a widget keep their values from it.
    """
    global _latest
    if _latest is not None:
        _latest.close()
    _latest = Panel(config or RunConfig(num_samples=4, warmup_samples=1, threads=1))
    return _latest


class Worker(Thread):
    """A thread that runs tasks one at a time, and `refresh` whenever none has come for a while.

    A thread, not a task of the kernel's event loop: the bars keep moving while a cell runs, and the kernel keeps
    answering while a run starts.

    Args:
        refresh: the task for idle times.
        failed: receives the message of an exception, and True.
    """

    def __init__(self, refresh: Callable[[], None], failed: Callable[[str, bool], None]) -> None:
        super().__init__(daemon=True)
        self.refresh, self.failed = refresh, failed
        self.tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def submit(self, task: Callable[[], None] | None) -> None:
        """Queue a task; None ends the thread."""
        self.tasks.put(task)

    def run(self) -> None:
        """The thread's loop; `start` calls it."""
        while True:
            try:
                task = self.tasks.get(timeout=REFRESH_S)
            except Empty:
                task = self.refresh
            if task is None:
                return
            try:
                task()
            except Exception as error:  # for instance a vanished folder: report it, the next task may succeed
                self.failed(f"{type(error).__name__}: {error}", True)


class Panel(widgets.VBox):
    """The widgets of the panel; `launch.panel` makes them.

    Methods marked "Runs in the worker" may take seconds; all others answer the user at once.
    """

    def __init__(self, config: RunConfig) -> None:
        self.worker, self.predictions = Worker(self.refresh, self.say), Predictions()
        self.config: RunConfig | None = None  # the described run, if the parameters are valid
        self.possible = False  # whether this machine can run it
        self.chosen: list[Job] = []
        self.outcomes: dict[Path, str | None] = {}
        self.drawn: Any = None  # the runs in the table and the picture
        self.controls = Controls(config, self._changed)
        self.prediction, self.message = widgets.HTML(), widgets.HTML()
        self.buttons = {
            "Run": self._button("Run", "Start the run described here, in the background.", self._start),
            "Stop": self._button("Stop", "Stop the run shown below. Finished samples stay.", self._stop),
            "Resume": self._button("Resume", "Compute the missing samples of the run shown below.", self._resume),
        }
        self.runs = widgets.SelectMultiple(rows=6, layout=widgets.Layout(width="auto"))
        self.rank = widgets.Dropdown(options=[0], description="Log of rank", layout=widgets.Layout(width="180px"))
        self.progress, self.table, self.videos, self.tail = (widgets.HTML() for _ in range(4))
        self.picture = widgets.Image(format="png", layout=widgets.Layout(max_width="100%", display="none"))
        super().__init__(self._parts())
        self.add_class("lab-panel")
        for control in (self.runs, self.rank):
            control.observe(lambda _: self.worker.submit(self.refresh), names="value")
        self._changed()
        self.worker.submit(lambda: self.refresh(self._running()))
        self.worker.start()

    def _button(self, name: str, tooltip: str, act: Callable[[], None]) -> widgets.Button:
        look = {"button_style": "primary" if name == "Run" else "", "layout": widgets.Layout(width="auto")}
        button = widgets.Button(description=name, tooltip=tooltip, disabled=True, **look)

        def pressed(_: Any) -> None:
            button.disabled = True
            self.say(BUSY[name])
            self.worker.submit(act)

        button.on_click(pressed)
        return button

    def _parts(self) -> list[widgets.Widget]:
        side = [
            widgets.HTML("<b>Prediction</b>"),
            self.prediction,
            widgets.HBox([*self.buttons.values()]),
            self.message,
        ]
        self.prediction.add_class("lab-prediction")
        self.table.add_class("lab-scroll")
        self.runs.tooltip = "Select one run to show it, several to compare them."
        heading = widgets.HTML("<b>Runs</b>, newest first. Select several with Shift or Ctrl to compare them.")
        top = widgets.Box([self.controls.box, widgets.VBox(side)]).add_class("lab-top")
        shown = [self.progress, self.table, self.picture, self.videos, self.rank, self.tail]
        return [widgets.HTML(STYLE + KEYS), top, heading, self.runs, *shown]

    def close(self) -> None:
        """Remove the panel; runs continue."""
        self.worker.submit(None)
        super().close()

    def say(self, words: str, wrong: bool = False) -> None:
        """Show a message below the buttons; in red if something went wrong."""
        self.message.value = _words(words, wrong)

    def _changed(self) -> None:
        """Check changed parameters at once; the worker predicts."""
        self.possible = False
        try:
            self.config = self.controls.config()
            self.worker.submit(self._predict)
        except ConfigError as error:
            self.config, self.prediction.value = None, _words(str(error), wrong=True)
        self._enable()

    def _enable(self) -> None:
        running = any(self.outcomes.get(job.folder) is None for job in self.chosen)
        self.buttons["Run"].disabled = running or not self.possible
        self.buttons["Stop"].disabled = not running
        bad = len(self.chosen) == 1 and not running and self.outcomes.get(self.chosen[0].folder) != "ok"
        self.buttons["Resume"].disabled = not bad
        self.buttons["Resume"].layout.display = None if bad else "none"

    def _predict(self) -> None:
        """Runs in the worker: show the prediction, or why the run is impossible."""
        config, ended = self.config, [folder for folder, outcome in self.outcomes.items() if outcome == "ok"]
        if config is None:
            return
        try:
            words, possible = self.predictions.page(config, ended), True
        except ConfigError as error:
            words, possible = _words(str(error), wrong=True), False
        if config is self.config:  # not changed meanwhile
            self.prediction.value, self.possible = words, possible
            self._enable()

    def _start(self) -> None:
        """Runs in the worker."""
        config = self.config
        assert config is not None, "Run is disabled without one"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the prediction shows them
                job = start(config)
        except ConfigError as error:
            self.say(str(error), wrong=True)
            self.refresh()
        else:
            self.say("")
            self.refresh([job.folder])

    def _stop(self) -> None:
        """Runs in the worker."""
        for job in self.chosen:
            job.stop()
        self.say("")
        self.refresh()

    def _resume(self) -> None:
        """Runs in the worker."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # damaged samples are computed again
                self.chosen[0].resume()
            self.say("")
        except ConfigError as error:
            self.say(str(error), wrong=True)
        self.refresh()

    def _running(self) -> list[Path]:
        """The first run that has not ended and whose launcher is alive: in a sweep, the current one."""
        alive = (job.folder for job in _all_runs() if _outcome(job) is None and processes.launcher_alive(job.folder))
        return [folder] if (folder := next(alive, None)) else []

    def refresh(self, choose: Sequence[Path] | None = None) -> None:
        """Runs in the worker: read the run folders and show the selected runs.

        Args:
            choose: the runs to select; by default the selection stays.
        """
        known, runs = self.outcomes, _all_runs()
        self.outcomes = {job.folder: _outcome(job) for job in reversed(runs)}
        root = runfolder.runs_root()
        options = tuple(
            (f"{folder.relative_to(root)}: {end or 'running'}", folder) for folder, end in self.outcomes.items()
        )
        wanted = [folder for folder in (self.runs.value if choose is None else choose) if folder in self.outcomes]
        if options != self.runs.options or choose is not None:
            with self.runs.hold_sync():
                self.runs.options = options
                self.runs.value = wanted
        self.chosen = [job for job in runs if job.folder in wanted]
        self._enable()
        self._show()
        if known != self.outcomes:
            self._predict()  # a run that has just ended may provide times

    def _show(self) -> None:
        ended = [job for job in self.chosen if self.outcomes[job.folder] is not None]
        shown = [(job.folder, self.outcomes[job.folder]) for job in self.chosen]
        one = self.chosen[0] if len(self.chosen) == 1 else None
        if shown != self.drawn or len(ended) < len(self.chosen):
            self.progress.value = "".join(page(job) + _failure(job) for job in self.chosen)
        if shown != self.drawn:
            self.table.value = compare(ended).to_html(border=0) if ended else ""
            figure = timeline(ended) if ended else None
            self.picture.value = png(figure) if figure else b""
            self.picture.layout.display = None if figure else "none"
            videos = sorted(one.folder.glob("videos/*.mp4"))[:MOST_VIDEOS] if one and ended else []
            self.videos.value = gallery({video.stem: video for video in videos}).data if videos else ""
            ranks = range(RunConfig.read(one.folder).layout.world_size if one else 1)
            if tuple(ranks) != self.rank.options:
                self.rank.options = tuple(ranks)
            self.drawn = shown
        self.rank.layout.display = None if one else "none"
        self.tail.value = f"<pre>{escape(one.tail(self.rank.value, LOG_LINES)) or '–'}</pre>" if one else ""


def _all_runs() -> list[Job]:
    """The latest MOST_RUNS runs, those of sweeps included, oldest first."""
    found: list[Job] = []
    for job in jobs():
        found += job.jobs if isinstance(job, Sweep) else [job]
    return found[-MOST_RUNS:]


def _outcome(job: Job) -> str | None:
    try:
        return job.outcome()
    except (ValueError, OSError):
        return "damaged"


def _failure(job: Job) -> str:
    """Why a run ended badly."""
    failure = (runfolder.read_result(job.folder) or {}).get("failure")
    if not failure:
        return ""
    where = [f"{name} {failure[name]}" for name in ("rank", "sample", "step") if failure[name] is not None]
    return _words(f"{', '.join([job.run_id, *where])}: {failure['cause']}", wrong=True)


def _words(words: str, wrong: bool = False) -> str:
    return f'<p class="{"lab-wrong" if wrong else "lab-said"}" role="status">{escape(words)}</p>' if words else ""
