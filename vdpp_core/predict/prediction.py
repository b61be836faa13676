"""What is predicted of a run before it starts, for its result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vdpp_core.predict import memory, messages
from vdpp_core.runs import runfolder
from vdpp_core.runs.run import Run


def record(folder: Path) -> None:
    """Write the prediction of a run into its folder, as far as it is not there already: the peak memory of a rank and,
    where there are stages, what each rank hands on.

    Raises:
        ConfigError: config.json or the model that it names cannot be read.
    """
    run = Run(folder)
    found: dict[str, Any] = dict(run.prediction or {})
    if not found:
        found["memory"] = memory.predict(run.config).in_gb()
    if run.config.experts is not None and "peak_memory_gb_per_stage" not in found:
        found["peak_memory_gb_per_stage"] = [peak.total / 1e9 for peak in memory.per_stage(run.config)]
    if found != run.prediction:
        runfolder.write_prediction(folder, found)  # at once: a short run may end before the rest is known
    hands_on = run.config.layout.pp > 1 and run.config.rows is None  # what a row's encoders return travels with it
    if hands_on and "solver" not in found:
        found |= {"solver": messages.of(run.config).solver, "handoff_bytes_per_rank": messages.per_rank(run.config)}
        runfolder.write_prediction(folder, found)
