"""What compares models: the same clips, noise and images for each, and what is drawn of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from vdpp_core.config.fields import MODELS
from vdpp_core.models.decoding import to_bytes
from vdpp_core.plots import video_quality
from vdpp_core.tiny_svd import judge, train
from vdpp_core.tiny_svd.clips import held_out

pytestmark = pytest.mark.usefixtures("on_one_thread")


def at_bucket(scenes, bucket):
    """The true videos of scenes at another speed."""
    clips = replace(scenes, motion_buckets=torch.full_like(scenes.motion_buckets, bucket)).draw()
    return list(to_bytes(clips.permute(0, 1, 3, 4, 2).numpy()))


@pytest.mark.parametrize("name", train.EXPERTS)
def test_held_out_losses_are_the_same_whatever_was_drawn_before(name):
    pipeline = judge.load(str(MODELS["tiny"]))
    torch.manual_seed(5)
    losses = judge.held_out_losses(pipeline, name, batches=1, clips=4)
    state = torch.get_rng_state()
    torch.manual_seed(6)
    pd.testing.assert_frame_equal(losses, judge.held_out_losses(pipeline, name, batches=1, clips=4))
    torch.manual_seed(5)
    assert torch.equal(torch.get_rng_state(), state)
    low, high = train.EXPERTS[name]
    assert losses.index.is_monotonic_increasing
    assert (len(losses), losses.index[0] >= low, losses.index[-1] <= high) == (train.BATCH, True, True)
    assert 0 < losses[name].mean() < 1  # 1 is the loss of a prediction that is always 0


def test_figures_of_true_videos():
    scenes = held_out(3)
    figures = judge.figures({bucket: at_bucket(scenes, bucket) for bucket in (0, 64, 128)}, scenes)
    assert figures.index.tolist() == [0, 1, 2]
    assert (figures.present_last == 1).all()
    assert (figures.speed_correlation == 1).all()
    assert (figures.speed_error < 0.01).all()
    assert (figures.background_error < 1).all()


def test_models_are_compared_in_pairs_image_by_image():
    first = pd.DataFrame({"loss": [1.0, 2.0, 3.0]})
    table = judge.summary({"one": first, "two": first + 1, "three": pd.DataFrame({"loss": [2.0, 4.0, 6.0]})})
    assert table.columns.tolist() == ["one", "two", "three", "two - one", "three - two"]
    assert table.loc["loss"].tolist() == ["2", "3", "4", "+1 ± 0", "+1 ± 0.6"]


def test_a_contact_sheet_names_its_rows_and_keeps_their_order():
    dark, bright = (np.full((14, 8, 8, 3), value, np.uint8) for value in (10, 200))
    images = [(f"image {i}", {"single": dark, "experts": bright}) for i in range(4)]
    figure = video_quality.contact_sheet(images, "title", "small print", shown=3)
    assert [panel.get_title() for panel in figure.axes] == ["image 0", "image 1", "image 2", "image 3"]
    for panel in figure.axes:
        assert [label.get_text() for label in panel.get_xticklabels()] == ["frame 0", "frame 6", "frame 13"]
        rows = {
            label.get_text(): place for place, label in zip(panel.get_yticks(), panel.get_yticklabels(), strict=True)
        }
        top, bottom = panel.get_ylim()[::-1]
        for name, value in (("single", 10), ("experts", 200)):
            shown = [i for i in panel.images if min(i.get_extent()[2:]) < rows[name] < max(i.get_extent()[2:])]
            assert [int(image.get_array().max()) for image in shown] == [value]
            assert top <= min(shown[0].get_extent()[2:]) < max(shown[0].get_extent()[2:]) <= bottom
