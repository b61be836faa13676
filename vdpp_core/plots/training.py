"""What ranks hold and send when training is split: measured beside the formula."""

from __future__ import annotations

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vdpp_core.plots.style import INK, hatched, name_rows, new_figure

HATCHES = ("", "///", "...", "xx", "\\\\\\")
MB = 1e6


def held_and_sent(held: dict[str, pd.DataFrame], sent: dict[str, pd.DataFrame], title: str, small_print: str) -> Figure:
    """Stacked bars per technique: bytes that a rank holds, and bytes that it sends in a step.

    Args:
        held, sent: "measured" and "formula" -> a row per technique, a column per part, in bytes. Measured is filled,
            the formula's sum is a dashed outline.
    """
    rows = len(held["measured"])
    figure, axes = new_figure((1, 2), (9.5, 1.6 + 0.42 * rows), title, small_print, sharey=True)
    for panel, what, parts in zip(axes[0], ("holds (MB)", "sends in a step (MB)"), (held, sent), strict=True):
        _stacked(panel, parts["measured"] / MB, parts["formula"] / MB)
        panel.set_xlabel(f"a rank {what}")
    name_rows(axes[0, 0], held["measured"].index)
    axes[0, 1].grid(axis="y", visible=False)
    return figure


def _stacked(panel: Axes, measured: pd.DataFrame, formula: pd.DataFrame) -> None:
    measured = measured.loc[:, (measured != 0).any()]
    colours = sns.color_palette("cividis", len(measured.columns))
    left = pd.Series(0.0, index=measured.index)
    for number, part in enumerate(measured.columns):
        look = hatched(colours[number], HATCHES[number % len(HATCHES)])
        panel.barh(
            range(len(measured)),
            measured[part],
            left=left,
            height=0.6,
            label=part.replace("_", "-"),
            linewidth=0.6,
            **look,
        )
        left += measured[part]
    totals = formula.sum(axis=1)
    panel.barh(range(len(totals)), totals, height=0.8, fill=False, edgecolor=INK, linestyle="--", linewidth=1.2)
    panel.set_xlim(0, 1.05 * max(totals.max(), left.max()))
    handles, _ = panel.get_legend_handles_labels()
    handles.append(Patch(fill=False, edgecolor=INK, linestyle="--", label="formula"))
    panel.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=7, frameon=False)
