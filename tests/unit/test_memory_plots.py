"""Figures of memory: what is drawn is what the table says."""

from __future__ import annotations

import pandas as pd
import pytest
from matplotlib import colors

from vdpp_core.plots import peak_memory
from vdpp_core.predict.replay import PARTS


@pytest.fixture
def rows() -> pd.DataFrame:
    parts = {"parameters_gb": [3.0, 0.5], "activations_gb": [20.0, 20.0], "gathered_gb": [0.0, 0.1], "latents_gb": 0.1}
    more = {
        "needed_gb": [26.0, 22.0],
        "capacity_gb": 25.0,
        "measured_gb": [float("nan"), 20.5],
        "outcome": ["oom", "ok"],
    }
    return pd.DataFrame(parts | more, index=["one rank", "sharded"])


def test_bars_are_the_parts_and_what_is_allowed_for(rows):
    panel = peak_memory.peaks(rows, "title", "source").axes[0]
    bars = [[(bar.get_x(), bar.get_width()) for bar in container] for container in panel.containers]
    assert len(bars) == len(PARTS) + 1
    for position, name in enumerate(rows.index):
        ends = [bar[position][0] + bar[position][1] for bar in bars]
        assert ends[-1] == pytest.approx(rows["needed_gb"][name])
        assert ends[-2] == pytest.approx(rows.loc[name, [f"{part}_gb" for part in PARTS]].astype(float).sum())


def test_published_is_hollow_measured_is_filled_and_the_end_is_marked(rows):
    for kind, face in (("published", "white"), ("measured", "black")):
        lines = {line.get_label(): line for line in peak_memory.peaks(rows, "title", "source", kind).axes[0].lines}
        assert list(lines[kind].get_xdata()) == [20.5]
        assert list(lines[kind].get_ydata()) == [1]
        assert lines[kind].get_markerfacecolor() == face
        assert list(lines["ran out of memory"].get_ydata()) == [0]


def test_a_table_with_predictions_only(rows):
    bare = rows[[f"{part}_gb" for part in PARTS]]
    panel = peak_memory.peaks(bare, "title", "source").axes[0]
    assert len(panel.containers) == len(PARTS)
    assert [label.get_text() for label in panel.get_yticklabels()] == ["one rank", "sharded"]


def test_parts_are_told_apart_in_grey(rows):
    large = ("parameters", "activations", "gathered")
    greys = [colors.to_rgb(peak_memory.FACES[part]) @ pd.Series([0.299, 0.587, 0.114]).to_numpy() for part in large]
    assert min(abs(a - b) for a, b in ((greys[0], greys[1]), (greys[1], greys[2]), (greys[0], greys[2]))) > 0.08
    assert len({peak_memory.HATCHES[part] for part in PARTS}) == len(PARTS)
