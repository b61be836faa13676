"""The style of all figures, whose functions return a Figure and save nothing.

Measured is filled, published hollow, predicted dashed. Each axis has one colour and marker, distinct in greyscale.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vdpp_core.config.axes import AXES, AXIS_NAMES, FSDP
from vdpp_core.config.layout import Parallel
from vdpp_core.predict.rates import how_far_off

INK, PALE_INK = "#222222", "#555555"
ALONE = "1 rank"
COLOURS = {axis.name: axis.colour for axis in (*AXES, FSDP)} | {ALONE: "#777777"}
MARKERS = {axis.name: axis.marker for axis in (*AXES, FSDP)} | {ALONE: "x"}
NAMES = {axis.name: axis.label for axis in (*AXES, FSDP)} | {ALONE: "one rank"}


def use_theme() -> None:
    """Set seaborn's theme, here and nowhere else."""
    sns.set_theme(context="notebook", style="whitegrid", font_scale=0.85)
    plt.rcParams.update({"figure.dpi": 120, "savefig.dpi": 150, "axes.titleweight": "bold", "figure.autolayout": False})


def axis_of(layout: Parallel) -> str:
    """The key of COLOURS for a layout: its largest axis (of equal ones frames, cfg, pp, dp), fsdp for sharded replicas,
    or "1 rank"."""
    if layout.world_size == 1:
        return ALONE
    axis = max(reversed(AXIS_NAMES), key=layout.sizes.__getitem__)
    return "fsdp" if layout.fsdp and axis == "dp" else axis


def new_figure(
    panels: tuple[int, int], size: tuple[float, float], title: str, small_print: str, **options: Any
) -> tuple[Figure, Any]:
    """A figure with a title, small print below (hardware, date, runs), and an array of (rows, columns) panels.

    Args:
        size: inches.
        options: of `plt.subplots`.
    """
    use_theme()
    figure, axes = plt.subplots(*panels, figsize=size, layout="constrained", squeeze=False, **options)
    figure.suptitle(title, fontweight="bold", fontsize=11, wrap=True)
    figure.supxlabel(small_print, fontsize=6.5, color=PALE_INK, x=0.01, ha="left", wrap=True)
    plt.close(figure)  # shown where it is returned, once
    return figure, axes


def with_errors(small_print: str, predicted: pd.Series, measured: pd.Series) -> str:
    """The small print, and how far predictions are off where there is a measurement."""
    errors = (predicted / measured - 1).astype(float).dropna()
    return f"{small_print}; predictions {how_far_off(errors.tolist())}" if len(errors) else small_print


def name_rows(panel: Axes, names: Iterable[str], fontsize: float = 8) -> None:
    """Name the rows of horizontal bars, the first on top."""
    names = list(names)
    panel.set_yticks(range(len(names)), names, fontsize=fontsize)
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.grid(axis="y", visible=False)


def hatched(face: str, hatch: str) -> dict[str, Any]:
    """Options of a bar that is distinct in greyscale."""
    return {"facecolor": face, "hatch": hatch, "hatchcolor": "white", "edgecolor": INK}


def mark_capacities(panel: Axes, capacities: Iterable[float]) -> None:
    """Mark the memory of a device across each row of horizontal bars; NaN where it is unknown."""
    label: str | None = "capacity"
    for position, capacity in enumerate(capacities):
        if pd.notna(capacity):
            panel.plot([capacity] * 2, [position - 0.45, position + 0.45], color="black", linewidth=2, label=label)
            label = None
