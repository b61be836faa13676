"""Figure of the methods to use several GPUs: what each does to latency, throughput, memory and communication."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from vdpp_core.plots.style import ALONE, COLOURS, INK, PALE_INK, name_rows, new_figure

PANELS = {  # column -> axis label; multiples of one rank have a line at 1
    "latency": "latency of one video\n(one rank = 1, shorter is better)",
    "throughput": "videos per second\n(one rank = 1, longer is better)",
    "memory": "peak memory of a rank\n(one rank = 1, shorter is better)",
    "sent_mb": "sent for one video\nby all ranks (MB)",
}


def methods(rows: pd.DataFrame, title: str, small_print: str) -> Figure:
    """A bar for each method in each panel of PANELS.

    Args:
        rows: of `vdpp_core.compare.methods.table`, with a column `axis` (a key of COLOURS).
    """
    figure, axes = new_figure((1, len(PANELS)), (12, 1.7 + 0.36 * len(rows)), title, small_print)
    for number, (panel, (column, label)) in enumerate(zip(axes[0], PANELS.items(), strict=True)):
        values = rows[column].astype(float)
        colours = [COLOURS.get(axis, COLOURS[ALONE]) for axis in rows["axis"]]
        panel.barh(range(len(rows)), values, height=0.6, color=colours, edgecolor=INK, linewidth=0.6)
        for place, value in enumerate(values):
            panel.text(value, place, f" {value:.3g}", va="center", fontsize=7)
        name_rows(panel, rows.index if number == 0 else [""] * len(rows))
        if column != "sent_mb":
            panel.axvline(1, color=PALE_INK, linestyle=":", linewidth=1)
        panel.set_xlim(0, 1.25 * max(values.max(), 1e-9))
        panel.set_xlabel(label, fontsize=8)
    return figure
