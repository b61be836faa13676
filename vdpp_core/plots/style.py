"""Every figure. Each function returns a Figure and saves nothing.

Measured is filled, published hollow, predicted dashed. One colour, marker and hatch for each axis, told apart in grey.
"""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import seaborn as sns
from matplotlib.figure import Figure

from vdpp_core.config.axes import AXES, AXIS_NAMES, FSDP
from vdpp_core.config.layout import Parallel

ALONE = "1 rank"
COLOURS = {axis.name: axis.colour for axis in (*AXES, FSDP)} | {ALONE: "#777777"}
MARKERS = {axis.name: axis.marker for axis in (*AXES, FSDP)} | {ALONE: "x"}
NAMES = {axis.name: axis.label for axis in (*AXES, FSDP)} | {ALONE: "one rank"}


def use_theme() -> None:
    """seaborn's theme, set here and nowhere else."""
    sns.set_theme(context="notebook", style="whitegrid", font_scale=0.85)
    plt.rcParams.update({"figure.dpi": 120, "savefig.dpi": 150, "axes.titleweight": "bold", "figure.autolayout": False})


def axis_of(layout: Parallel) -> str:
    """Which colour a layout has: its largest axis, of equal ones frames, cfg, pp, dp; sharding where that is dp."""
    if layout.world_size == 1:
        return ALONE
    axis = max(reversed(AXIS_NAMES), key=layout.sizes.__getitem__)
    return "fsdp" if layout.fsdp and axis == "dp" else axis


def new_figure(panels: tuple[int, int], size: tuple[float, float], title: str, small_print: str) -> tuple[Figure, Any]:
    use_theme()
    figure, axes = plt.subplots(*panels, figsize=size, layout="constrained", squeeze=False)
    figure.suptitle(title, fontweight="bold", fontsize=11)
    figure.supxlabel(small_print, fontsize=6.5, color="#555555", x=0.01, ha="left", wrap=True)
    plt.close(figure)  # shown where it is returned, once
    return figure, axes
