"""Figures of memory: the parts of a predicted peak, and what was measured or published on top."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vdpp_core.plots.style import COLOURS, new_figure
from vdpp_core.predict.replay import PARTS

FACES = {"parameters": COLOURS["dp"], "activations": COLOURS["pp"], "gathered": COLOURS["fsdp"], "latents": "#999999"}
HATCHES = {"parameters": "", "activations": "//", "gathered": "xx", "latents": ".."}
NAMES = {
    "parameters": "parameters",
    "activations": "activations",
    "gathered": "gathered parameters (FSDP)",
    "latents": "latents and conditioning",
}


def peaks(rows: pd.DataFrame, title: str, small_print: str, measured: str = "published") -> Figure:
    """Stacked bars of predicted peaks, one for each row.

    Args:
        rows: index: what the bar is; columns `parameters_gb activations_gb gathered_gb latents_gb`, and where known
            `measured_gb`, `needed_gb` (allowances counted), `capacity_gb` and `outcome` (of the real run).
        measured: "measured" (filled points) or "published" (hollow ones).
    """
    figure, axes = new_figure((1, 1), (9, 1.6 + 0.42 * len(rows)), title, small_print)
    panel = axes[0, 0]
    positions = range(len(rows))
    left = pd.Series(0.0, index=rows.index)
    for part in PARTS:
        sizes = rows[f"{part}_gb"]
        look = {"color": FACES[part], "hatch": HATCHES[part], "hatchcolor": "white", "edgecolor": "#333333"}
        panel.barh(positions, sizes, left=left, linestyle="--", label=f"{NAMES[part]}, predicted", **look)
        left = left + sizes
    if "needed_gb" in rows:
        more = rows["needed_gb"] - left
        panel.barh(
            positions,
            more,
            left=left,
            color="white",
            edgecolor="#777777",
            linestyle="--",
            label="context, communicators, fragmentation (allowed for)",
        )
    _points(panel, rows, measured)
    for position, capacity in enumerate(rows.get("capacity_gb", [])):
        if pd.notna(capacity):
            label = "capacity" if position == 0 else None
            panel.plot([capacity] * 2, [position - 0.45, position + 0.45], color="black", linewidth=2, label=label)
    panel.set_yticks(positions, rows.index, fontsize=8)
    panel.invert_yaxis()
    panel.set_xlim(0)
    panel.set_xlabel("peak memory of a rank (GB)")
    panel.grid(axis="y", visible=False)
    panel.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _points(panel: Axes, rows: pd.DataFrame, measured: str) -> None:
    """What was measured, and where a run ran out of memory."""
    known = [(p, value) for p, value in enumerate(rows.get("measured_gb", [])) if pd.notna(value)]
    if known:
        face = "white" if measured == "published" else "black"
        places, values = zip(*known, strict=True)
        panel.plot(values, places, "D", color="black", markerfacecolor=face, markersize=6, label=measured)
    full = [position for position, outcome in enumerate(rows.get("outcome", [])) if outcome == "oom"]
    for number, position in enumerate(full):
        end = rows["capacity_gb"].iloc[position]
        label = "ran out of memory" if number == 0 else None
        panel.plot(end, position, "X", color="#D55E00", markeredgecolor="black", markersize=10, label=label)
