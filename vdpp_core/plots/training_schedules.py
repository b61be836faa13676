"""Pipelines of layers beside the pipeline of denoising steps: what each rank computes when, and where samples hop."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from vdpp_core.plots.style import COLOURS, INK, name_rows, new_figure

_SHADES = sns.light_palette(COLOURS["pp"], n_colors=100, as_cmap=True)
LOOKS: dict[str, dict[str, Any]] = {  # kind of span -> its bar
    "forward": {"facecolor": _SHADES(0.25), "edgecolor": INK},
    "loss": {"facecolor": (0.6, 0.6, 0.6), "edgecolor": INK},
    "backward": {"facecolor": _SHADES(0.95), "edgecolor": INK},
    "input gradients": {"facecolor": _SHADES(0.6), "edgecolor": INK},
    "weight gradients": {"facecolor": (1, 1, 1), "edgecolor": INK, "hatch": "////"},
}


class Computed(Protocol):
    """A span of a rank, in seconds; `micro_batch` is a sample at inference, `chunk` a denoising step there."""

    kind: str
    begin: float
    end: float
    micro_batch: int
    chunk: int


class Panel(NamedTuple):
    """What the ranks of one pipeline did.

    Attributes:
        ranks: the spans of each rank; waits and messages are not drawn.
        followed: a micro-batch whose hops are drawn.
        primes: mark the chunks after the first with a prime each.
    """

    caption: str
    ranks: Sequence[Sequence[Computed]]
    followed: int | None = None
    primes: bool = True


def schedules(panels: Sequence[Panel], title: str, small_print: str, same_axis: bool = True) -> Figure:
    """A panel for each pipeline, with a row per rank and a numbered bar per micro-batch or sample, over seconds.

    Args:
        same_axis: all panels have the same time axis.
    """
    heights = [0.55 + 0.34 * len(panel.ranks) for panel in panels]
    options = {"sharex": same_axis, "gridspec_kw": {"height_ratios": heights}}
    figure, axes = new_figure((len(panels), 1), (9, 1.3 + 1.25 * sum(heights)), title, small_print, **options)
    latest = [_draw(ax, panel) for ax, panel in zip(axes[:, 0], panels, strict=True)]
    for panel, ax, own in zip(panels, axes[:, 0], latest, strict=True):
        ax.set_title(panel.caption, fontsize=9, loc="left", fontweight="normal")
        ax.set_xlim(0, 1.01 * (max(latest) if same_axis else own))
    axes[-1, 0].set_xlabel("time (s); white: waiting", loc="left", fontsize=8.5)
    kinds = {span.kind for panel in panels for spans in panel.ranks for span in spans}
    handles = [Patch(**look, label=kind) for kind, look in LOOKS.items() if kind in kinds]
    place: dict[str, Any] = {"loc": "upper right", "bbox_to_anchor": (1.0, -0.2), "borderaxespad": 0.0}
    axes[-1, 0].legend(handles=handles, ncols=len(handles), fontsize=7.5, frameon=False, **place)
    return figure


def _draw(ax: Axes, panel: Panel) -> float:
    """Draw a panel; the seconds from its first computation to its last."""
    drawn = [[span for span in spans if span.kind in LOOKS] for spans in panel.ranks]
    first = min(spans[0].begin for spans in drawn)
    latest = max(span.end for spans in drawn for span in spans) - first
    for rank, spans in enumerate(drawn):
        for span in spans:
            length, look = span.end - span.begin, LOOKS[span.kind]
            ax.add_patch(Rectangle((span.begin - first, rank - 0.4), length, 0.8, linewidth=0.6, **look))
            if length > 0.012 * latest:
                label = f"{span.micro_batch}{'′' * span.chunk * panel.primes}"
                ink = "white" if sum(look["facecolor"][:3]) < 1.5 else "black"
                middle = (span.begin + span.end) / 2 - first
                box = {"facecolor": look["facecolor"], "edgecolor": "none", "pad": 0.4}
                ax.text(middle, rank, label, ha="center", va="center", fontsize=6.5, color=ink, bbox=box)
    for (rank, begin), (other, end) in _hops(drawn, panel.followed):
        arrow = {"arrowstyle": "-|>", "color": "black", "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0}
        side = 0.4 if other > rank else -0.4
        ax.annotate("", (end - first, other - side), (begin - first, rank + side), arrowprops=arrow)
    name_rows(ax, (f"rank {rank}" for rank in range(len(drawn))), fontsize=7.5)
    return latest


def _hops(ranks: Sequence[Sequence[Computed]], followed: int | None) -> Iterator[tuple[tuple[int, float], ...]]:
    """Where a micro-batch goes from one rank to another: (rank, when computed there), (next rank, when taken up)."""
    visits = [
        (span.begin, rank, span.end)
        for rank, spans in enumerate(ranks)
        for span in spans
        if span.micro_batch == followed and span.kind not in ("loss", "weight gradients")
    ]
    for (_, rank, end), (begin, other, _) in itertools.pairwise(sorted(visits)):
        if rank != other:
            yield (rank, end), (other, begin)
