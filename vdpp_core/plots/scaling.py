"""Figures of throughput, latency and makespan against ranks and samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from vdpp_core.config.layout import Parallel
from vdpp_core.plots.style import COLOURS, INK, MARKERS, NAMES, axis_of, new_figure, with_errors


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
    """A second number of the runs that `_line` shows."""
    x, y = series.index.to_numpy(), series.to_numpy()
    panel.plot(x, y, color=COLOURS[axis], linestyle=":", marker=".", label=label)


def _series(table: pd.DataFrame, axis: str, column: str) -> pd.Series:
    """A column's median over repeats against the ranks, for pure layouts of one axis; one rank belongs to both."""
    pure = table[(table[axis] == table["ranks"]) & ~table["fsdp"] & (table["outcome"] == "ok")]
    return pure.groupby("ranks")[column].median().dropna()


def _side_by_side(
    title: str, small_print: str, published: dict[str, Any], published_title: str
) -> tuple[Figure, Axes, Axes]:
    """A panel for measurements on the left, one for published figures on the right."""
    both = f"{small_print}\nPublished: {published['hardware']}, {published['software']}, {published['date']}"
    figure, axes = new_figure((1, 2), (10, 4.2), title, both)
    axes[0, 0].set_title("measured here", fontsize=9)
    axes[0, 1].set_title(published_title, fontsize=9)
    return figure, axes[0, 0], axes[0, 1]


def _beside_prediction(panel: Axes, measured: pd.Series, predicted: pd.Series, axis: str, label: str) -> None:
    _line(panel, measured, axis, "measured", f"{NAMES[axis]}: {label}")
    _line(panel, predicted, axis, "predicted", "the same, predicted")


def _published_rates(published: dict[str, Any]) -> dict[str, pd.Series]:
    """Samples per second against GPUs: pp and dp as published, and pp_with_fill with the fill that pp leaves out."""
    experiment = published["pipeline_vs_data_parallel"]
    rows, samples = pd.DataFrame(experiment["svd_fp16"]).set_index("world_size"), experiment["num_samples"]
    makespan = rows["pipeline_avg_s"][1] + (samples - 1) / rows["pipeline_samples_per_s"]
    return {
        "pp": rows["pipeline_samples_per_s"],
        "dp": rows["data_samples_per_s"],
        "pp_with_fill": samples / makespan,
    }


def _draw_published(panel: Axes, rates: dict[str, pd.Series]) -> None:
    _line(panel, rates["pp"], "pp", "published", "step pipeline, without fill")
    _line(panel, rates["dp"], "dp", "published", "data parallel, whole run")
    _line(panel, rates["pp_with_fill"], "pp", "predicted", "step pipeline, with fill (computed)")


def throughput(table: pd.DataFrame, published: dict[str, Any], small_print: str) -> Figure:
    """Samples per second against ranks: this machine on the left, the published A5000 on the right.

    Args:
        table: as of `vdpp_core.compare.tables.table`, with one rank and both pure layouts on the same numbers of ranks.
        published: as of `vdpp_core.predict.published.figures`.
    """
    pp, dp = (_series(table, axis, "samples_per_s") for axis in ("pp", "dp"))
    most = max(pp.index)
    title = f"On {most} ranks, with fill, the step pipeline has {pp[most] / dp[most]:.2f} × data parallel's throughput"
    right_title = "published: SVD 14 × 40 × 72, 14 samples of 28 steps"
    small_print = with_errors(small_print, table["predicted_samples_per_s"], table["samples_per_s"])
    figure, left, right = _side_by_side(title, small_print, published, right_title)
    for axis, series in (("pp", pp), ("dp", dp)):
        _beside_prediction(left, series, _series(table, axis, "predicted_samples_per_s"), axis, "whole run")
        _dotted(left, _series(table, axis, "steady_state_samples_per_s"), axis, f"{NAMES[axis]}: steady state")
    _draw_published(right, _published_rates(published))
    for panel in (left, right):
        _finish(panel, "throughput (samples/s)")
    return figure


def scaling_efficiency(table: pd.DataFrame, published: dict[str, Any], small_print: str) -> Figure:
    """Throughput per rank relative to that of one rank, against ranks; 1 is ideal.

    Args:
        table: as of `throughput`.
        published: as of `throughput`.
    """
    pp, dp = (_series(table, axis, "samples_per_s") for axis in ("pp", "dp"))
    most = max(pp.index)
    shares = f"{pp[most] / pp[1] / most:.0%} (step pipeline) and {dp[most] / dp[1] / most:.0%} (data parallel)"
    title = f"Scaling efficiency on {most} ranks, with fill: {shares}"
    right_title = "published: above 1 only without the fill"
    small_print = with_errors(small_print, table["predicted_samples_per_s"], table["samples_per_s"])
    figure, left, right = _side_by_side(title, small_print, published, right_title)
    for axis, series in (("pp", pp), ("dp", dp)):
        predicted = _series(table, axis, "predicted_samples_per_s")
        measured, predicted = map(_per_rank, (series, predicted))
        _beside_prediction(left, measured, predicted, axis, "whole run")
    _draw_published(right, {name: _per_rank(rate) for name, rate in _published_rates(published).items()})
    for panel in (left, right):
        panel.axhline(1, color=INK, linewidth=0.8, linestyle=":")
        _finish(panel, "scaling efficiency (1 is ideal)")
    return figure


