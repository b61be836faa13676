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
from launch.widgets import keyboard
from launch.widgets.comparison import compare, timeline
from launch.widgets.controls import EXPLAINED, Controls, folded, in_words
from launch.widgets.gallery import gallery
from launch.widgets.predictions import Prediction, Predictions
from launch.widgets.sliders import png
from launch.widgets.watch import REFRESH_S, bar_of, page
from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.runs import runfolder

LOG_LINES = 12
MOST_VIDEOS = 8
MOST_RUNS = 200
BUSY = {"Run": "Starting …", "Stop": "Stopping …", "Resume": "Resuming …"}
STYLE = """<style>
.lab-panel {color: var(--jp-ui-font-color1); font-size: var(--jp-ui-font-size1, 13px); overflow: visible}
/* the card stays in view only if nothing between it and the notebook cuts or scrolls */
.jp-Cell:has(.lab-panel) :has(.lab-panel) {overflow: visible !important}
.lab-panel .lab-card {position: sticky; top: 0; z-index: 5; overflow: visible; padding: 6px 8px; margin: 0 0 6px;
  background: var(--jp-layout-color1); border: 1px solid var(--jp-border-color1); border-radius: 3px}
.lab-panel .lab-card p {margin: 2px 0}
.lab-panel .lab-card .widget-html, .lab-panel .lab-card .widget-html-content {margin: 0; height: auto}
.lab-panel .lab-help {color: var(--jp-ui-font-color2); min-height: 2.7em; line-height: 1.35; margin: 2px 0}
.lab-panel :is(select, input, button, [role=slider]) {scroll-margin-top: 16em} /* not below the card */
.lab-panel .lab-controls {display: block; columns: 255px; column-gap: 24px; overflow: visible; margin: 2px}
.lab-panel .lab-group {overflow: visible; break-inside: avoid; margin: 0 0 6px}
.lab-panel .lab-runs .widget-label {display: none} /* the heading above; the page reads it out */
.lab-panel .lab-fold {text-align: left; background: none; border: 0; padding: 0 2px; font-weight: 600; box-shadow: none;
  color: var(--jp-ui-font-color1)}
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
</style>"""
HELP = f'<p class="{keyboard.HELP}">The explanation of a control stands here while it has the focus or the mouse.</p>'
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
        self.predicted: Prediction | None = None  # of the described run, once it is known that this machine can run it
        self.possible = True  # whether that run can be started, as far as is known
        self.pressed: set[str] = set()  # buttons whose work is not done yet
        self.chosen: list[Job] = []
        self.outcomes: dict[Path, str | None] = {}
        self.refused: dict[tuple[Path, str | None], str | None] = {}  # why a run cannot be resumed
        self.drawn: Any = None  # the runs in the table and the picture
        self.controls = Controls(config, self._changed)
        self.prediction, self.details, self.message, self.status = (widgets.HTML() for _ in range(4))
        self.buttons = {
            "Run": self._button("Run", "Start the run described here, in the background.", self._start),
            "Stop": self._button("Stop", "Stop the run that is selected. Finished samples stay.", self._stop),
            "Resume": self._button("Resume", "Compute the missing samples of the selected run.", self._resume),
            "Use": self._button("Use its parameters", "Describe a run like the selected one.", self._use),
        }
        self.runs = widgets.SelectMultiple(rows=6, description="Runs", layout=widgets.Layout(width="auto"))
        self.rank = widgets.Dropdown(options=[0], description="Log of rank", layout=widgets.Layout(width="180px"))
        self.progress, self.table, self.videos, self.tail = (widgets.HTML() for _ in range(4))
        self.picture = widgets.Image(format="png", layout=widgets.Layout(max_width="100%", display="none"))
        super().__init__(self._parts())
        self.add_class("lab-panel").add_class(keyboard.CLASS)
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
            self.pressed.add(name)
            self.say(BUSY.get(name, ""))
            self.worker.submit(acts)

        def acts() -> None:
            try:
                act()
            finally:
                self.pressed.discard(name)
                self._enable()

        button.on_click(pressed)
        return button

    def _parts(self) -> list[widgets.Widget]:
        self.prediction.add_class("lab-prediction")
        self.table.add_class("lab-scroll")
        first = widgets.HBox([self.buttons["Run"], self.buttons["Stop"], self.message])
        card = widgets.VBox([first, self.status, self.prediction, widgets.HTML(HELP)]).add_class("lab-card")
        heading = widgets.HTML(
            "<b role='heading' aria-level='3'>Runs</b>, newest first. Shift or Ctrl selects several."
        )
        for_one = widgets.HBox([self.buttons["Resume"], self.buttons["Use"]])
        shown = [self.progress, self.table, self.picture, self.videos, self.rank, self.tail]
        self.runs.add_class("lab-runs")
        described = [self.controls.box, folded("All that is predicted", self.details)]
        return [widgets.HTML(STYLE + keyboard.keys(EXPLAINED)), card, *described, heading, self.runs, for_one, *shown]

    def close(self) -> None:
        """Remove the panel; runs continue."""
        self.worker.submit(None)
        super().close()

    def say(self, words: str, wrong: bool = False) -> None:
        """Show a message beside the buttons; in red if something went wrong."""
        self.message.value = _words(words, wrong)

    def _changed(self) -> None:
        """Check changed parameters at once; the worker predicts."""
        self.predicted, self.possible = None, True
        try:
            self.config = self.controls.config()
            self.worker.submit(self._predict)
        except ConfigError as error:
            self.config, self.possible, self.details.value = None, False, ""
            self.prediction.value = _words(in_words(error), wrong=True)
        self._enable()

    def _enable(self) -> None:
        running = any(self.outcomes.get(job.folder) is None for job in self.chosen)
        one = self.chosen[0] if len(self.chosen) == 1 else None
        outcome = self.outcomes.get(one.folder) if one else None
        self.buttons["Run"].disabled = running or not self.possible or "Run" in self.pressed
        self.buttons["Stop"].disabled = not running
        can = one is not None and outcome not in (None, "ok") and self.refused.get((one.folder, outcome), "") is None
        for name, offered in (("Resume", can), ("Use", one is not None and outcome != "damaged")):
            self.buttons[name].disabled = not offered
            self.buttons[name].layout.display = None if offered else "none"

    def _predict(self) -> None:
        """Runs in the worker: show the prediction, or why the run is impossible."""
        config, ended = self.config, [folder for folder, outcome in self.outcomes.items() if outcome == "ok"]
        if config is None:
            return
        try:
            predicted = self.predictions.of(config, ended)
            words, details = predicted.headline, predicted.table
        except ConfigError as error:
            predicted, words, details = None, _words(in_words(error), wrong=True), ""
        if config is self.config:  # not changed meanwhile
            self.prediction.value, self.details.value, self.predicted = words, details, predicted
            self.possible = predicted is not None
            self._enable()

    def _start(self) -> None:
        """Runs in the worker, after the prediction of what was described when the button was pressed."""
        config, predicted = self.config, self.predicted
        if config is None or predicted is None:
            self.say("Not started: it cannot run, or was changed after Run was pressed.", wrong=True)
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the prediction shows them
                job = start(config, predicted=predicted.record)
        except ConfigError as error:
            self.say(in_words(error), wrong=True)
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
            self.say(in_words(error), wrong=True)
        self.refresh()

    def _use(self) -> None:
        """Runs in the worker."""
        try:
            self.controls.load(self.chosen[0].run.config)
            self.say(f"The parameters are those of {self.chosen[0].run_id}.")
        except ConfigError as error:
            self.say(in_words(error), wrong=True)
        self._enable()

    def _running(self) -> list[Path]:
        """The first run that has not ended and whose launcher is alive: in a sweep, the current one."""
        alive = (job.folder for job in _all_runs() if _outcome(job) is None and job.run.launcher_alive())
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
        for job in self.chosen if len(self.chosen) == 1 else ():
            key = job.folder, self.outcomes[job.folder]
            if key not in self.refused and key[1] not in (None, "ok"):
                self.refused[key] = job.why_not_resume()
        self._enable()
        self._show()
        if known != self.outcomes:
            self._predict()  # a run that has just ended may provide times, one that runs is in the way

    def _show(self) -> None:
        ended = [job for job in self.chosen if self.outcomes[job.folder] is not None]
        shown = [(job.folder, self.outcomes[job.folder]) for job in self.chosen]
        one = self.chosen[0] if len(self.chosen) == 1 else None
        if shown != self.drawn or len(ended) < len(self.chosen):
            self.status.value = "".join(bar_of(job) for job in self.chosen[:1])
            self.progress.value = "".join(page(job) + _failure(job) for job in self.chosen)
        if shown != self.drawn:
            self.table.value = compare(ended).to_html(border=0) if ended else ""
            figure = timeline(ended) if ended else None
            self.picture.value = png(figure) if figure else b""
            self.picture.layout.display = None if figure else "none"
            videos = sorted(one.folder.glob("videos/*.mp4"))[:MOST_VIDEOS] if one and ended else []
            self.videos.value = gallery({video.stem: video for video in videos}).data if videos else ""
            ranks = range(one.run.config.layout.world_size if one else 1)
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
    failure = (job.run.result() or {}).get("failure")
    if not failure:
        return ""
    where = [f"{name} {failure[name]}" for name in ("rank", "sample", "step") if failure[name] is not None]
    return _words(f"{', '.join([job.run_id, *where])}: {failure['cause']}", wrong=True)


def _words(words: str, wrong: bool = False) -> str:
    return f'<p class="{"lab-wrong" if wrong else "lab-said"}" role="status">{escape(words)}</p>' if words else ""
