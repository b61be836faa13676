"""Run folders -> tables to compare, and the published figures beside them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import nan
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pandas as pd

from vdpp_core.config.errors import ConfigError
from vdpp_core.runs import machine
from vdpp_core.runs.run import Run


def table(runs: Sequence[Path | Run]) -> pd.DataFrame:
    """One row per run that has ended: its layout, its outcome, and the numbers to compare. The names carry the units.

    A resumed run has no times: they would cover only its last attempt. Predicted times are those of a whole run,
    so only a run that finished in one go has them.
    """
    rows = []
    for run in map(Run.of, runs):
        result = run.result()
        if result is None:
            continue
        try:
            config = run.config
        except ConfigError as error:
            warnings.warn(f"left out: {error}", stacklevel=2)
            continue
        predicted = result["predicted"] or {}
        whole = result["outcome"] == "ok" and not result.get("resumed")
        rows.append(
            {
                "run_id": result["run_id"],
                "layout": str(config.layout),
                "ranks": result["world_size"],
                "steps_per_gpu": result["steps_per_gpu"],
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
                "predicted_peak_memory_gb": predicted.get("max_peak_memory_gb"),
                **{f"predicted_{name}": value for name, value in _times(predicted if whole else {}).items()},
                "solver": predicted.get("solver"),
                "handoff_mb": _largest_handoff(result),
                "predicted_handoff_mb": _largest_handoff(predicted),
            }
        )
    return pd.DataFrame(rows, columns=None if rows else ["run_id", "outcome"])


def _times(numbers: dict[str, Any]) -> dict[str, float]:
    """The numbers to compare among `vdpp_core.runs.metrics.numbers`, with the median latency and mean interval; NaN
    where one is not known."""
    names = ["makespan_s", "samples_per_s", "steady_state_samples_per_s", "first_sample_time_s", "bubble"]
    names.append("time_to_first_video_s")
    known = {name: nan if numbers.get(name) is None else numbers[name] for name in names}
    return known | {
        "latency_s": median(numbers["latency_s"]) if numbers.get("latency_s") else nan,
        "interval_s": fmean(numbers["interval_s"]) if numbers.get("interval_s") else nan,
    }


def _largest_handoff(numbers: dict[str, Any]) -> float:
    """In MB (1e6 bytes); NaN without one."""
    return max((size / 1e6 for size in numbers.get("handoff_bytes_per_rank") or [] if size), default=nan)


def scaling(table: pd.DataFrame) -> pd.Series:
    """`samples_per_s` of each run of a sweep over that of the configuration with the fewest ranks (of several, the
    first) in the same repeat; NaN where one of them has no times."""
    first = table.sort_values(["ranks", "config"], kind="stable")["config"].iloc[0]
    base = table[table["config"] == first].set_index("repeat")["samples_per_s"]
    return table["samples_per_s"] / table["repeat"].map(base)


def by_layout_in_words(table: pd.DataFrame) -> list[str]:
    """A sweep's table for a terminal: a line for each configuration, with medians over its repeats."""
    if "config" not in table or table.empty:
        return ["no run has ended"]
    columns = {
        "ranks": ("ranks", "d"),
        "steps_per_gpu": ("steps/GPU", "d"),
        "first_sample_time_s": ("first", ".3f"),
        "latency_s": ("latency", ".3f"),
        "makespan_s": ("makespan", ".3f"),
        "predicted_makespan_s": ("predicted", ".3f"),
        "samples_per_s": ("samples/s", ".4f"),
        "scaling": ("scaling", ".2f"),
        "max_peak_memory_gb": ("peak", ".3f"),
    }
    grouped = table.groupby("config", sort=True)
    medians, shown = grouped[list(columns)].median(), {"layout": grouped["layout"].first()}
    for name, (heading, digits) in columns.items():
        kind: type = int if digits == "d" else float
        shown[heading] = medians[name].map(lambda value, d=digits, k=kind: "" if pd.isna(value) else f"{k(value):{d}}")
    if (table["outcome"] != "ok").any():
        shown["ended"] = grouped["outcome"].agg(_endings)
    lines = pd.DataFrame(shown).to_string(index=False).splitlines()
    base = table.sort_values(["ranks", "config"], kind="stable")["layout"].iloc[0]
    lines.append("first sample, latency, makespan measured and predicted: seconds; peak memory of a rank: GB")
    lines.append(f"samples/s: samples / makespan, fill included; scaling: samples/s over that of {base}")
    if (repeats := table["repeat"].nunique()) > 1:
        lines.append(f"medians of {repeats} repeats")
    disturbed = table[table["disturbed"].notna()]
    lines += [f"disturbed: {run}: {why}" for run, why in zip(disturbed["run_id"], disturbed["disturbed"], strict=True)]
    return lines


def _endings(outcomes: pd.Series) -> str:
    """How the repeats of a configuration ended."""
    counts = outcomes.value_counts()
    return str(counts.index[0]) if len(counts) == 1 else ", ".join(f"{count} {name}" for name, count in counts.items())


def source(runs: Sequence[Path | Run]) -> str:
    """The small print of a figure: hardware, device, threads, date, run ids, and how many runs were disturbed."""
    found = [(run, result) for run in map(Run.of, runs) if (result := run.result()) is not None]
    if not found:
        return "no finished run"
    _, first = found[0]
    threads = machine.threads_text(count for _, result in found for count in result["threads_per_rank"])
    ids = ", ".join(_short_id(run.folder) for run, _ in found[:4]) + (f" and {len(found) - 4} more" * (len(found) > 4))
    machine_name = f"{machine.hardware_name(first['hardware'])}, {first['device']}, {first['dtype']}"
    disturbed = sum(bool(result.get("disturbed")) for _, result in found)
    words = f"; {disturbed} of these runs {'was' if disturbed == 1 else 'were'} disturbed" if disturbed else ""
    return f"{machine_name}, {threads}; {first['date'][:10]}; runs {ids}{words}"


def _short_id(folder: Path) -> str:
    inside_sweep = (folder.parent / "sweep.json").exists()
    return f"{folder.parent.name}/{folder.name}" if inside_sweep else folder.name


def paired_ratios(table: pd.DataFrame, column: str, baseline: int = 0) -> pd.DataFrame:
    """A sweep's column as a ratio to the configuration `baseline` of the same repeat: median, least, greatest.

    Args:
        table: of a `launch.Sweep`, with repeat, config and layout.
        column: the numbers to divide.
        baseline: the number of a configuration.
    """
    wide = table.pivot(index="repeat", columns="config", values=column)
    ratios = wide.div(wide[baseline], axis=0)
    labels = table.drop_duplicates("config").set_index("config")["layout"]
    frame = pd.DataFrame({"median": ratios.median(), "least": ratios.min(), "greatest": ratios.max()})
    return frame.assign(layout=labels).set_index("layout")
