"""How far runs are, as the command `status` shows it: a table of all, or one run in lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.job import COMMAND, Job
from launch.sweep import Sweep
from vdpp_core.cli.words import WIDTH, counted
from vdpp_core.config.errors import ConfigError

_LABEL = 10  # columns


def row(job: Job | Sweep) -> dict[str, Any]:
    """A run or sweep as JSON has it: run, status, done, seconds left, at (where it is, or why it failed), disturbed."""
    known: dict[str, Any] = {"run": job.run_id}
    try:
        progress = job.progress()
    except (ConfigError, FileNotFoundError) as error:  # damaged, or just removed
        return known | {"status": str(error), "done": None, "seconds left": None, "at": None}
    known["status"] = progress["status"]
    if isinstance(job, Sweep):
        done = f"{progress['runs_finished']} of {counted(progress['num_runs'], 'run')}"
        count = sum(bool(each.disturbed()) for each in job.jobs)
        disturbed = f"{count} of its runs" if count else None
        return known | {"done": done, "seconds left": None, "at": None, "disturbed": disturbed}
    left, running = progress["seconds_left"], progress["status"] == "running"
    return known | {
        "done": _done(progress),
        "seconds left": round(left, 1) if left is not None and running else None,
        "at": _failure(job) or progress["stalled"] or ("; ".join(_positions(progress)) if running else None),
        "disturbed": "; ".join(job.disturbed()) or None,
    }


def table(jobs: Sequence[Job | Sweep]) -> list[str]:
    """A line for each, cut to WIDTH columns; `in_lines` has all of it."""
    rows = [row(job) for job in jobs]
    if not rows:
        return ["no runs"]
    cells = [[each["run"], each["status"], each["done"] or "", _note(each)] for each in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    lines = []
    for line in cells:
        text = "  ".join([*(f"{cell:{width}}" for cell, width in zip(line, widths, strict=False)), line[3]]).rstrip()
        whole = sum(widths) + 6  # what is never cut: the name has to be typed
        lines.append(text if len(text) <= WIDTH or whole >= WIDTH else f"{text[: WIDTH - 2]} …")
    return lines


def _note(facts: dict[str, Any]) -> str:
    left = "" if facts["seconds left"] is None else f"{facts['seconds left']:.0f} s left"
    disturbed = f"disturbed: {facts['disturbed']}" if facts.get("disturbed") else ""
    return "; ".join(filter(None, (left, facts["at"], disturbed)))


def in_lines(job: Job | Sweep) -> list[str]:
    """All about one run: how it ended and why, where it is, where its words are, and what to type next.

    Of a sweep, its status and `table` of its runs.
    """
    if isinstance(job, Sweep):
        return [_line("sweep", job.run_id), _line("status", job.status()), *table(job.jobs)]
    try:
        progress, ended = job.progress(), job.outcome() is not None
    except (ConfigError, FileNotFoundError) as error:  # damaged, or just removed
        return [_line("run", job.run_id), _line("status", str(error))]
    facts = {"run": job.run_id, "outcome" if ended else "status": progress["status"]}
    result = job.run.result() or {}
    failure = result.get("failure") or {}
    rank = failure.get("rank")
    facts |= {name: str(failure[name]) for name in ("cause", "rank", "sample", "step") if failure.get(name) is not None}
    facts["done"] = _done(progress)
    if result.get("makespan_s") is not None:
        facts["makespan"] = f"{result['makespan_s']:.2f} s"
    if progress["status"] == "running" and progress["seconds_left"] is not None:
        facts["left"] = f"about {progress['seconds_left']:.0f} s"
    if progress["stalled"]:
        facts["stalled"] = progress["stalled"]
    lines = [_line(label, text) for label, text in facts.items()]
    if not ended:
        lines += [_line("at" if number == 0 else "", text) for number, text in enumerate(_positions(progress))]
    lines += [_line("disturbed", text) for text in job.disturbed()]
    lines += [_line("damaged", text) for text in job.damaged()]
    if (log := _log(job, rank)).exists():  # a run in the foreground wrote to its terminal
        lines += [_line("log", str(log)), _line("show it", f"{COMMAND} tail {job.run_id} --rank {rank or 0}")]
    return lines


def _line(label: str, text: str) -> str:
    return f"{label:{_LABEL}}{text}"


def _log(job: Job, rank: int | None) -> Path:
    """The file with the last words of the rank that failed, or of the first; the launcher's where no rank wrote any."""
    for stream in ("stderr", "stdout"):
        for path in sorted(job.folder.glob(f"{job.run.logs_of(rank or 0)}/{stream}.log")):
            if path.stat().st_size:
                return path
    return job.folder / "logs" / "launcher.log"


def _done(progress: dict[str, Any]) -> str:
    return f"{progress['samples_finished']} of {counted(progress['num_samples'], 'sample')} ({progress['share']:.0%})"


def _positions(progress: dict[str, Any]) -> list[str]:
    """Where each rank is that has begun."""
    ranks = [rank for rank in progress["ranks"] if rank["step"] is not None]
    return [f"rank {rank['rank']}: sample {rank['sample']}, step {rank['step']}" for rank in ranks]


def _failure(job: Job) -> str | None:
    """Where the first rank that failed was, and why."""
    failure = (job.run.result() or {}).get("failure")
    if not failure:
        return None
    where = [f"{name} {failure[name]}" for name in ("rank", "sample", "step") if failure[name] is not None]
    return f"{', '.join(where)}: {failure['cause']}" if where else str(failure["cause"])
