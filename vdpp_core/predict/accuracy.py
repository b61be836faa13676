"""Predictions beside measurements: the published times, and the runs on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas as pd

from vdpp_core.config import RunConfig
from vdpp_core.config.axes import FSDP
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.execution import resolve
from vdpp_core.models import checkpoint
from vdpp_core.predict import published, rates
from vdpp_core.predict.rates import Rates
from vdpp_core.runs.run import Run


def against_published(known: Rates) -> pd.DataFrame:
    """Predictions beside the published times of SVD, in seconds; index: experiment and row, as of `published.times`."""
    found = {}
    for time in published.times():
        predicted = rates.predict(time.config, known).numbers()[time.number]
        found[time.name] = {
            "video": _video(time.config),
            "layout": str(time.config.layout),
            "predicted_s": predicted,
            "known_s": time.seconds,
            "error": predicted / time.seconds - 1,
            "calibrated on": time.row is not None
            and time.row == (known.link.on if time.config.layout.fsdp else known.on),
        }
    return pd.DataFrame(found).T.astype({"predicted_s": float, "known_s": float, "error": float, "calibrated on": bool})


def _video(config: RunConfig) -> str:
    return config.size_text


def against_runs(folders: Sequence[Path], known: Rates) -> pd.DataFrame:
    """Predictions beside the makespan and mean latency of finished runs, in seconds, a row for each run.

    Runs in another setting than the one the rates were measured in (model, hardware, type, threads) are left out, and
    so are disturbed ones.
    """
    found = []
    for folder in folders:
        try:
            config, result = rates.finished(folder)
        except ConfigError:
            continue
        used = folder.resolve() in known.runs
        if rates.setting_of(config, result) != known.setting or (result.get("disturbed") and not used):
            continue
        predicted = rates.predict(config, known).numbers()
        found.append(
            {
                "run": folder.name,
                "layout": str(config.layout),
                **config.layout.model_dump(),
                "video": _video(config),
                "samples": config.num_samples,
                "predicted_makespan_s": predicted["makespan_s"],
                "makespan_s": result["makespan_s"],
                "error": predicted["makespan_s"] / result["makespan_s"] - 1,
                "predicted_latency_s": fmean(predicted["latency_s"]),
                "latency_s": fmean(result["latency_s"]),
                "latency error": fmean(predicted["latency_s"]) / fmean(result["latency_s"]) - 1,
                "calibrated on": used,
            }
        )
    return pd.DataFrame(found) if found else _nothing()


def _nothing() -> pd.DataFrame:
    """No rows, with the columns that callers use."""
    return pd.DataFrame({"run": [], "layout": [], "error": np.array([]), "calibrated on": np.array([], dtype=bool)})


def among(folders: Sequence[Path]) -> pd.DataFrame:
    """`against_runs` for runs on this machine, each group of them predicted from a few of its runs (`to_calibrate_on`).

    A group is the runs of one sweep (or of none), setting and video: on another day a machine may be faster or slower.
    Disturbed runs are left out.
    """
    groups: dict[tuple[Path, str, tuple[int, ...]], list[Path]] = {}
    for folder in folders:
        try:
            config, result = rates.finished(folder)
            checkpoint.check_model(config, resolve(config))
        except ConfigError:
            continue  # unfinished, damaged, or its model is gone
        if result.get("disturbed"):
            continue
        key = folder.parent, rates.setting_of(config, result), config.shape
        groups.setdefault(key, []).append(folder)
    compared = []
    for group in groups.values():
        best = to_calibrate_on({folder: Run(folder).config for folder in group})
        if len(group) > len(best) and best:
            compared.append(against_runs(group, rates.from_run(best)))
    return pd.concat(compared, ignore_index=True) if compared else _nothing()


def to_calibrate_on(runs: Mapping[Path, RunConfig]) -> list[Path]:
    """The runs of one setting to calibrate on: one without cfg, frames, tp and FSDP, and one for each of these that has
    nothing else; none where there is no such first one.

    Those with most samples are preferred, at first on a step pipeline, whose ranks are alone for a while and so show
    how much busy ranks slow each other down.
    """
    best: dict[str, Path] = {}
    for folder, config in runs.items():
        layout = config.layout
        axes = [axis for axis, size in layout.lockstep_sizes.items() if size > 1] + [FSDP.name] * layout.fsdp
        only = layout.pp == 1 and layout.dp == (2 if layout.fsdp else 1)
        if len(axes) > 1 or (axes and not only):
            continue
        name = "".join(axes)
        if name not in best or _shows(config) > _shows(runs[best[name]]):
            best[name] = folder
    return [best.pop(""), *best.values()] if "" in best else []


def _shows(config: RunConfig) -> tuple[bool, int]:
    """The more, the better a run is to calibrate on."""
    return config.layout.pp > 1, config.num_samples
