"""Compare runs: a table of their numbers, and a chart of what each rank did when."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from launch.job import Job
from vdpp_core.compare import tables
from vdpp_core.runs import results

MOST_SAMPLES = 100  # more could not be told apart
COMPARED = (
    *("layout", "model", "total_steps", "num_samples", "outcome", "disturbed"),
    *("makespan_s", "predicted_makespan_s", "time_to_first_video_s", "predicted_time_to_first_video_s"),
    *("latency_s", "predicted_latency_s", "interval_s", "predicted_interval_s", "samples_per_s", "bubble"),
    *("max_peak_memory_gb", "predicted_peak_memory_gb", "solver", "handoff_mb", "predicted_handoff_mb"),
)


def compare(jobs: Sequence[Job]) -> pd.DataFrame:
    """A column for each finished run: its numbers, and those predicted from its steps before the clock started; "–"
    where a run has none.

    Names and units are those of `vdpp_core.compare.tables.table`.
    """
    found = tables.table([job.folder for job in jobs]).set_index("run_id")
    known = [name for name in COMPARED if name in found and found[name].notna().any()]
    return found[known].round(3).astype(object).fillna("–").T


def timeline(jobs: Sequence[Job]) -> Figure | None:
    """What each rank did when: one panel for each run, on one time axis in seconds; None if no step has finished.

    Long runs show their first MOST_SAMPLES samples.
    """
    from vdpp_core.plots import gantt  # takes a second; launchers do not need it

    panels, ends = [], {}
    for job in jobs:
        config, spans = job.run.config, results.measured_spans(job.run.events())
        shown = [span for span in spans if span.sample < MOST_SAMPLES]
        if shown:
            ends[job.folder] = max(span.end for span in spans if not span.beside), str(config.layout)
            first = f", the first {MOST_SAMPLES}" * (len(shown) < len(spans))
            caption = f"{job.run_id}: {config.num_samples} samples of {config.total_steps} steps{first}"
            panels.append((caption, shown, config.layout))
    if not panels:
        return None
    (soonest, layout), (last, other) = min(ends.values()), max(ends.values())
    one = f"{layout}: last step after {last:.3g} s"
    several = f"{len(panels)} runs: {layout} finishes first after {soonest:.3g} s, {other} last after {last:.3g} s"
    return gantt.gantt(panels, several if len(panels) > 1 else one, tables.source(list(ends)))
