"""What torch.profiler recorded of a rank: its layers by time, and its memory over time."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from vdpp_core.plots.style import COLOURS, INK, hatched, name_rows, new_figure
from vdpp_core.runs.profiles import LAYER, STEPS, read
from vdpp_core.runs.run import Run

MOST_LAYERS = 15


def layers(entries: list[dict[str, Any]]) -> pd.DataFrame:
    """The denoiser's layers, the slowest first: calls and milliseconds of both traced steps, and the share of all.

    On CUDA the milliseconds are the GPU's, elsewhere those of the thread that computes.
    """
    spans = pd.DataFrame([entry for entry in entries if str(entry.get("name")).startswith(LAYER) and "dur" in entry])
    on_device = spans[spans["cat"] == "gpu_user_annotation"]
    spans = on_device if len(on_device) else spans[spans["cat"] == "user_annotation"]
    names = spans["name"].str.removeprefix(LAYER)
    table = (spans["dur"] / 1000).groupby(names).agg(["size", "sum"]).set_axis(["calls", "ms"], axis="columns")
    return table.sort_values("ms", ascending=False).assign(share=table["ms"] / table["ms"].sum()).rename_axis("layer")


def memory(entries: list[dict[str, Any]]) -> pd.DataFrame:
    """What PyTorch's allocator held over the traced steps: ms since their start, and GB (1e9 bytes) above it.

    On CUDA the GPU's memory, elsewhere the host's.
    """
    found = [(entry["ts"], entry["args"]) for entry in entries if entry.get("name") == "[memory]"]
    device = max(args["Device Type"] for _, args in found)  # 0 is the CPU
    held = pd.DataFrame(
        [(ts / 1000, args["Bytes"] / 1e9) for ts, args in found if args["Device Type"] == device],
        columns=["ms", "gb"],
    ).sort_values("ms", kind="stable")
    return held.assign(ms=held["ms"] - held["ms"].min(), gb=held["gb"].cumsum())


def draw(run: Run, rank: int = 0) -> Figure:
    """The slowest layers of a rank as bars, and its memory over the traced steps.

    Raises:
        ConfigError: the rank wrote no trace.
    """
    entries = read(run.folder, rank)
    table, held = layers(entries), memory(entries)
    first, shown, most = table.iloc[0], table.head(MOST_LAYERS), held["gb"].max()
    unit, factor = ("GB", 1) if most >= 0.1 else ("MB", 1000)
    share, grows = f"{first['share']:.0%}", f"{most * factor:.3g} {unit}"
    title = f"{table.index[0]} takes {share} of the time in layers; memory rises by {grows}"
    small_print = (
        f"rank {rank} of {run.id}, {STEPS} steps after the last sample, {len(table)} layers, with the profiler on"
    )
    figure, axes = new_figure((1, 2), (10, 1.2 + 0.24 * len(shown)), title, small_print, width_ratios=[3, 2])
    bars, timeline = axes[0]
    slowest = f"the {len(shown)} slowest layers, {shown['share'].sum():.0%} of the time"
    bars.barh(range(len(shown)), shown["ms"] / STEPS, **hatched(COLOURS["pp"], ""))
    name_rows(bars, shown.index, fontsize=7)
    bars.set_xlabel("time a step (ms)")
    bars.set_title(slowest if len(shown) < len(table) else f"all {len(table)} layers", fontsize=9, loc="left")
    timeline.step(held["ms"], held["gb"] * factor, where="post", color=INK, linewidth=0.8)
    timeline.set_xlabel("time (ms)")
    timeline.set_ylabel(f"memory above the start ({unit})")
    timeline.set_title(f"memory over {STEPS} steps", fontsize=9, loc="left")
    return figure
