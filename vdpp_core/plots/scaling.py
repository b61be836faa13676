"""Throughput, latency and makespan over ranks and layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vdpp_core.config.layout import Parallel
from vdpp_core.plots.style import COLOURS, MARKERS, NAMES, axis_of, new_figure


def _line(panel: Axes, series: pd.Series, axis: str, kind: str, label: str) -> None:
    """One series over its index; kind is measured, published or predicted."""
    colour = COLOURS[axis]
    panel.plot(
        series.index.to_numpy(),
        series.to_numpy(),
        color=colour,
        marker=MARKERS[axis],
        markersize=7,
        linestyle="--" if kind == "predicted" else "-",
        markerfacecolor=colour if kind == "measured" else "white",
        markeredgecolor=colour,
        label=label,
    )


def _dotted(panel: Axes, series: pd.Series, axis: str, label: str) -> None:
    """A second number of the same runs, beside the one that `_line` shows."""
    x, y = series.index.to_numpy(), series.to_numpy()
    panel.plot(x, y, color=COLOURS[axis], linestyle=":", marker=".", label=label)


def _series(table: pd.DataFrame, axis: str, column: str) -> pd.Series:
    """A column's median over repeats against the ranks, for pure layouts of one axis; one rank belongs to both."""
    pure = table[(table[axis] == table["ranks"]) & ~table["fsdp"] & (table["outcome"] == "ok")]
    return pure.groupby("ranks")[column].median().dropna()


def _side_by_side(title: str, small_print: str, published: dict[str, Any]) -> tuple[Figure, Axes, Axes]:
    """Measured here left, published right."""
    both = f"{small_print}\nPublished: {published['hardware']}, {published['software']}, {published['date']}"
    figure, axes = new_figure((1, 2), (10, 4.2), title, both)
    return figure, axes[0, 0], axes[0, 1]


def _published_rates(published: dict[str, Any]) -> dict[str, pd.Series]:
    """Samples per second against GPUs: pp and dp as published, pp_with_fill with the fill that pp leaves out."""
    experiment = published["pipeline_vs_data_parallel"]
    rows, samples = pd.DataFrame(experiment["svd_fp16"]).set_index("world_size"), experiment["num_samples"]
    makespan = rows["pipeline_avg_s"][1] + (samples - 1) / rows["pipeline_samples_per_s"]
    return {
        "pp": rows["pipeline_samples_per_s"],
        "dp": rows["data_samples_per_s"],
        "pp_with_fill": samples / makespan,
    }


def _draw_published(panel: Axes, rates: dict[str, pd.Series]) -> None:
    _line(panel, rates["pp"], "pp", "published", "step pipeline, fill left out")
    _line(panel, rates["dp"], "dp", "published", "data parallel, all counted")
    _line(panel, rates["pp_with_fill"], "pp", "predicted", "step pipeline, fill counted (computed)")


def throughput(table: pd.DataFrame, published: dict[str, Any], small_print: str) -> Figure:
    """Samples per second against ranks: this machine left, the published A5000 right.

    Args:
        table: of `vdpp_core.compare.tables.table`, with one rank and both pure layouts on the same numbers of ranks.
        published: of `vdpp_core.predict.published.figures`.
    """
    pp, dp = (_series(table, axis, "samples_per_s") for axis in ("pp", "dp"))
    most = max(pp.index)
    title = (
        f"{most} ranks, fill counted: the step pipeline gives {pp[most] / dp[most]:.2f} × data parallel's throughput"
    )
    figure, left, right = _side_by_side(title, small_print, published)
    for axis, series in (("pp", pp), ("dp", dp)):
        _line(left, series, axis, "measured", f"{NAMES[axis]}, fill counted")
        _line(left, _series(table, axis, "predicted_samples_per_s"), axis, "predicted", "the same, predicted")
        _dotted(left, _series(table, axis, "steady_state_samples_per_s"), axis, f"{NAMES[axis]}, steady state")
    left.set_title("measured here", fontsize=9)
    _draw_published(right, _published_rates(published))
    right.set_title("published: SVD 14 × 40 × 72, 14 samples of 28 steps", fontsize=9)
    for panel in (left, right):
        _finish(panel, "samples per second")
    return figure


