"""Figures of plans: one layout and the best ones, and predictions beside measurements."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from vdpp_core.config.layout import Parallel
from vdpp_core.plots.gantt import SECONDS, draw_spans
from vdpp_core.plots.style import COLOURS, INK, MARKERS, NAMES, PALE_INK, axis_of, name_rows, new_figure, use_theme
from vdpp_core.predict.rates import how_far_off
from vdpp_core.runs.metrics import Span

BAND = 0.15  # of predictions that hold
SHOWN = 5  # layouts that are listed
WIDTH = 172  # characters per line of the advice
COLUMNS = {  # of the advice; the bars above it show latency, makespan and memory
    "place": ("#", "{:.0f}"),
    "layout": ("layout", "{}"),
    "guidance": ("guidance", "{}"),
    "longest_interval_s": ("longest wait (s)", "{:.3g}"),
    "utilisation": ("utilisation", "{:.0%}"),
    "reason": ("", "{}"),
}


def planner(
    advice: pd.DataFrame,
    chosen: Parallel,
    spans: Sequence[Span] | str,
    capacity_gib: float,
    title: str,
    small_print: str,
) -> Figure:
    """The predicted schedule of one layout, bars for it and the best layouts, and the advice as text below.

    Args:
        advice: as of `vdpp_core.predict.planner.advise`.
        spans: of the chosen layout; or the reason why it has none.
        capacity_gib: memory of each GPU.
    """
    use_theme()
    shown = _chosen_and_best(advice, str(chosen))
    ranking = _table(shown)
    below = 0.45 + 0.15 * len(ranking)  # inches
    height = 5 + below
    figure = Figure(figsize=(11, height))  # not pyplot's, which IPython keeps until a cell ends
    sides = {"left": 0.12, "right": 0.985, "top": 1 - 0.74 / height, "bottom": (below + 0.55) / height}
    # faster than a layout engine
    grid = figure.add_gridspec(2, 3, height_ratios=(1.25, 1), hspace=0.6, wspace=0.1, **sides)
    figure.suptitle(title, fontweight="bold", fontsize=11, y=1 - 0.16 / height)
    figure.text(0.01, 0.01, small_print, fontsize=6.5, color=PALE_INK)
    _schedule(figure.add_subplot(grid[0, :]), chosen, spans)
    column, label = "latency_s", "mean latency of a video (s)"
    if advice.attrs.get("one_by_one"):
        column, label = "response_s", "mean time from arrival to the last step (s)"
    _bars(figure.add_subplot(grid[1, 0]), shown, column, label, str(chosen))
    _bars(figure.add_subplot(grid[1, 1]), shown, "makespan_s", "makespan of all videos (s)", str(chosen))
    memory = figure.add_subplot(grid[1, 2])
    _bars(memory, shown, "needed_gib", "memory needed per rank (GiB)", str(chosen))
    for panel in figure.axes[2:]:
        panel.set_yticks([])  # named on the left
    memory.axvline(capacity_gib, color="black", linewidth=2, label="capacity")
    memory.set_xlim(0, max(memory.get_xlim()[1], 1.08 * capacity_gib))
    memory.legend(fontsize=7, loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2)
    look: dict[str, Any] = {"fontsize": 7.2, "family": "monospace", "va": "top", "linespacing": 1.45}
    figure.text(0.01, below / height, "\n".join(ranking), **look)
    return figure


def _chosen_and_best(advice: pd.DataFrame, chosen: str) -> pd.DataFrame:
    best = advice[advice["place"].notna()].head(SHOWN)
    return pd.concat([best, advice[(advice["layout"] == chosen) & ~advice["layout"].isin(best["layout"])]])


def _schedule(panel: Axes, layout: Parallel, spans: Sequence[Span] | str) -> None:
    """The schedule of a layout; or in its place the reason why it has none."""
    if isinstance(spans, str):
        words = "\n".join(textwrap.wrap(spans, 100))
        panel.text(0.5, 0.5, words, ha="center", va="center", fontsize=11, transform=panel.transAxes)
        panel.set_axis_off()
        return
    draw_spans(panel, spans, layout, max(span.end for span in spans), predicted=True)
    panel.set_xlabel(SECONDS, fontsize=8)
    title = f"{layout}, predicted: a row per rank, a bar per video"
    panel.set_title(title, fontsize=9, loc="left", fontweight="normal")


def _bars(panel: Axes, rows: pd.DataFrame, column: str, label: str, chosen: str) -> None:
    """A bar per layout, dashed as all predictions; the chosen one hatched."""
    for place, (_, row) in enumerate(rows.iterrows()):
        colour, hatch = COLOURS[axis_of(_layout(row))], "//" * (row["layout"] == chosen)
        panel.barh(place, row[column], color=colour, hatch=hatch, alpha=0.55, edgecolor=INK, linestyle="--")
        if pd.notna(row[column]):
            panel.text(row[column], place, f" {row[column]:.3g}", va="center", fontsize=6.5)
    name_rows(panel, rows["layout"], fontsize=6.5)
    panel.margins(x=0.14)
    panel.set_xlim(left=0)
    panel.tick_params(axis="x", labelsize=7)
    panel.set_xlabel(label, fontsize=8)


def _layout(row: pd.Series) -> Parallel:
    return Parallel(**{name: row[name] for name in Parallel.model_fields})


def _table(rows: pd.DataFrame) -> list[str]:
    """The lines of the advice as text in columns; long reasons continue below their beginning."""
    if rows.empty:
        return ["No layout fits. Fewer frames, a smaller size or --forward-chunking need less memory."]
    cells = [[heading for heading, _ in COLUMNS.values()]]
    for _, row in rows.iterrows():
        cells.append(["–" if pd.isna(row[name]) else form.format(row[name]) for name, (_, form) in COLUMNS.items()])
    widths = [max(len(line[column]) for line in cells) for column in range(len(COLUMNS) - 1)]
    lines = []
    for line in cells:
        start = "  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=False)) + "  "
        lines += textwrap.wrap(line[-1], WIDTH, initial_indent=start, subsequent_indent=" " * len(start)) or [start]
    return lines


def against_measured(table: pd.DataFrame, title: str, small_print: str) -> Figure:
    """Predicted against measured makespan and mean latency of runs in seconds, with a band of 15 %.

    Args:
        table: as of `vdpp_core.predict.accuracy.against_runs`; the runs calibrated on are hollow.
    """
    figure, axes = new_figure((1, 2), (11.5, 4.3), title, small_print)
    axes_of = [axis_of(_layout(row)) for _, row in table.iterrows()]
    for panel, name in zip(axes[0], ("makespan", "latency"), strict=True):
        known, predicted = table[f"{name}_s"], table[f"predicted_{name}_s"]
        ends = np.array([0.8 * min(known.min(), predicted.min()), 1.25 * max(known.max(), predicted.max())])
        panel.fill_between(
            ends, (1 - BAND) * ends, (1 + BAND) * ends, color="#999999", alpha=0.3, label=f"within {BAND:.0%}"
        )
        panel.plot(ends, ends, color=INK, linewidth=0.8)
        for axis in dict.fromkeys(axes_of):
            rows = table[[one == axis for one in axes_of]]
            for calibrated in (False, True):
                part = rows[rows["calibrated on"] == calibrated]
                face = "white" if calibrated else COLOURS[axis]
                edge = {} if axis == "1 rank" else {"edgecolors": COLOURS[axis]}  # its marker is a cross
                look = {"color": COLOURS[axis] if axis == "1 rank" else face, "marker": MARKERS[axis]}
                words = f"{NAMES[axis]}{', calibrated on' * calibrated}" if len(part) else None
                panel.scatter(part[f"{name}_s"], part[f"predicted_{name}_s"], label=words, zorder=3, **look, **edge)
        panel.set_xscale("log")
        panel.set_yscale("log")
        for side in (panel.xaxis, panel.yaxis):
            side.set_major_locator(LogLocator(subs=(1, 2, 5)))
            side.set_major_formatter(ScalarFormatter())
            side.set_minor_formatter(NullFormatter())
        panel.set_xlabel(f"measured {'mean ' * (name == 'latency')}{name} (s)")
        panel.set_ylabel(f"predicted {'mean ' * (name == 'latency')}{name} (s)")
        errors = (predicted / known - 1)[~table["calibrated on"]].tolist()
        far = textwrap.fill(f"{name} {how_far_off(errors)}", 64)
        panel.set_title(far, fontsize=8.5, loc="left", fontweight="normal")
    axes[0, 1].legend(fontsize=7.5, loc="upper left", bbox_to_anchor=(1.02, 1.0), borderaxespad=0.0)
    return figure
