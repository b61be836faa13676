"""The figures: all of the data is inside the axes, axes have units, titles say what the data say."""

from __future__ import annotations

import io

import ipywidgets as widgets
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

import launch
from vdpp_core import Parallel
from vdpp_core.config import RunConfig
from vdpp_core.plots import gantt, scaling, style
from vdpp_core.predict import published, schedule
from vdpp_core.runs import metrics

PP, DP, ONE = Parallel(pp=2), Parallel(dp=2), Parallel()


def spans(layout: Parallel, samples: int = 6) -> list[metrics.Span]:
    sizes = [len(stage) for stage in RunConfig(total_steps=8, parallel=layout).stages()]
    return schedule.make(layout, sizes, samples, schedule.Seconds(0.1)).spans()


@pytest.fixture
def table() -> pd.DataFrame:
    """As `tables.table` gives it, of three runs computed by the schedule."""
    rows = []
    for layout in (ONE, PP, DP):
        numbers = metrics.numbers(spans(layout), layout)
        row = {"ranks": layout.world_size, "dp": layout.dp, "pp": layout.pp, "fsdp": layout.fsdp, "outcome": "ok"}
        for name in ("samples_per_s", "steady_state_samples_per_s"):
            row[name] = numbers[name]
        for name in ("latency_s", "interval_s"):
            row[name] = float(np.median(numbers[name]))
        rows.append(row | {f"predicted_{name}": 1.1 * row[name] for name in ("samples_per_s", "latency_s")})
    return pd.DataFrame(rows)


def title(figure) -> str:
    return figure.get_suptitle()


@pytest.mark.parametrize("predicted", [False, True])
@pytest.mark.parametrize("order", [(ONE, PP, DP), (DP, ONE), (PP,)])
def test_every_bar_of_a_gantt_chart_is_inside_its_panel(order, predicted):
    """Panels share the time axis, whichever of them is the longest."""
    figure = gantt.gantt([(str(layout), spans(layout), layout) for layout in order], "title", "source", predicted)
    for layout, panel in zip(order, figure.axes, strict=True):
        left, right = panel.get_xlim()
        bars = panel.patches
        assert len(bars) == len(spans(layout))
        assert all(left <= bar.get_x() and bar.get_x() + bar.get_width() <= right for bar in bars)
        assert [label.get_text() for label in panel.get_yticklabels()] == [
            f"rank {r}" for r in range(layout.world_size)
        ]
        assert {bar.get_linestyle() for bar in bars} == {"--" if predicted else "-"}
    assert "(s)" in figure.axes[-1].get_xlabel()
    assert figure.get_supxlabel() == "source"


def test_numbers_in_bars_stand_out_from_the_bars():
    """Readable in grey: black on light, white on dark."""
    figure = gantt.gantt([(str(layout), spans(layout), layout) for layout in (ONE, PP, DP)], "title", "source")
    for panel in figure.axes:
        for bar, text in zip(panel.patches, panel.texts, strict=True):
            grey = np.dot(bar.get_facecolor()[:3], [0.299, 0.587, 0.114])
            ink = {"black": 0.0, "white": 1.0}[text.get_color()]
            assert abs(grey - ink) > 0.35


@pytest.mark.parametrize("predicted", [False, True])
def test_decoding_is_hatched_and_in_the_legend(predicted):
    found = schedule.make(PP, [4, 4], 3, schedule.Seconds(0.1, decode=0.3)).spans()
    (panel,) = gantt.gantt([("pp 2", found, PP)], "title", "source", predicted).axes
    hatched = [bar for bar in panel.patches if bar.get_hatch()]
    ends = [span.end for span in found if span.rank == 1 and not span.beside]
    assert [bar.get_x() for bar in hatched] == pytest.approx(ends)
    assert [bar.get_width() for bar in hatched] == pytest.approx([0.3] * 3)
    assert len(panel.texts) == len(panel.patches) - 3  # the others are numbered
    assert [text.get_text() for text in panel.get_legend().get_texts()] == ["decoding"]
    (without,) = gantt.gantt([("pp 2", spans(PP), PP)], "title", "source", predicted).axes
    assert without.get_legend() is None


def test_axes_differ_in_grey_or_marker():
    greys = [np.dot(to_rgb(colour), [0.299, 0.587, 0.114]) for colour in style.COLOURS.values()]
    assert len(set(style.MARKERS.values())) == len(style.COLOURS)
    assert abs(greys[list(style.COLOURS).index("pp")] - greys[list(style.COLOURS).index("dp")]) > 0.2


