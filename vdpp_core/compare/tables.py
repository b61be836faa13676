"""Run folders -> tables to compare, and the published figures beside them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pandas as pd

from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.runs import machine, runfolder


def table(folders: Sequence[Path]) -> pd.DataFrame:
    """One row a run: what it was, how it ended, and the numbers people compare. Units are in the names.

    A resumed run has no times: they would be those of its last attempt alone.
    """
    rows = []
    for folder in folders:
        result = runfolder.read_result(folder)
        if result is None:
            continue
        try:
            config = RunConfig.read(folder)
        except ConfigError as error:
            warnings.warn(f"left out: {error}", stacklevel=2)
            continue
        rows.append(
            {
                "run_id": result["run_id"],
                "layout": str(config.layout),
                "ranks": result["world_size"],
                **config.layout.sizes,
                "fsdp": config.layout.fsdp,
                "model": config.model_id or config.model,
                "total_steps": config.total_steps,
                "num_samples": config.num_samples,
                "outcome": result["outcome"],
                "disturbed": "; ".join(result.get("disturbed") or []) or None,
                **_times({} if result.get("resumed") else result),
                "sent_gb_per_step": max(result.get("lockstep_gb_per_step_per_rank") or [0.0]),
                "limit_gib": float("nan") if config.memory_limit_gib is None else config.memory_limit_gib,
                "max_peak_memory_gb": result["max_peak_memory_gb"],
                "predicted_peak_memory_gb": (result["predicted"] or {}).get("max_peak_memory_gb"),
                **{f"predicted_{name}": value for name, value in _times(result["predicted"] or {}).items()},
            }
        )
    return pd.DataFrame(rows, columns=None if rows else ["run_id", "outcome"])


def _times(numbers: dict[str, Any]) -> dict[str, float | None]:
    """The numbers that people compare, of `vdpp_core.runs.metrics.numbers`: the median latency, the mean interval."""
    names = ("makespan_s", "samples_per_s", "steady_state_samples_per_s", "first_sample_time_s", "bubble")
    return {name: numbers.get(name) for name in names} | {
        "latency_s": median(numbers["latency_s"]) if numbers.get("latency_s") else None,
        "interval_s": fmean(numbers["interval_s"]) if numbers.get("interval_s") else None,
    }


def source(folders: Sequence[Path]) -> str:
    """The small print of a figure: hardware, device, threads, date, run ids, and how many runs were disturbed."""
    found = [(folder, result) for folder in folders if (result := runfolder.read_result(folder)) is not None]
    if not found:
        return "no finished run"
    _, first = found[0]
    threads = sorted({count for _, result in found for count in result["threads_per_rank"]})
    ids = ", ".join(_short_id(folder) for folder, _ in found[:4]) + (f" and {len(found) - 4} more" * (len(found) > 4))
    machine_name = f"{machine.hardware_name(first['hardware'])}, {first['device']}, {first['dtype']}"
    per_rank = f"{'/'.join(map(str, threads))} thread(s) a rank"
    disturbed = sum(bool(result.get("disturbed")) for _, result in found)
    words = f"; {disturbed} of these runs {'was' if disturbed == 1 else 'were'} disturbed" if disturbed else ""
    return f"{machine_name}, {per_rank}; {first['date'][:10]}; runs {ids}{words}"


def _short_id(folder: Path) -> str:
    inside_sweep = (folder.parent / "sweep.json").exists()
    return f"{folder.parent.name}/{folder.name}" if inside_sweep else folder.name


def paired_ratios(table: pd.DataFrame, column: str, baseline: int = 0) -> pd.DataFrame:
    """A sweep's column as a ratio to the configuration `baseline` of the same repeat: median, least, greatest."""
    wide = table.pivot(index="repeat", columns="config", values=column)
    ratios = wide.div(wide[baseline], axis=0)
    labels = table.drop_duplicates("config").set_index("config")["layout"]
    frame = pd.DataFrame({"median": ratios.median(), "least": ratios.min(), "greatest": ratios.max()})
    return frame.assign(layout=labels).set_index("layout")
