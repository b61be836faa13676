"""What is predicted of a run before it starts, for its result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vdpp_core.config import RunConfig
from vdpp_core.predict import memory, messages
from vdpp_core.runs import runfolder
from vdpp_core.runs.run import Run


def record(folder: Path) -> None:
    """Write the prediction of a run into its folder, unless it is there already: the peak memory of a rank and, where
    there are stages, what each rank hands on.

    Raises:
        ConfigError: config.json or the model that it names cannot be read.
    """
    run = Run(folder)
    if run.prediction is None:
        runfolder.write_prediction(folder, {"memory": memory.predict(run.config).in_gb(), **_handoffs(run.config)})


def _handoffs(config: RunConfig) -> dict[str, Any]:
    """Nothing for the rows of a manifest: what the encoders return for one, of unknown size, travels with it."""
    if config.layout.pp == 1 or config.rows is not None:
        return {}
    return {"solver": messages.of(config).solver, "handoff_bytes_per_rank": messages.per_rank(config)}