def test_throughput_says_what_the_table_says(table):
    figure = scaling.throughput(table, published.figures(), "source")
    rates = table.set_index(["pp", "dp"])["samples_per_s"]
    assert f"{rates[2, 1] / rates[1, 2]:.2f} ×" in title(figure)
    left, right = figure.axes
    assert {"number of ranks"} == {left.get_xlabel(), right.get_xlabel()}
    assert {"throughput (samples/s)"} == {left.get_ylabel(), right.get_ylabel()}
    lines = {line.get_label(): line for line in right.lines}
    known = lines["step pipeline, without fill"]
    assert list(known.get_ydata()) == [0.118, 0.234, 0.49, 0.855]
    assert known.get_markerfacecolor() == "white"
    counted = lines["step pipeline, with fill (computed)"]
    assert counted.get_linestyle() == "--"
    assert counted.get_ydata()[2] == pytest.approx(14 / (8.49 + 13 / 0.490))


def test_scaling_efficiency_is_relative_to_one_rank(table):
    figure = scaling.scaling_efficiency(table, published.figures(), "source")
    data_parallel = next(line for line in figure.axes[0].lines if "data parallel" in line.get_label())
    assert list(data_parallel.get_ydata()) == pytest.approx([1.0, 1.0])
    assert "100% (data parallel)" in title(figure)


def test_latency_and_interval_are_two_lines(table):
    figure = scaling.latency(table, published.figures(), "source")
    labels = [line.get_label() for line in figure.axes[0].lines]
    assert any("interval" in label for label in labels)
    assert any("latency" in label for label in labels)
    assert "divide the interval by 2.0" in title(figure)
    assert "the latency of a sample by 1.00" in title(figure)


@pytest.mark.parametrize("draw", [scaling.throughput, scaling.latency, scaling.scaling_efficiency])
def test_a_prediction_stands_beside_each_measurement(table, draw):
    lines = draw(table, published.figures(), "source").axes[0].lines
    dashed = [line for line in lines if line.get_label() == "the same, predicted"]
    solid = [line for line in lines if line.get_label().startswith(("step pipeline (pp)", "data parallel (dp)"))]
    solid = [line for line in solid if line.get_linestyle() == "-"]
    assert len(dashed) == len(solid) == 2
    ratio = 1.0 if draw is scaling.scaling_efficiency else 1.1  # relative to one rank's own
    for predicted, measured in zip(dashed, solid, strict=True):
        assert predicted.get_linestyle() == "--"
        assert predicted.get_color() == measured.get_color()
        assert list(predicted.get_ydata()) == pytest.approx([ratio * value for value in measured.get_ydata()])


def test_failed_runs_are_not_drawn(table):
    failed = table.assign(outcome="failed", samples_per_s=99.0)
    figure = scaling.throughput(pd.concat([table, failed]), published.figures(), "source")
    assert max(max(line.get_ydata()) for line in figure.axes[0].lines if len(line.get_ydata())) < 99


def test_the_speeds_of_loading_that_favour_stages_are_shaded_and_others_marked():
    lines = [("40 steps", pd.Series({0.1: 3.0, 1.0: 1.0, 10.0: 0.7})), ("4 steps", pd.Series({0.1: 20.0, 10.0: 1.1}))]
    (panel,) = scaling.loading(lines, {"disk, assumed": 3.0}, "a title", "small print").axes
    lowest, highest = panel.get_ylim()
    assert lowest < 0.7
    assert highest > 20
    assert "GB/s" in panel.get_xlabel()
    assert [text.get_text() for text in panel.texts] == ["disk, assumed"]
    assert len({line.get_marker() for line in panel.lines[:2]}) == 2


def test_sliders_redraw_the_figure_when_moved():
    def draw(ranks: int):
        layout = Parallel(pp=ranks)
        return gantt.gantt([("pp", spans(layout), layout)], f"{ranks} ranks", "source", predicted=True)

    control = widgets.IntSlider(2, 1, 8, continuous_update=False)
    *_, picture = launch.sliders(draw, ranks=control).children
    seen = {picture.value}
    for control.value in (1, 8):
        assert Image.open(io.BytesIO(picture.value)).width > 500
        seen.add(picture.value)
    assert len(seen) == 3
