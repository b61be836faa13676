"""Figures of how soon one video is ready, and of what ranks tell each other meanwhile."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vdpp_core.plots.style import COLOURS, new_figure

KINDS = {"positions": "all-to-all around the attention", "halo": "edge frames around the convolutions"}
HATCHES = {"positions": "//", "halo": ""}
FACES = {"positions": COLOURS["frames"], "halo": "#F0D5E4"}


def one_video(rows: pd.DataFrame, title: str, small_print: str, known: str = "measured") -> Figure:
    """Bars, one for each layout: left the seconds until one video is ready, right the peak memory of a rank.

    Args:
        rows: index: the layout in words; columns `axis` (a key of COLOURS), `predicted_s`, `predicted_gb`, and where
            known `known_s`, `known_gb`, `capacity_gb`.
        known: "measured" (filled bars) or "published" (hollow ones).
    """
    figure, axes = new_figure((1, 2), (10, 1.7 + 0.36 * len(rows)), title, small_print)
    for panel, unit in zip(axes[0], ("s", "gb"), strict=True):
        _bars(panel, rows, unit, known)
        panel.set_yticks(range(len(rows)), rows.index, fontsize=8)
        panel.invert_yaxis()
        panel.set_xlim(0, 1.12 * panel.get_xlim()[1])
        panel.grid(axis="y", visible=False)
    axes[0, 0].set_xlabel("latency of one video, without decoding (s)")
    axes[0, 1].set_xlabel("peak memory of a rank (GB)")
    axes[0, 1].set_yticklabels([])
    for panel in axes[0] if "capacity_gb" in rows else axes[0, :1]:
        panel.legend(fontsize=7.5, loc="best")
    return figure


def _bars(panel: Axes, rows: pd.DataFrame, unit: str, known: str) -> None:
    """What is known as bars, what was predicted as a dashed frame around them."""
    for position, (_, row) in enumerate(rows.iterrows()):
        colour = COLOURS[row["axis"]]
        first = position == 0
        if pd.notna(value := row.get(f"known_{unit}")):
            face = colour if known == "measured" else "white"
            panel.barh(position, value, height=0.5, color=face, edgecolor=colour, linewidth=1.5)
            panel.text(value, position, f" {value:.3g}", va="center", fontsize=7)
        if pd.notna(predicted := row[f"predicted_{unit}"]):
            look: dict[str, Any] = {"height": 0.74, "color": "none", "edgecolor": "#222222", "linestyle": "--"}
            panel.barh(position, predicted, label="predicted" if first else None, **look)
            if pd.isna(value):
                panel.text(predicted, position, f" {predicted:.3g}", va="center", fontsize=7)
        if unit == "gb" and pd.notna(capacity := row.get("capacity_gb")):
            label = "capacity" if first else None
            panel.plot([capacity] * 2, [position - 0.45, position + 0.45], color="black", linewidth=2, label=label)
    if f"known_{unit}" in rows:
        face = "#777777" if known == "measured" else "white"
        panel.barh(0, 0, label=known, color=face, edgecolor="#777777", linewidth=1.5)


def exchanged(table: pd.DataFrame, title: str, small_print: str) -> Figure:
    """GB that all ranks together send in a step, against the ranks that share out the frames.

    Args:
        table: index: ranks; columns of GB: `positions`, `halo`, and `all_to_all`, if the convolutions used that, too.
    """
    figure, axes = new_figure((1, 1), (8, 3.6), title, small_print)
    panel, bottom = axes[0, 0], pd.Series(0.0, index=table.index)
    for kind, name in KINDS.items():
        look: dict[str, Any] = {
            "color": FACES[kind],
            "hatch": HATCHES[kind],
            "edgecolor": "#333333",
            "hatchcolor": "white",
        }
        panel.bar(table.index, table[kind], bottom=bottom, width=0.6, label=name, **look)
        bottom = bottom + table[kind]
    panel.plot(table.index, table["all_to_all"], "k--D", markersize=5, label="all-to-all around both (computed)")
    panel.set_xticks(table.index)
    panel.set_xlabel("ranks that share out the frames")
    panel.set_ylabel("GB sent in a step, all ranks")
    panel.set_ylim(0)
    panel.grid(axis="x", visible=False)
    panel.legend(fontsize=7.5, loc="upper left")
    return figure
