"""Figures of memory: the parts of a predicted peak, and the measured or published peak on top."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vdpp_core.plots.style import COLOURS, hatched, mark_capacities, name_rows, new_figure
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
    """Stacked bars of predicted peaks in GB, one for each row.

    Args:
        rows: index: name of the bar; columns `parameters_gb activations_gb gathered_gb latents_gb`, and where known
            `measured_gb`, `needed_gb` (with allowances), `capacity_gb` and `outcome` (of the real run).
        measured: "measured" (filled points) or "published" (hollow ones).
    """
    figure, axes = new_figure((1, 1), (9, 1.6 + 0.42 * len(rows)), title, small_print)
    panel = axes[0, 0]
    positions = range(len(rows))
    left = pd.Series(0.0, index=rows.index)
    for part in PARTS:
        sizes = rows[f"{part}_gb"]
        look = hatched(FACES[part], HATCHES[part])
        panel.barh(positions, sizes, left=left, linestyle="--", label=f"{NAMES[part]}, predicted", **look)
        left = left + sizes
    if "needed_gb" in rows:
        more = rows["needed_gb"] - left
        allowances = "allowance for context, communicators, fragmentation"
        look = {"color": "white", "edgecolor": "#777777", "linestyle": "--"}
        panel.barh(positions, more, left=left, label=allowances, **look)
    _points(panel, rows, measured)
    mark_capacities(panel, rows.get("capacity_gb", []))
    name_rows(panel, rows.index)
    panel.set_xlim(0)
    panel.set_xlabel("peak memory per rank (GB)")
    panel.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _points(panel: Axes, rows: pd.DataFrame, measured: str) -> None:
    """The known peaks, and a mark where a run ran out of memory."""
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
