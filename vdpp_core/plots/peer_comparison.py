"""The figure of the comparison with peers: other libraries that do the same work."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vdpp_core.plots.style import COLOURS, INK, MARKERS, hatched, name_rows, new_figure

AXES_OF_KINDS = {
    "one rank": "1 rank",
    "data parallel": "dp",
    "step pipeline": "pp",
    "guidance": "cfg",
    "frames": "frames",
}


def peers(table: pd.DataFrame, small_print: str) -> Figure:
    """Makespans of all variants in seconds, and ours relative to the peers of the same kind.

    Args:
        table: as of `vdpp_core.compare.peers_report.table`.
    """
    paired = table[table["of_peer"].notna()]
    ratios = ", ".join(f"{ratio:.3f} ({kind})" for kind, ratio in zip(paired["kind"], paired["of_peer"], strict=True))
    title = f"Our makespan over the peers' on {table['ranks'].max()} ranks: {ratios}"
    figure, axes = new_figure((1, 2), (11, 1.9 + 0.36 * len(table)), title, small_print)
    _makespans(axes[0, 0], table)
    _ratios(axes[0, 1], paired)
    return figure


def _makespans(panel: Axes, table: pd.DataFrame) -> None:
    positions = range(len(table))
    panel.barh(
        positions,
        table["makespan_s"],
        height=0.7,
        color=[COLOURS[AXES_OF_KINDS[kind]] for kind in table["kind"]],
        hatch=["" if ours else "///" for ours in table["ours"]],
        hatchcolor="white",
        edgecolor=INK,
        linewidth=0.8,
    )
    _whiskers(panel, table, "makespan_s", positions)
    name_rows(panel, table["variant"])
    panel.set_xlim(0, table["makespan_s_greatest"].max() * 1.08)
    panel.set_xlabel("makespan (s): median, with least and greatest")
    handles = [Patch(**hatched("#999999", hatch)) for hatch in ("", "///")]
    panel.legend(handles, ["ours", "peer"], fontsize=7.5, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))


def _ratios(panel: Axes, paired: pd.DataFrame) -> None:
    positions = range(len(paired))
    panel.axvline(1, color=INK, linewidth=1, linestyle=":")
    _whiskers(panel, paired, "of_peer", positions)
    for position, kind, ratio in zip(positions, paired["kind"], paired["of_peer"], strict=True):
        axis = AXES_OF_KINDS[kind]
        panel.plot(ratio, position, MARKERS[axis], color=COLOURS[axis], markersize=9, markeredgecolor=INK, zorder=4)
        above: dict[str, Any] = {"xytext": (0, 9), "textcoords": "offset points", "ha": "center"}
        panel.annotate(f"{ratio:.3f}", (ratio, position), fontsize=8, backgroundcolor="white", **above)
    name_rows(panel, paired["kind"])
    panel.margins(x=0.2)
    panel.set_xlabel("our makespan / the peer's (below 1: ours is faster)")


def _whiskers(panel: Axes, table: pd.DataFrame, name: str, positions: range) -> None:
    """Lines from the least to the greatest value, edged in white to be visible on any bar."""
    for colour, width in (("white", 4.0), (INK, 1.6)):
        panel.hlines(
            positions, table[f"{name}_least"], table[f"{name}_greatest"], color=colour, linewidth=width, zorder=3
        )