def _per_rank(rate: pd.Series) -> pd.Series:
    """A rate relative to that of one rank, per rank; nothing where there is none of one rank."""
    return rate / rate.get(1, float("nan")) / rate.index


def latency(table: pd.DataFrame, published: dict[str, Any], small_print: str) -> Figure:
    """Latency and interval, which are different numbers, in seconds against ranks: measured left, published right.

    Args:
        table: as of `throughput`.
        published: as of `throughput`.
    """
    latencies, intervals = (_series(table, "pp", column) for column in ("latency_s", "interval_s"))
    most = max(latencies.index)
    title = (
        f"{most} stages divide the interval by {intervals[1] / intervals[most]:.1f}, "
        f"the latency of a sample by {latencies[1] / latencies[most]:.2f}"
    )
    right_title = "published: SVD 14 × 72 × 128, 28 steps"
    small_print = with_errors(small_print, table["predicted_latency_s"], table["latency_s"])
    figure, left, right = _side_by_side(title, small_print, published, right_title)
    for axis in ("pp", "dp"):
        measured, predicted = (_series(table, axis, column) for column in ("latency_s", "predicted_latency_s"))
        _beside_prediction(left, measured, predicted, axis, "latency")
    _dotted(left, intervals, "pp", "step pipeline: interval")
    rows = pd.DataFrame(published["throughput_cfg3_14x72x128"]["rows"]).set_index("world_size")
    _line(right, rows["first_sample_time_s"], "pp", "published", "step pipeline: time to first sample")
    _dotted(right, rows["avg_sample_time_s"], "pp", "step pipeline: interval")
    for panel in (left, right):
        _finish(panel, "time (s)")
    return figure


def link(probe: pd.DataFrame, hop_bytes: int, small_print: str) -> Figure:
    """One-way time between two ranks in ms against the size of the message in bytes.

    Args:
        probe: columns bytes and seconds, as of `launch.probe`.
        hop_bytes: size of one hand-off.
    """
    nearest = probe.iloc[(probe["bytes"] - hop_bytes).abs().argmin()]
    hop = nearest["seconds"] * hop_bytes / nearest["bytes"]
    title = f"A hand-off of one latent ({hop_bytes / 1e6:.2f} MB) takes about {hop * 1000:.2f} ms here"
    figure, axes = new_figure((1, 1), (7, 3.6), title, small_print)
    panel = axes[0, 0]
    panel.loglog(probe["bytes"], probe["seconds"] * 1000, color=COLOURS["pp"], marker=MARKERS["pp"], label="measured")
    panel.axvline(hop_bytes, color=INK, linestyle=":", label="one latent of SVD, 14 × 72 × 128, fp16")
    panel.set_xlabel("message size (bytes)")
    panel.set_ylabel("one-way time (ms)")
    panel.legend(fontsize=7.5)
    return figure


def makespans(layouts: Sequence[tuple[Parallel, pd.Series]], title: str, small_print: str) -> Figure:
    """Predicted makespan in seconds against the number of samples.

    Args:
        layouts: each with its makespans, a Series over num_samples.
    """
    figure, axes = new_figure((1, 1), (8, 4), title, small_print)
    for layout, seconds in layouts:
        axis = axis_of(layout)
        _line(axes[0, 0], seconds, axis, "predicted", f"{layout}, predicted")
    _finish(axes[0, 0], "makespan (s)", "number of samples")
    return figure


def loading(
    lines: Sequence[tuple[str, pd.Series]], speeds: Mapping[str, float], title: str, small_print: str
) -> Figure:
    """Time of replicas that load experts, as a multiple of the step pipeline's, against the speed of loading.

    Args:
        lines: (name, multiples over GB/s) of each; at most five.
        speeds: name -> GB/s to mark.
    """
    figure, axes = new_figure((1, 1), (8, 4.2), title, small_print)
    panel = axes[0, 0]
    for (name, multiples), axis in zip(lines, COLOURS, strict=False):
        _line(panel, multiples, axis, "predicted", name)
    panel.axhline(1, color=INK, linewidth=1)
    panel.axhspan(1, 1e6, color="#eeeeee", zorder=0)
    least, most = (pick(float(pick(multiples)) for _, multiples in lines) for pick in (min, max))
    panel.set(xscale="log", yscale="log", xlabel="speed of loading an expert (GB/s)", ylim=(least / 1.3, most * 1.3))
    for name, gb_per_s in speeds.items():
        panel.axvline(gb_per_s, color=INK, linewidth=0.8, linestyle=":")
        words = {"rotation": 90, "ha": "right", "va": "top", "fontsize": 7.5}
        panel.text(gb_per_s, 0.62, name, transform=panel.get_xaxis_transform(), **words)
    panel.set_ylabel("time of replicas / time of stages")
    panel.set_title("grey: the step pipeline finishes first", fontsize=9, loc="left", fontweight="normal")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.xaxis.set_major_formatter("{x:g}")
    panel.legend(fontsize=7.5, loc="upper right")
    return figure


def _finish(panel: Axes, ylabel: str, xlabel: str = "number of ranks") -> None:
    panel.set_xlabel(xlabel)
    panel.set_ylabel(ylabel)
    panel.set_ylim(0, panel.dataLim.y1 * 1.08)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.legend(fontsize=7.5)
