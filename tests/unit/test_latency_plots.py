"""Figures of latency: what is drawn is what the table says."""

from __future__ import annotations

import pandas as pd
import pytest

from vdpp_core.plots import one_video


@pytest.fixture
def rows() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "axis": ["1 rank", "frames"],
            "predicted_s": [10.0, 6.0],
            "predicted_gb": [8.0, 4.5],
            "known_s": [11.0, float("nan")],
            "capacity_gb": 24.0,
        },
        index=["one", "two"],
    )


@pytest.mark.parametrize(("known", "hollow"), [("measured", False), ("published", True)])
def test_bars_of_one_video(rows, known, hollow):
    figure = one_video.one_video(rows, "title", "source", known)
    seconds, memory = figure.axes
    widths = [patch.get_width() for patch in seconds.patches if patch.get_width()]
    assert widths == [11.0, 10.0, 6.0]
    dashed = [patch.get_width() for patch in seconds.patches if patch.get_linestyle() == "--"]
    assert dashed == [10.0, 6.0]
    assert (seconds.patches[0].get_facecolor()[:3] == (1, 1, 1)) == hollow
    assert [patch.get_width() for patch in memory.patches if patch.get_width()] == [8.0, 4.5]
    assert {x for line in memory.lines for x in line.get_xdata()} == {24.0}
    assert [label.get_text() for label in seconds.get_yticklabels()] == ["one", "two"]
    assert "(s)" in seconds.get_xlabel()
    assert "(GB)" in memory.get_xlabel()


def test_bars_of_what_is_exchanged():
    table = pd.DataFrame({"positions": [1.0, 2.0], "halo": [0.5, 3.0], "all_to_all": [2.0, 4.0]}, index=[2, 7])
    panel = one_video.exchanged(table, "title", "source").axes[0]
    tops = [bar.get_y() + bar.get_height() for bar in panel.containers[1]]
    assert tops == [1.5, 5.0]
    assert list(panel.lines[0].get_ydata()) == [2.0, 4.0]


def test_bars_of_what_is_handed_on():
    table = pd.DataFrame({"latents": [1000, 2000], "measured": [1000, 5000], "predicted": [1000, 6000]}, ["a", "b"])
    panel = one_video.handed_on(table, "title", "source").axes[0]
    latents, rest, predicted = ([bar.get_width() for bar in bars] for bars in panel.containers)
    assert (latents, rest, predicted) == ([1, 2], [0, 3], [1, 6])
    assert [bar.get_x() for bar in panel.containers[1]] == [1, 2]
    assert {bar.get_linestyle() for bar in panel.containers[2]} == {"--"}
    assert [text.get_text().strip() for text in panel.texts] == ["1 kB, 1 × the latents", "5 kB, 2.5 × the latents"]
    assert "(kB)" in panel.get_xlabel()


def test_only_what_is_shown_is_in_the_legend(rows):
    predicted = one_video.one_video(rows.drop(columns=["known_s", "capacity_gb"]), "title", "source")
    labels = [text.get_text() for text in predicted.axes[0].get_legend().get_texts()]
    assert labels == ["predicted"]
