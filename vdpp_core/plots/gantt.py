"""What each rank does when."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vdpp_core.config.layout import Parallel
from vdpp_core.plots.style import COLOURS, axis_of, use_theme
from vdpp_core.runs.metrics import Span


def gantt(
    runs: Sequence[tuple[str, Sequence[Span], Parallel]], title: str, small_print: str, predicted: bool = False
) -> Figure:
    """What each rank did when: a row a rank, a bar a sample (its number in it), a panel for each of `runs`.

    Args:
        runs: (caption, spans, layout) of each panel; all share the time axis.
        predicted: the bars are a schedule, not a measurement.
    """
    heights = [0.5 + 0.32 * layout.world_size for _, _, layout in runs]
    use_theme()
    figure, axes = plt.subplots(
        len(runs),
        1,
        figsize=(9, 1.1 + sum(heights)),
        layout="constrained",
        squeeze=False,
        sharex=True,
        gridspec_kw={"height_ratios": heights},
    )
    figure.suptitle(title, fontweight="bold", fontsize=11)
    figure.supxlabel(small_print, fontsize=6.5, color="#555555", x=0.01, ha="left")
    latest = max(span.end for _, spans, _ in runs for span in spans)
    for (caption, spans, layout), panel in zip(runs, axes[:, 0], strict=True):
        _draw_spans(panel, spans, layout, latest, predicted)
        panel.set_title(caption, fontsize=9, loc="left", fontweight="normal")
    axes[-1, 0].set_xlabel("seconds since the clock started")
    plt.close(figure)
    return figure


def _draw_spans(panel: Axes, spans: Sequence[Span], layout: Parallel, latest: float, predicted: bool) -> None:
    colour = COLOURS[axis_of(layout)]
    palette = sns.light_palette(colour, n_colors=100, as_cmap=True)
    for span in spans:
        face = palette((0.95 if span.sample % 2 == 0 else 0.5) * (0.6 if predicted else 1))
        bar = Rectangle((span.start, span.rank - 0.42), span.end - span.start, 0.84, facecolor=face, linewidth=0.8)
        bar.set_edgecolor("#333333" if predicted else "white")
        bar.set_linestyle("--" if predicted else "-")
        panel.add_patch(bar)
        if span.end - span.start > 0.015 * latest:
            ink = "white" if sum(face[:3]) < 1.5 else "black"
            middle = (span.start + span.end) / 2
            panel.text(middle, span.rank, str(span.sample), ha="center", va="center", fontsize=7, color=ink)
    panel.set_xlim(0, latest * 1.02)
    panel.set_ylim(layout.world_size - 0.4, -0.6)
    panel.set_yticks(range(layout.world_size), [f"rank {rank}" for rank in range(layout.world_size)], fontsize=7.5)
    panel.grid(axis="y", visible=False)
