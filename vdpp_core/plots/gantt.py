"""Gantt charts: what each rank does when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from vdpp_core.config.layout import Parallel
from vdpp_core.plots.style import COLOURS, INK, axis_of, name_rows, new_figure
from vdpp_core.runs.metrics import Span

SECONDS = "time since the clock started (s)"
HATCHES = {"decoding": "////", "encoding": "....", "swapping": "xxxx"}


def gantt(
    runs: Sequence[tuple[str, Sequence[Span], Parallel]], title: str, small_print: str, predicted: bool = False
) -> Figure:
    """What each rank does when: a row per rank, a numbered bar per sample, a hatched one while it is decoded or experts
    are swapped, a panel per run, over seconds.

    Args:
        runs: (caption, spans, layout) of each panel; all share the time axis.
        predicted: the bars are a schedule, not a measurement.
    """
    heights = [0.5 + 0.32 * layout.world_size for _, _, layout in runs]
    options = {"sharex": True, "gridspec_kw": {"height_ratios": heights}}
    figure, axes = new_figure((len(runs), 1), (9, 1.1 + sum(heights)), title, small_print, **options)
    latest = max(span.end for _, spans, _ in runs for span in spans)
    for (caption, spans, layout), panel in zip(runs, axes[:, 0], strict=True):
        draw_spans(panel, spans, layout, latest, predicted)
        panel.set_title(caption, fontsize=9, loc="left", fontweight="normal")
    axes[-1, 0].set_xlabel(SECONDS)
    return figure


def draw_spans(panel: Axes, spans: Sequence[Span], layout: Parallel, latest: float, predicted: bool) -> None:
    """Draw spans as bars, a row per rank, two shades in turn, up to `latest` seconds; what is no step is hatched."""
    palette = sns.light_palette(COLOURS[axis_of(layout)], n_colors=100, as_cmap=True)
    edge, style = (INK, "--") if predicted else ("white", "-")
    hatched: dict[str, dict[str, Any]] = {
        what: {"facecolor": "white", "edgecolor": INK, "hatch": hatch, "label": what}
        for what, hatch in HATCHES.items()
        if any(span.beside == what for span in spans)
    }
    if hatched:
        look: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "fontsize": 7, "frameon": False}
        panel.legend(
            handles=[Patch(**each) for each in hatched.values()], ncols=len(hatched), borderaxespad=0.2, **look
        )
    for span in spans:
        face = palette((0.95 if span.sample % 2 == 0 else 0.5) * (0.6 if predicted else 1))
        look = hatched[span.beside] if span.beside else {"facecolor": face, "edgecolor": edge}
        place = (span.start, span.rank - 0.42), span.end - span.start, 0.84
        panel.add_patch(Rectangle(*place, linestyle=style, linewidth=0.8, **look))
        if span.end - span.start > 0.015 * latest and not span.beside:
            ink = "white" if sum(face[:3]) < 1.5 else "black"
            middle = (span.start + span.end) / 2
            panel.text(middle, span.rank, str(span.sample), ha="center", va="center", fontsize=7, color=ink)
    panel.set_xlim(0, latest * 1.02)
    name_rows(panel, (f"rank {rank}" for rank in range(layout.world_size)), fontsize=7.5)
