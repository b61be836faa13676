"""The numbers of a video, on drawn clips of which everything is known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from vdpp_core.tiny_svd import quality
from vdpp_core.tiny_svd.clips import FASTEST, FRAMES, example, held_out, scenes


@pytest.fixture(scope="module")
def drawn():
    """Scenes and their true videos, in bytes."""
    some = held_out(24)
    return some, [to_bytes(clip) for clip in some.draw()]


def to_bytes(clip):
    return (clip * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()


def with_bucket(scenes, bucket):
    return replace(scenes, motion_buckets=torch.full_like(scenes.motion_buckets, bucket))


def straight(bucket):
    """The ball of the example image moves to the right, far from the walls."""
    path = {"radii": torch.tensor([0.15]), "starts": torch.tensor([[0.2, 0.5]]), "directions": torch.zeros(1)}
    return with_bucket(replace(example(), **path), bucket)


def test_psnr_and_ssim():
    black, grey = np.zeros((8, 8, 3), np.uint8), np.full((8, 8, 3), 10, np.uint8)
    assert quality.psnr(grey, black) == pytest.approx(20 * math.log10(255 / 10))
    assert quality.psnr(grey, grey) == math.inf
    assert quality.ssim(grey, grey) == 1
    assert quality.ssim(black, grey) < 0.5
    noise, other = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)
    error = ((noise.astype(float) - other) ** 2).mean()
    assert quality.psnr(noise, other) == pytest.approx(10 * math.log10(255**2 / error))
    assert quality.ssim(noise, noise) == 1


def test_change_and_jerkiness():
    ramp = np.broadcast_to(np.arange(0, 50, 5, dtype=np.uint8)[:, None, None, None], (10, 8, 8, 3))
    assert quality.change(ramp) == 5
    assert quality.jerkiness(ramp) == 0
    flicker = np.where(np.arange(10)[:, None, None, None] % 2, 5, 0) * np.ones((10, 8, 8, 3))
    assert (quality.change(flicker), quality.jerkiness(flicker)) == (5, 10)
    assert (quality.change(ramp[:1]), quality.jerkiness(ramp[:2])) == (0, 0)
    still = np.repeat(ramp[3:4], 5, axis=0)
    assert (quality.change(still), quality.jerkiness(still)) == (0, 0)
    falling = np.array([200, 100, 0], np.uint8)[:, None, None, None] * np.ones((1, 8, 8, 3), np.uint8)
    assert (quality.change(falling), quality.jerkiness(falling)) == (100, 0)  # bytes do not wrap round


def test_the_shape_is_found_where_it_was_drawn(drawn):
    some, videos = drawn
    for index, video in enumerate(videos):
        found, true = quality.track(video, some[index]), some.positions()[index]
        assert found["present"].all()
        assert found["area"] == pytest.approx(1, abs=0.1)
        off = np.hypot(found["x"] - true[:, 0].numpy(), found["y"] - true[:, 1].numpy())
        assert off.max() < 0.06  # a triangle's centre of area is not where its position is


def test_a_shape_that_is_gone_or_too_large_is_not_there():
    scene = straight(100)
    video = to_bytes(scene.draw()[0])
    video[-1] = to_bytes(scene.backgrounds()[None][0])[0]
    video[-2, 20:60, 10:60] = (255, 204, 51)
    found = quality.track(video, scene)
    assert found["present"].tolist() == [True] * 12 + [False, False]
    assert np.isnan(found["x"][-2:]).all()
    numbers = quality.assess(video, video[0], scene)
    assert (numbers["present_last"], numbers["present_share"]) == (0, pytest.approx(12 / 14))


@pytest.mark.parametrize(("times", "there"), [(0.5, False), (0.8, True), (1.2, True), (2, False)])
def test_a_shape_of_another_size(times, there):
    scene = straight(0)
    video = to_bytes(replace(scene, radii=scene.radii * times, starts=torch.tensor([[0.5, 0.5]])).draw()[0])
    found = quality.track(video, scene)
    assert found["area"] == pytest.approx(times**2, rel=0.15)
    assert found["present"].all() == found["present"].any() == there


def test_nothing_there_at_all_is_not_a_number():
    scene = straight(100)
    empty = np.repeat(to_bytes(scene.backgrounds()[None][0]), FRAMES, axis=0)
    found = quality.track(empty, scene)
    assert not found["present"].any()
    assert math.isnan(quality.speed(found))


@pytest.mark.parametrize(("bucket", "direction"), [(60, 0.0), (100, 0.0), (120, 0.0), (100, 0.6), (60, -0.6)])
def test_speed_is_the_motion_buckets(bucket, direction):
    scene = replace(straight(bucket), directions=torch.tensor([direction]))
    video = to_bytes(scene.draw()[0])
    assert quality.speed(quality.track(video, scene)) == pytest.approx(bucket / 255 * FASTEST, rel=0.03)


def test_background_error(drawn):
    some, videos = drawn
    assert max(quality.background_error(video, some[i]) for i, video in enumerate(videos)) < 1
    brighter = (videos[0].astype(int) + 7).clip(0, 255).astype(np.uint8)
    assert quality.background_error(brighter, some[0]) == pytest.approx(7, abs=0.5)


def test_a_scene_is_square(drawn):
    some, videos = drawn
    with pytest.raises(ValueError, match="a scene must be square"):
        quality.track(videos[0][:, :32], some[0])


def test_scenes_stay_within_their_walls_and_start_where_they_say():
    many = scenes(200, torch.Generator().manual_seed(1))
    path = many.positions(40)
    assert (path >= many.radii[:, None, None] - 1e-5).all()
    assert (path <= 1 - many.radii[:, None, None] + 1e-5).all()
    assert torch.allclose(path[:, 0], many.starts, atol=1e-5)
    steps = (path[:, 1:] - path[:, :-1]).norm(dim=-1)
    assert (steps <= (many.motion_buckets / 255 * FASTEST)[:, None] + 1e-5).all()


def test_the_same_seed_draws_the_same_scenes():
    first, again, other = (scenes(5, torch.Generator().manual_seed(seed)).draw() for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_scene_of_several_is_the_same_alone():
    some = held_out(4)
    assert torch.equal(some[2].draw()[0], some.draw()[2])
    assert torch.equal(some[1:3].draw(), some.draw()[1:3])


def test_held_out_scenes_do_not_depend_on_what_was_drawn_before():
    torch.manual_seed(5)
    first = held_out(3).draw()
    torch.rand(10)
    assert torch.equal(first, held_out(3).draw())
    torch.manual_seed(5)
    assert not torch.equal(first, scenes(3).draw())


def test_a_bucket_changes_the_motion_and_not_the_image():
    some = held_out(4)
    still, fast = (with_bucket(some, bucket).draw() for bucket in (0, 255))
    assert torch.equal(still[:, 0], fast[:, 0])
    assert torch.equal(still[:, 0], still[:, -1])
    assert not torch.equal(fast[:, 0], fast[:, -1])