def scaling_efficiency(table: pd.DataFrame, published: dict[str, Any], small_print: str) -> Figure:
    """Throughput a rank relative to one rank's: 1 is ideal."""
    pp, dp = (_series(table, axis, "samples_per_s") for axis in ("pp", "dp"))
    most = max(pp.index)
    shares = f"{pp[most] / pp[1] / most:.0%} (step pipeline) and {dp[most] / dp[1] / most:.0%} (data parallel)"
    title = f"{most} ranks reach {shares} of {most} × one rank, fill counted"
    figure, left, right = _side_by_side(title, small_print, published)
    for axis, series in (("pp", pp), ("dp", dp)):
        _line(left, series / series[1] / series.index, axis, "measured", f"{NAMES[axis]}, fill counted")
        foretold = _series(table, axis, "predicted_samples_per_s")
        _line(left, foretold / foretold[1] / foretold.index, axis, "predicted", "the same, predicted")
    left.set_title("measured here", fontsize=9)
    rates = _published_rates(published)
    _draw_published(right, {name: rate / rate[1] / rate.index for name, rate in rates.items()})
    right.set_title("published: above 1 only where the fill is left out", fontsize=9)
    for panel in (left, right):
        panel.axhline(1, color="#333333", linewidth=0.8, linestyle=":")
        _finish(panel, "throughput / (ranks × one rank's)")
    return figure


def latency(table: pd.DataFrame, published: dict[str, Any], small_print: str) -> Figure:
    """Latency and interval, which are different numbers, against ranks: this machine left, published right."""
    latencies, intervals = (_series(table, "pp", column) for column in ("latency_s", "interval_s"))
    most = max(latencies.index)
    title = (
        f"{most} stages divide the interval by {intervals[1] / intervals[most]:.1f}, "
        f"the latency of a sample by {latencies[1] / latencies[most]:.2f}"
    )
    figure, left, right = _side_by_side(title, small_print, published)
    for axis in ("pp", "dp"):
        _line(left, _series(table, axis, "latency_s"), axis, "measured", f"{NAMES[axis]}: latency")
        _line(left, _series(table, axis, "predicted_latency_s"), axis, "predicted", "the same, predicted")
    _dotted(left, intervals, "pp", "step pipeline: interval")
    left.set_title("measured here", fontsize=9)
    rows = pd.DataFrame(published["throughput_cfg3_14x72x128"]["rows"]).set_index("world_size")
    _line(right, rows["first_sample_time_s"], "pp", "published", "step pipeline: first sample after")
    _dotted(right, rows["avg_sample_time_s"], "pp", "step pipeline: interval")
    right.set_title("published: SVD 14 × 72 × 128, 28 steps", fontsize=9)
    for panel in (left, right):
        _finish(panel, "seconds")
    return figure


def link(probe: pd.DataFrame, hop_bytes: int, small_print: str) -> Figure:
    """Seconds one way between two ranks against the size of the message; `hop_bytes` is what one hand-off moves."""
    nearest = probe.iloc[(probe["bytes"] - hop_bytes).abs().argmin()]
    hop = nearest["seconds"] * hop_bytes / nearest["bytes"]
    title = f"Handing one latent on ({hop_bytes / 1e6:.2f} MB) takes about {hop * 1000:.2f} ms here"
    figure, axes = new_figure((1, 1), (7, 3.6), title, small_print)
    panel = axes[0, 0]
    panel.loglog(probe["bytes"], probe["seconds"] * 1000, color=COLOURS["pp"], marker=MARKERS["pp"], label="measured")
    panel.axvline(hop_bytes, color="#333333", linestyle=":", label="one latent of SVD, 14 × 72 × 128, fp16")
    panel.set_xlabel("bytes")
    panel.set_ylabel("ms, one way")
    panel.legend(fontsize=7.5)
    return figure


def makespans(layouts: Sequence[tuple[Parallel, pd.Series]], title: str, small_print: str) -> Figure:
    """Predicted makespan against the number of samples, a line for each layout (a Series over num_samples)."""
    figure, axes = new_figure((1, 1), (8, 4), title, small_print)
    for layout, seconds in layouts:
        axis = axis_of(layout)
        _line(axes[0, 0], seconds, axis, "predicted", f"{NAMES[axis]} on {layout.world_size}, predicted")
    _finish(axes[0, 0], "makespan (s)", "samples")
    return figure


def _finish(panel: Axes, ylabel: str, xlabel: str = "ranks") -> None:
    panel.set_xlabel(xlabel)
    panel.set_ylabel(ylabel)
    panel.set_ylim(0, panel.dataLim.y1 * 1.08)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.legend(fontsize=7.5)
