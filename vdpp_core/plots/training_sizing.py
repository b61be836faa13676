"""Figure of a training's sizing: memory, traffic and time of the best layouts, and of the nearest that do not fit."""

from __future__ import annotations

import textwrap

import pandas as pd
from matplotlib.figure import Figure

from vdpp_core.plots.style import INK, name_rows, new_figure

SHOWN = 5  # layouts that fit, and excluded ones
MEMORY = {"state_gb": ("#1b4965", ""), "gathered_gb": ("#62a8c9", "//"), "activations_gb": ("#dfe7ec", "..")}
TRAFFIC = {"inside_gb": ("#8a4f1d", ""), "between_gb": ("#f0c48a", "//")}
WORDS = {
    "state_gb": "state",
    "gathered_gb": "gathered",
    "activations_gb": "activations",
    "inside_gb": "in its node",
    "between_gb": "to other nodes",
}


def layouts(table: pd.DataFrame, gpu_memory: float, title: str, small_print: str) -> Figure:
    """Bars of predictions, so dashed; what does not fit is below, its time left out. The reasons stand beside.

    Args:
        table: as of `vdpp_core.lessons.advice.advise`.
        gpu_memory: GB of each GPU, a line across.
    """
    sized = table[table["memory_gb"].notna()]
    fitting, rest = sized[sized["place"].notna()].head(SHOWN), sized[sized["place"].isna()]
    rows = pd.concat([fitting, rest.groupby(["cause", "strategy"], sort=False).head(1).head(SHOWN)])
    figure, axes = new_figure((1, 4), (13, 0.62 * len(rows) + 1.6), title, small_print, width_ratios=(3, 2, 1.3, 3.4))
    memory, traffic, seconds, words = axes[0]
    for panel, parts, label in ((memory, MEMORY, "GB per GPU"), (traffic, TRAFFIC, "GB sent per GPU and iteration")):
        left = pd.Series(0.0, index=range(len(rows)))
        for name, (colour, hatch) in parts.items():
            sizes = rows[name].reset_index(drop=True)
            panel.barh(
                left.index,
                sizes,
                left=left,
                color=colour,
                hatch=hatch,
                edgecolor=INK,
                linestyle="--",
                label=WORDS[name],
            )
            left += sizes
        panel.set_xlabel(label, fontsize=8)
        panel.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    memory.axvline(gpu_memory, color="black", linewidth=2, label="capacity")
    memory.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False)
    memory.set_xlim(0, 2.2 * gpu_memory)
    for place, size in enumerate(rows["memory_gb"]):
        memory.annotate(
            f"{size:.3g}",
            (min(size, 1.95 * gpu_memory), place),
            (2, 0),
            textcoords="offset points",
            fontsize=7,
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        )
    seconds.barh(range(len(fitting)), fitting["seconds"], color="#bbbbbb", edgecolor=INK, linestyle="--")
    for place, row in enumerate(fitting.itertuples()):
        seconds.text(row.seconds, place, f" {row.seconds:.3g}", fontsize=7, va="center")
    seconds.set_xlabel("seconds per iteration, at best", fontsize=8)
    seconds.margins(x=0.3)
    for at, facts in enumerate(rows.to_dict("records")):
        mark = "excluded:" if pd.isna(facts["place"]) else f"{facts['place']}."
        words.text(0, at, textwrap.fill(f"{mark} {facts['reason']}", 62, max_lines=3), fontsize=6.5, va="center")
    name_rows(memory, (f"{row.layout}\n{row.strategy} {row.schedule}".strip(" –") for row in rows.itertuples()), 7)
    for panel in axes[0, 1:]:
        panel.set_yticks([])
        panel.set_ylim(memory.get_ylim())
    words.set_axis_off()
    if fitting.empty:
        seconds.set_axis_off()
    return figure
