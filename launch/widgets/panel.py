"""The panel: describe a run, see what is foretold, start it, watch it, end it, compare it with earlier ones.

It holds no logic of its own and keeps nothing: all that it shows of runs is read from their folders, so a panel made
after a restart of the kernel finds the run that goes on. Output widgets are not used, for the reason that
`launch.widgets.sliders` has.
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
from launch.widgets.predictions import Foreteller
from launch.widgets.sliders import png
from launch.widgets.watch import REFRESH_S, page
from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.runs import processes, runfolder

LOG_LINES = 12
MOST_VIDEOS = 8
MOST_RUNS = 200
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
# JupyterLab takes arrow keys for its own, to go from cell to cell, unless the very element that has the focus carries
# an attribute. From Python only classes can be set, so the page does it, once the panel is shown.
KEYS = """<i class="lab-keys" onanimationstart="this.closest('.lab-panel')?.addEventListener('focusin', event => {
  if (event.target.matches('select, [role=slider]')) event.target.setAttribute('data-lm-suppress-shortcuts', '')
})"></i>"""
_latest: Panel | None = None


def panel(config: RunConfig | None = None) -> Panel:
    """The panel of this kernel, to be shown as the last line of a cell; an earlier one is closed.

    Args:
        config: what it describes first; parameters without a widget stay as they are there.
    """
    global _latest
    if _latest is not None:
        _latest.close()
    _latest = Panel(config or RunConfig(num_samples=4, warmup_samples=1, threads=1))
    return _latest


class Worker(Thread):
    """Does what it is asked to, one after the other, and `refresh` whenever it was not asked for a while.

    A thread and not a task of the kernel's loop: bars go on while a cell is executed, and the loop while a run starts.
    """

    def __init__(self, refresh: Callable[[], None], failed: Callable[[str, bool], None]) -> None:
        super().__init__(daemon=True)
        self.refresh, self.failed = refresh, failed
        self.asked: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def ask(self, wish: Callable[[], None] | None) -> None:
        """To be done soon; None: to end."""
        self.asked.put(wish)

    def run(self) -> None:
        while True:
            try:
                wish = self.asked.get(timeout=REFRESH_S)
            except Empty:
                wish = self.refresh
            if wish is None:
                return
            try:
                wish()
            except Exception as error:  # a folder that vanished, say: it is told, and the next turn may do better
                self.failed(f"{type(error).__name__}: {error}", True)


