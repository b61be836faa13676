"""The figures of plans say what the advice and the schedule say."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb

from tests.unit.test_advice import Simple
from vdpp_core import Parallel, RunConfig
from vdpp_core.plots import plan_overview
from vdpp_core.plots.style import COLOURS
from vdpp_core.predict import planner, schedule
from vdpp_core.predict.rates import Link, Rates

CONFIG = RunConfig(model="svd", random_weights=True, device="cuda", num_samples=6, latent_shape=(1, 4, 14, 72, 128))
KNOWN = Rates(1e12, Link(1e9))


def plan(chosen: Parallel, capacity_gib: float = 24, **more):
    table, spans = planner.look(CONFIG, chosen, 4, "latency", KNOWN, capacity_gib, Simple(), **more)
    return table, spans, plan_overview.planner(table, chosen, spans, capacity_gib, "title", "source")


def test_the_chosen_layout_is_drawn_rank_by_rank():
    _, spans, figure = plan(Parallel(frames=2))
    panel = figure.axes[0]
    assert len(panel.patches) == len(spans) == 2 * 6
    assert panel.get_xlim()[1] >= max(span.end for span in spans)
    assert [label.get_text() for label in panel.get_yticklabels()] == ["rank 0", "rank 1"]
    assert {text.get_text() for text in panel.texts} == {str(sample) for sample in range(6)}
    assert "(s)" in panel.get_xlabel()
    assert {bar.get_linestyle() for bar in panel.patches} == {"--"}
    assert figure.get_suptitle() == "title"


def test_two_videos_in_turn_differ_in_grey():
    _, _, figure = plan(Parallel(dp=1))
    even, odd = (np.mean(bar.get_facecolor()[:3]) for bar in figure.axes[0].patches[:2])
    assert abs(even - odd) > 0.1


def test_a_layout_that_cannot_be_says_so_in_its_place():
    _, words, figure = plan(Parallel(dp=3, pp=2))
    assert words == "layout dp 3 × pp 2: needs 6 GPUs, but only 4 are available"
    assert figure.axes[0].texts[0].get_text() == words
    assert not figure.axes[0].axison


def test_bars_are_those_of_the_best_layouts_and_of_the_chosen_one():
    table, _, figure = plan(Parallel(pp=4))
    shown = [label.get_text() for label in figure.axes[1].get_yticklabels()]
    assert shown[: plan_overview.SHOWN] == table["layout"][: plan_overview.SHOWN].tolist()
    assert shown[-1] == "pp 4"
    for panel, column in zip(figure.axes[1:], ("latency_s", "makespan_s", "needed_gib"), strict=True):
        widths = [bar.get_width() for bar in panel.patches]
        values = [table[column][table["layout"] == layout].item() for layout in shown]
        assert [width for width, value in zip(widths, values, strict=True) if not math.isnan(value)] == pytest.approx(
            [value for value in values if not math.isnan(value)]
        )
        assert [bool(bar.get_hatch()) for bar in panel.patches] == [layout == "pp 4" for layout in shown]
    first = figure.axes[1].patches[0].get_facecolor()[:3]
    assert first == pytest.approx(to_rgb(COLOURS["frames"]))
    assert any(line.get_xdata()[0] == 24 for line in figure.axes[3].lines)


def test_the_advice_is_written_below():
    table, _, figure = plan(Parallel())
    words = next(text.get_text() for text in figure.texts if "layout" in text.get_text())
    lines = [line for line in words.splitlines() if not line.startswith(" " * 20)]  # without those that go on
    assert len(lines) == 1 + plan_overview.SHOWN + 1  # heading, the best, and the chosen one, which does not fit
    assert table["layout"][0] in lines[1]
    assert table["reason"][0][:30] in lines[1]
    assert "needs" in lines[-1]
    assert max(map(len, lines)) <= plan_overview.WIDTH


def test_where_nothing_fits_it_says_so():
    table, words, figure = plan(Parallel(), capacity_gib=1.5)
    assert table["place"].isna().all()
    assert isinstance(words, list)  # its schedule is shown all the same
    table, words, figure = plan(Parallel(), capacity_gib=0.1)
    assert words.startswith("capacity_gib 0.1: must be above the parameters of a rank")
    assert any("No layout fits" in text.get_text() for text in figure.texts)


def test_of_videos_that_arrive_one_by_one_the_time_from_arrival_counts():
    table, _, figure = plan(Parallel(dp=2, frames=2), arrivals=schedule.poisson(6, 5.0, 0))
    assert "from arrival" in figure.axes[1].get_xlabel()
    assert table["response_s"][table["place"].notna()].is_monotonic_increasing
    assert (table["response_s"] >= table["latency_s"] - 1e-9).dropna()[table["place"].notna()].all()


def test_predictions_stand_against_measurements():
    rows = []
    for number, (layout, error) in enumerate([(Parallel(), 0.0), (Parallel(pp=2), 0.05), (Parallel(dp=2), -0.2)]):
        row = {"run": str(number), **layout.model_dump(), "calibrated on": number == 0}
        for name, value in (("makespan", 10.0 + number), ("latency", 2.0)):
            row |= {f"{name}_s": value, f"predicted_{name}_s": value * (1 + error)}
        rows.append(row)
    figure = plan_overview.against_measured(pd.DataFrame(rows), "title", "source")
    for panel, name in zip(figure.axes, ("makespan", "latency"), strict=True):
        points = sorted(tuple(point) for scatter in panel.collections[1:] for point in scatter.get_offsets())
        known = sorted((row[f"{name}_s"], row[f"predicted_{name}_s"]) for row in rows)
        assert np.array(points) == pytest.approx(np.array(known))
        assert name in panel.get_xlabel()
        assert "(s)" in panel.get_ylabel()
    labels = [text.get_text() for text in figure.axes[1].get_legend().get_texts()]
    assert labels == ["within 15%", "one rank, calibrated on", "step pipeline (pp)", "data parallel (dp)"]


def test_reasons_are_written_in_full_and_the_place_of_the_chosen_layout_in_words():
    table, _, figure = plan(Parallel(pp=4), capacity_gib=30)
    long = "because " * 60
    changed = table.assign(reason=long)
    drawn = plan_overview.planner(changed, Parallel(pp=4), "no spans", 24, "title", "source")
    words = next(text.get_text() for text in drawn.texts if "because" in text.get_text())
    assert words.count("because") == 60 * (plan_overview.SHOWN + 1)
    assert max(map(len, words.splitlines())) <= plan_overview.WIDTH
    assert drawn.get_figheight() > figure.get_figheight()
    place, best = table["place"][table["layout"] == "pp 4"].item(), table["layout"][0]
    assert planner.place_of(Parallel(pp=4), table) == f"pp 4 is number {place}, {best} is best"
    assert planner.place_of(Parallel(dp=9), table) == f"dp 9 is excluded, {best} is best"
    nothing, _, _ = plan(Parallel(pp=4), capacity_gib=0.001)
    assert planner.place_of(Parallel(pp=4), nothing) == "pp 4: nothing fits"
