"""Live progress in notebooks, read from event files. The last view stays in the executed notebook."""

from __future__ import annotations

import time
from html import escape
from typing import Any

from IPython.display import HTML, display

from launch.job import Job
from launch.sweep import Sweep

REFRESH_S = 1.0


def watch(job: Job | Sweep) -> Any:
    """Show the progress of a job or sweep until it ends; returns the job's result or the sweep's table.

    Interrupting the cell stops the watching, not the job: `launch.attach(run_id)` finds it again.
    """
    view = display(HTML(page(job)), display_id=True)
    while not _ended(job):
        time.sleep(REFRESH_S)
        view.update(HTML(page(job)))
    result = job.wait()
    view.update(HTML(page(job)))
    return result


def _ended(job: Job | Sweep) -> bool:
    return (job.jobs[-1] if isinstance(job, Sweep) else job).outcome() is not None


def page(job: Job | Sweep) -> str:
    """The progress of a job or sweep as HTML: a bar for the run and one for each rank."""
    progress = job.progress()
    if isinstance(job, Sweep):
        total = progress["num_runs"]
        head = bar(job.run_id, progress["runs_finished"] / total, f"{progress['runs_finished']} of {total} runs")
        run = progress["run"]
        return head + (_run(run["run_id"], run) if run else f"<p>{escape(progress['status'])}</p>")
    disturbed = "".join(f"<p>disturbed: {escape(line)}</p>" for line in job.disturbed())
    return _run(job.run_id, progress) + disturbed


def bar_of(job: Job) -> str:
    """The bar of a run alone, as HTML."""
    return _whole(job.run_id, job.progress())


def _whole(run_id: str, progress: dict[str, Any]) -> str:
    left = progress["seconds_left"]
    words = f"{progress['status']}, {progress['samples_finished']} of {progress['num_samples']} samples"
    if left is not None and progress["status"] == "running":
        words += f", about {left:.0f} s left"
    if progress["stalled"] and progress["status"] == "running":
        words += f"; {progress['stalled']}"
    return bar(run_id, progress["share"], words)


def _run(run_id: str, progress: dict[str, Any]) -> str:
    bars = [_whole(run_id, progress)]
    for rank in progress["ranks"]:
        at = f"sample {rank['sample']}, step {rank['step']}" if rank["step"] is not None else rank["phase"]
        at = f"decoding sample {rank['sample']}" if rank["phase"] in ("decode", "chunk") else at
        at = "done" if rank["phase"] == "done" else at
        bars.append(bar(f"rank {rank['rank']}", rank["steps_done"] / max(1, rank["steps"]), at))
    return "".join(bars)


def bar(name: str, share: float, words: str) -> str:
    """A progress bar as HTML: a name, a share from 0 to 1, and a line about it."""
    return (
        '<div style="font-family:monospace;font-size:12px;display:flex;flex-wrap:wrap;gap:0 8px;align-items:center">'
        f'<span style="flex:0 1 25em;overflow:hidden;text-overflow:ellipsis">{escape(name)}</span>'
        f'<progress aria-label="{escape(name)}" value="{share:.3f}" max="1" style="flex:0 0 11em"></progress>'
        f"<span>{escape(words)}</span></div>"
    )
