"""Figures of the latency of one video, and of what the ranks exchange."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vdpp_core.plots.style import COLOURS, INK, hatched, mark_capacities, name_rows, new_figure, with_errors

KINDS = {"positions": "all-to-all around attention", "halo": "halo exchange around convolutions"}
HATCHES = {"positions": "//", "halo": ""}
FACES = {"positions": COLOURS["frames"], "halo": "#F0D5E4"}


def one_video(rows: pd.DataFrame, title: str, small_print: str, known: str = "measured") -> Figure:
    """A bar per layout: the latency of one video in seconds on the left, the peak memory of a rank in GB on the right.

    Args:
        rows: index: the layout in words; columns `axis` (a key of COLOURS), `predicted_s`, `predicted_gb`, and where
            known `known_s`, `known_gb`, `capacity_gb`.
        known: "measured" (filled bars) or "published" (hollow ones).
    """
    if "known_s" in rows:
        small_print = with_errors(small_print, rows["predicted_s"], rows["known_s"])
    figure, axes = new_figure((1, 2), (10, 1.7 + 0.36 * len(rows)), title, small_print)
    for panel, unit in zip(axes[0], ("s", "gb"), strict=True):
        _bars(panel, rows, unit, known)
        name_rows(panel, rows.index)
        panel.set_xlim(0, 1.12 * panel.get_xlim()[1])
    axes[0, 0].set_xlabel("latency of one video without decoding (s)")
    axes[0, 1].set_xlabel("peak memory per rank (GB)")
    axes[0, 1].set_yticklabels([])
    for panel in axes[0] if "capacity_gb" in rows else axes[0, :1]:
        panel.legend(fontsize=7.5, loc="best")
    return figure


def _bars(panel: Axes, rows: pd.DataFrame, unit: str, known: str) -> None:
    """Known values as bars, predictions as a dashed frame around them."""
    for position, (_, row) in enumerate(rows.iterrows()):
        colour = COLOURS[row["axis"]]
        first = position == 0
        if pd.notna(value := row.get(f"known_{unit}")):
            face = colour if known == "measured" else "white"
            panel.barh(position, value, height=0.5, color=face, edgecolor=colour, linewidth=1.5)
            panel.text(value, position, f" {value:.3g}", va="center", fontsize=7)
        if pd.notna(predicted := row[f"predicted_{unit}"]):
            look: dict[str, Any] = {"height": 0.74, "color": "none", "edgecolor": INK, "linestyle": "--"}
            panel.barh(position, predicted, label="predicted" if first else None, **look)
            if pd.isna(value):
                panel.text(predicted, position, f" {predicted:.3g}", va="center", fontsize=7)
    if unit == "gb":
        mark_capacities(panel, rows.get("capacity_gb", []))
    if f"known_{unit}" in rows:
        face = "#777777" if known == "measured" else "white"
        panel.barh(0, 0, label=known, color=face, edgecolor="#777777", linewidth=1.5)


def exchanged(table: pd.DataFrame, title: str, small_print: str) -> Figure:
    """GB that all ranks together send in a step, against the number of ranks that split the frames.

    Args:
        table: index: ranks; columns in GB: `positions`, `halo`, and `all_to_all`, if convolutions used all-to-all too.
    """
    figure, axes = new_figure((1, 1), (8, 3.6), title, small_print)
    panel, bottom = axes[0, 0], pd.Series(0.0, index=table.index)
    for kind, name in KINDS.items():
        look = hatched(FACES[kind], HATCHES[kind])
        panel.bar(table.index, table[kind], bottom=bottom, width=0.6, label=name, **look)
        bottom = bottom + table[kind]
    panel.plot(table.index, table["all_to_all"], "k--D", markersize=5, label="all-to-all around both (computed)")
    panel.set_xticks(table.index)
    panel.set_xlabel("ranks that split the frames")
    panel.set_ylabel("sent per step by all ranks (GB)")
    panel.set_ylim(0)
    panel.grid(axis="x", visible=False)
    panel.legend(fontsize=7.5, loc="upper left")
    return figure


def handed_on(rows: pd.DataFrame, title: str, small_print: str) -> Figure:
    """A bar per pipeline: kB that a stage hands on with a sample, the latents plain and what else travels hatched.

    Args:
        rows: index: the pipeline in words; columns in bytes: `latents`, `predicted` and `measured`, both with latents.
    """
    figure, axes = new_figure((1, 1), (9, 1.5 + 0.34 * len(rows)), title, small_print)
    panel, places = axes[0, 0], range(len(rows))
    latents, measured, predicted = (rows[name] / 1e3 for name in ("latents", "measured", "predicted"))
    face = COLOURS["pp"]
    panel.barh(places, latents, height=0.5, color=face, edgecolor=INK, label="latents, measured")
    rest = {"left": latents, "height": 0.5, "label": "solver's memory and generator's state, measured"}
    panel.barh(places, measured - latents, **rest, **hatched("#FBE7C2", "//"))
    panel.barh(places, predicted, height=0.74, color="none", edgecolor=INK, linestyle="--", label="predicted")
    for place, size, factor in zip(places, measured, measured / latents, strict=True):
        panel.text(size, place, f"  {size:.3g} kB, {factor:.3g} × the latents", va="center", fontsize=7)
    name_rows(panel, rows.index)
    panel.set_xlim(0, 1.3 * panel.get_xlim()[1])
    panel.set_xlabel("handed on with a sample, per hop (kB)")
    panel.legend(fontsize=7.5, loc="best")
    return figure
