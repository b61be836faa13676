"""Training jobs in the background: started from a notebook or a terminal, watched, stopped without orphans."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
from IPython.display import HTML, display

from launch import warm_start
from launch.widgets.watch import REFRESH_S, bar
from vdpp_core.config.errors import ConfigError
from vdpp_core.lessons import compared, training_folder
from vdpp_core.lessons.experiments import Experiment
from vdpp_core.lessons.training_folder import LAUNCHER
from vdpp_core.runs import processes
from vdpp_core.runs.files import read_object, write_atomically

POLL_S = 0.1
STOP_PATIENCE_S = 10.0


class Job:
    """Experiments that were started, here or elsewhere; everything is read from their folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.job_id, self.experiments = folder, folder.name, training_folder.experiments(folder)

    def __repr__(self) -> str:
        return f"Job({self.job_id!r}, {self.outcome() or 'running'})"

    def outcome(self) -> str | None:
        """Return ok, failed or stopped; None while it is running."""
        if self._is_complete():
            return "ok"
        if self._is_alive():
            return None
        return "failed" if self.failure() else "stopped"

    def failure(self) -> str | None:
        """Return which rank failed first, in which experiment, and why, in one line; None unless the job failed."""
        if self._is_complete() or self._is_alive():
            return None
        events = training_folder.events(self.folder)
        last = {event["rank"]: event for event in events}
        errors = [event for event in events if event["kind"] == "error"]
        silent = [event for event in last.values() if event["kind"] not in ("end", "error", "terminated")]
        word = {"error": "ended without a word: killed, or out of memory"}
        killed = [event | word | {"experiment": max(event.get("experiment", 0), self._finished())} for event in silent]
        suspects = [event for event in errors if not event["lost"]] + killed
        if not suspects and any(event.get("orphaned") for event in last.values()):
            return "the launcher was killed"
        for event in (*suspects, *errors):
            at = event.get("experiment", 0)
            which = f"experiment {at + 1} of {len(self.experiments)} ({self.experiments[at].name})"
            return f"{which}, rank {event['rank']}: {event['error']}"
        return None if last else f"no rank has started: {self._last_words()}"

    def _is_complete(self) -> bool:
        return self._finished() == len(self.experiments)

    def _finished(self) -> int:
        return len(self.results())

    def _last_words(self) -> str:
        """The signal that ended the first rank, or the last error in the launcher's log, or else its last line."""
        text = (self.folder / "launcher.log").read_text(errors="replace")
        if signals := re.findall(r"Signal \d+ \((SIG\w+)\) received", text):
            return f"killed by {signals[-1]}"  # torchrun lists the first one last
        lines = [line.strip() for line in text.splitlines() if re.search(r"\w", line)]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception): .", line)]
        return (errors or lines or ["nothing was written"])[-1]

    def results(self) -> list[dict[str, Any]]:
        """Return what the experiments that have ended found, in their order."""
        return training_folder.results(self.folder)

    def table(self) -> pd.DataFrame:
        """Return a row for each experiment that has ended, as `compared.equality`."""
        return compared.equality(self.results())

    def progress(self) -> dict[str, Any]:
        """Return how far it is: share (0 to 1), finished experiments, and the current experiment and step of each rank.

        The ranks that an experiment does not need have none.
        """
        done, now = len(self.results()), dict[int, dict[str, Any]]()
        for event in training_folder.events(self.folder):
            if event["kind"] == "step" and event["experiment"] == done:
                now[event["rank"]] = {"rank": event["rank"], "steps": event["step"] + 1}
        steps = self.experiments[done].steps if done < len(self.experiments) else 1
        part = min((rank["steps"] for rank in now.values()), default=0) / steps
        share = min(1.0, (done + part * (done < len(self.experiments))) / len(self.experiments))
        return {"share": share, "finished": done, "ranks": [now[rank] for rank in sorted(now)]}

    def wait(self, timeout: float | None = None) -> list[dict[str, Any]]:
        """Wait for the job to end and return its results.

        Raises:
            RuntimeError: an experiment failed; with `failure`. The results of those before it are kept.
            TimeoutError: it is still running after `timeout` seconds; it is not stopped.
        """
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (outcome := self.outcome()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.job_id} is still running after {timeout:g} s")
            time.sleep(POLL_S)
        if outcome == "failed":
            raise RuntimeError(self.failure())
        return self.results()

    def stop(self) -> None:
        """End the job and its ranks, by force if they do not react. Results so far are kept."""
        starts = [event for event in training_folder.events(self.folder) if event["kind"] == "start"]
        launcher = self._launcher()
        targets = [] if launcher is None else [launcher]
        _end([event for event in targets if processes.is_alive(event["pid"], event["created"])], STOP_PATIENCE_S)
        _end([event for event in starts if processes.is_alive(event["pid"], event["created"])], STOP_PATIENCE_S)

    def _launcher(self) -> dict[str, Any] | None:
        return read_object(self.folder / LAUNCHER, "pid", "created")

    def _is_alive(self) -> bool:
        """Whether the launcher or a rank is: ranks whose launcher was killed notice it within a second."""
        launcher = self._launcher()
        starts = [event for event in training_folder.events(self.folder) if event["kind"] == "start"]
        known = [*([launcher] if launcher else []), *starts]
        return any(processes.is_alive(one["pid"], one["created"]) for one in known)