class Panel(widgets.VBox):
    """The widgets; `panel` makes them. Methods that the worker calls say so; all others answer the person."""

    def __init__(self, config: RunConfig) -> None:
        self.worker, self.foreteller = Worker(self.refresh, self.say), Foreteller()
        self.config: RunConfig | None = None  # what the controls describe, where that can be
        self.possible = False  # on this machine
        self.chosen: list[Job] = []
        self.outcomes: dict[Path, str | None] = {}
        self.drawn: Any = None  # what table and picture show
        self.controls = Controls(config, self._changed)
        self.foretold, self.message = widgets.HTML(), widgets.HTML()
        self.buttons = {
            "Run": self._button("Run", "start what is described here, in the background", self._start),
            "Stop": self._button("Stop", "end the run that is shown; finished samples stay", self._stop),
            "Resume": self._button("Resume", "compute the samples that are missing", self._resume),
        }
        self.runs = widgets.SelectMultiple(rows=6, layout=widgets.Layout(width="auto"))
        self.rank = widgets.Dropdown(options=[0], description="log of rank", layout=widgets.Layout(width="180px"))
        self.progress, self.table, self.videos, self.tail = (widgets.HTML() for _ in range(4))
        self.picture = widgets.Image(format="png", layout=widgets.Layout(max_width="100%", display="none"))
        super().__init__(self._parts())
        self.add_class("lab-panel")
        for control in (self.runs, self.rank):
            control.observe(lambda _: self.worker.ask(self.refresh), names="value")
        self._changed()
        self.worker.ask(lambda: self.refresh(self._going_on()))
        self.worker.start()

    def _button(self, name: str, tooltip: str, act: Callable[[], None]) -> widgets.Button:
        look = {"button_style": "primary" if name == "Run" else "", "layout": widgets.Layout(width="auto")}
        button = widgets.Button(description=name, tooltip=tooltip, disabled=True, **look)

        def pressed(_: Any) -> None:
            button.disabled = True
            self.say(f"{name} …")
            self.worker.ask(act)

        button.on_click(pressed)
        return button

    def _parts(self) -> list[widgets.Widget]:
        side = [widgets.HTML("<b>foretold</b>"), self.foretold, widgets.HBox([*self.buttons.values()]), self.message]
        self.foretold.add_class("lab-foretold")
        self.table.add_class("lab-scroll")
        self.runs.tooltip = "one run: show it; several: compare them"
        heading = widgets.HTML("<b>runs</b>, the newest first; Shift or Ctrl chooses several, to compare them")
        top = widgets.Box([self.controls.box, widgets.VBox(side)]).add_class("lab-top")
        shown = [self.progress, self.table, self.picture, self.videos, self.rank, self.tail]
        return [widgets.HTML(STYLE + KEYS), top, heading, self.runs, *shown]

    def close(self) -> None:
        """Take the panel away; runs go on."""
        self.worker.ask(None)
        super().close()

    def say(self, words: str, wrong: bool = False) -> None:
        self.message.value = _words(words, wrong)

    def _changed(self) -> None:
        """What can be said at once of other parameters; the rest comes from the worker."""
        self.possible = False
        try:
            self.config = self.controls.config()
            self.worker.ask(self._foretell)
        except ConfigError as error:
            self.config, self.foretold.value = None, _words(str(error), wrong=True)
        self._enable()

    def _enable(self) -> None:
        goes_on = any(self.outcomes.get(job.folder) is None for job in self.chosen)
        self.buttons["Run"].disabled = goes_on or not self.possible
        self.buttons["Stop"].disabled = not goes_on
        bad = len(self.chosen) == 1 and not goes_on and self.outcomes.get(self.chosen[0].folder) != "ok"
        self.buttons["Resume"].disabled = not bad
        self.buttons["Resume"].layout.display = None if bad else "none"

    def _foretell(self) -> None:
        """By the worker: prediction, or why the run cannot be."""
        config, ended = self.config, [folder for folder, outcome in self.outcomes.items() if outcome == "ok"]
        if config is None:
            return
        try:
            words, possible = self.foreteller.page(config, ended), True
        except ConfigError as error:
            words, possible = _words(str(error), wrong=True), False
        if config is self.config:  # not changed meanwhile
            self.foretold.value, self.possible = words, possible
            self._enable()

    def _start(self) -> None:
        """By the worker."""
        config = self.config
        assert config is not None, "Run is disabled without"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they stand beside the parameters
                job = start(config)
        except ConfigError as error:
            self.say(str(error), wrong=True)
            self.refresh()
        else:
            self.say("")
            self.refresh([job.folder])

    def _stop(self) -> None:
        """By the worker."""
        for job in self.chosen:
            job.stop()
        self.say("")
        self.refresh()

    def _resume(self) -> None:
        """By the worker."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what is damaged is made again
                self.chosen[0].resume()
            self.say("")
        except ConfigError as error:
            self.say(str(error), wrong=True)
        self.refresh()

    def _going_on(self) -> list[Path]:
        """The run that somebody watches over now: of a sweep the one whose turn it is."""
        alive = (job.folder for job in _all_runs() if _outcome(job) is None and processes.launcher_alive(job.folder))
        return [folder] if (folder := next(alive, None)) else []

    def refresh(self, choose: Sequence[Path] | None = None) -> None:
        """By the worker: read the run folders, and show the chosen runs."""
        known, runs = self.outcomes, _all_runs()
        self.outcomes = {job.folder: _outcome(job) for job in reversed(runs)}
        root = runfolder.runs_root()
        options = tuple(
            (f"{folder.relative_to(root)}: {end or 'goes on'}", folder) for folder, end in self.outcomes.items()
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
            self._foretell()  # a run that has just ended may tell how long others take

    def _show(self) -> None:
        ended = [job for job in self.chosen if self.outcomes[job.folder] is not None]
        shown = [(job.folder, self.outcomes[job.folder]) for job in self.chosen]
        one = self.chosen[0] if len(self.chosen) == 1 else None
        if shown != self.drawn or len(ended) < len(self.chosen):
            self.progress.value = "".join(page(job) + _failure(job) for job in self.chosen)
        if shown != self.drawn:
            self.table.value = compare(ended).to_html(border=0, na_rep="–") if ended else ""
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
    """The latest MOST_RUNS, those of sweeps one by one, the oldest first."""
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
