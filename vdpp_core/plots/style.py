"""Every figure. Each function returns a Figure and saves nothing.

Measured is filled, published hollow, predicted dashed. One colour, marker and hatch for each axis, told apart in grey.
"""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import seaborn as sns
from matplotlib.figure import Figure

from vdpp_core.config.layout import AXES, Parallel

COLOURS = {
    "dp": "#0072B2",
    "pp": "#E69F00",
    "cfg": "#009E73",
    "frames": "#CC79A7",
    "fsdp": "#5A3A1A",
    "1 rank": "#777777",
}
MARKERS = {"dp": "o", "pp": "s", "cfg": "^", "frames": "D", "fsdp": "P", "1 rank": "x"}
NAMES = {
    "pp": "step pipeline (pp)",
    "dp": "data parallel (dp)",
    "cfg": "guidance (cfg)",
    "frames": "frames",
    "fsdp": "sharded (fsdp)",
    "1 rank": "one rank",
}


def use_theme() -> None:
    """seaborn's theme, set here and nowhere else."""
    sns.set_theme(context="notebook", style="whitegrid", font_scale=0.85)
    plt.rcParams.update({"figure.dpi": 120, "savefig.dpi": 150, "axes.titleweight": "bold", "figure.autolayout": False})


def axis_of(layout: Parallel) -> str:
    """Which colour a layout has: its largest axis, of equal ones frames, cfg, pp, dp; sharding where that is dp."""
    if layout.world_size == 1:
        return "1 rank"
    axis = max(reversed(AXES), key=lambda axis: getattr(layout, axis))
    return "fsdp" if layout.fsdp and axis == "dp" else axis


def new_figure(panels: tuple[int, int], size: tuple[float, float], title: str, small_print: str) -> tuple[Figure, Any]:
    use_theme()
    figure, axes = plt.subplots(*panels, figsize=size, layout="constrained", squeeze=False)
    figure.suptitle(title, fontweight="bold", fontsize=11)
    figure.supxlabel(small_print, fontsize=6.5, color="#555555", x=0.01, ha="left", wrap=True)
    plt.close(figure)  # shown where it is returned, once
    return figure, axes