def _end(known: Sequence[dict[str, Any]], patience_s: float) -> None:
    targets = []
    for one in known:
        with contextlib.suppress(psutil.Error):
            targets.append(psutil.Process(one["pid"]))
            targets[-1].terminate()
    for process in psutil.wait_procs(targets, patience_s)[1]:
        with contextlib.suppress(psutil.Error):
            process.kill()


def start(experiments: Sequence[Experiment]) -> Job:
    """Start experiments one after another on the same ranks, as many as the largest needs, and return at once.

    Raises:
        ConfigError: there is none.
    """
    if not experiments:
        raise ConfigError("experiments", "", "must be one or several")
    folder = training_folder.create(experiments)
    ranks = max(experiment.ranks for experiment in experiments)
    torchrun = ["vdpp_core.cli.local_torchrun", f"--nproc_per_node={ranks}", "-m", "vdpp_core"]

    def note(pid: int) -> None:
        facts = {"pid": pid, "created": processes.created_s(pid)}
        write_atomically(folder / LAUNCHER, json.dumps(facts) + "\n")

    job = Job(folder)
    try:
        with (folder / "launcher.log").open("ab") as log:
            warm_start.start([*torchrun, "training", "--folder", str(folder)], log.fileno(), log.fileno(), note)
    except BaseException:  # interrupted, perhaps after it was launched
        job.stop()
        raise
    return job


def attach(job_id: str) -> Job:
    """Return the job with this id, also one that another process started.

    Raises:
        ConfigError: there is no such job.
    """
    names = [path.parent.name for path in training_folder.root().glob("*/experiments.json")]
    if job_id not in names:
        raise ConfigError("job_id", job_id, f"must be a folder under {training_folder.root()}")
    return Job(training_folder.root() / job_id)


def watch(job: Job) -> list[dict[str, Any]]:
    """Show a job's progress in a notebook until it ends, and return its results.

    Interrupting the cell stops the watching, not the job.

    Raises:
        RuntimeError: an experiment failed.
    """
    view = display(HTML(page(job)), display_id=True)
    while job.outcome() is None:
        time.sleep(REFRESH_S)
        view.update(HTML(page(job)))
    view.update(HTML(page(job)))
    return job.wait()


def page(job: Job) -> str:
    """The progress of a job as HTML: a bar for the job and one for each rank of the current experiment."""
    far, outcome, total = job.progress(), job.outcome(), len(job.experiments)
    words = f"{outcome or 'running'}, {far['finished']} of {total} experiments"
    bars = [bar(job.job_id, far["share"], words)]
    if outcome is None and far["finished"] < total:
        now = job.experiments[far["finished"]]
        bars.append(f"<p>{escape(now.name)}</p>")
        steps = {rank["rank"]: rank["steps"] for rank in far["ranks"]}
        for rank in range(now.ranks):
            done = steps.get(rank, 0)
            bars.append(bar(f"rank {rank}", done / now.steps, f"{done} of {now.steps} steps"))
    if outcome == "failed":
        bars.append(f"<p>{escape(job.failure() or '')}</p>")
    return "".join(bars)
