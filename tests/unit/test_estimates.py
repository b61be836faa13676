"""What is fitted to a few counted videos, at videos that were not among them."""

from __future__ import annotations

import pytest

from vdpp_core import Parallel, RunConfig
from vdpp_core.config.axes import LOCKSTEP_NAMES
from vdpp_core.predict import planner
from vdpp_core.predict.estimates import COUNTED, TRACED, Estimated

BASE = RunConfig(model="tiny", random_weights=True, device="cuda", dtype="fp16", num_samples=1)
VIDEOS = [(25, 80, 144), (9, 40, 72), (40, 64, 64)]
WHOLE = [Parallel(), Parallel(cfg=2), Parallel(frames=2), Parallel(frames=7), Parallel(cfg=2, frames=3)]
SHARDED = [Parallel(dp=7, fsdp=True), Parallel(frames=4, fsdp=True), Parallel(cfg=2, frames=3, fsdp=True)]


@pytest.fixture(scope="module")
def estimated() -> Estimated:
    return Estimated(BASE)


@pytest.fixture(scope="module")
def counted() -> planner.Counted:
    return planner.Counted()


def test_it_knows_how_often_the_ranks_of_each_axis_meet(estimated):
    assert set(estimated.meetings) == set(LOCKSTEP_NAMES)


def test_the_videos_tried_here_are_not_those_it_was_fitted_to():
    fitted = {tuple(video[:3]) for video in COUNTED} | {tuple(video[1:4]) for rows in TRACED.values() for video in rows}
    assert not fitted & set(VIDEOS)


@pytest.mark.parametrize("mode", ["batched", "sequential"])
@pytest.mark.parametrize("video", VIDEOS, ids=str)
@pytest.mark.parametrize("layout", [*WHOLE, *SHARDED], ids=str)
def test_it_comes_near_to_what_is_counted(estimated, counted, layout, video, mode):
    config = BASE.replace(latent_shape=(1, 4, *video), parallel=layout, guidance_mode=mode)
    found, known = estimated.cost(config), counted.cost(config)
    assert found.flops == pytest.approx(known.flops, rel=0.012)
    assert found.sent == pytest.approx(known.sent, rel=0.002)
    assert (found.exchanges, found.gathered, found.gathers) == (known.exchanges, known.gathered, known.gathers)
    near = 0.08 if layout.fsdp else 0.075
    room, true = estimated.room(config), counted.room(config)
    assert room.peak == pytest.approx(true.peak, rel=near)
    assert room.needed == pytest.approx(true.needed, rel=0.05)


def test_two_videos_at_once_cost_twice_as_much(estimated):
    one, two = (BASE.replace(latent_shape=(batch, 4, 9, 24, 24), parallel=Parallel(frames=3)) for batch in (1, 2))
    assert estimated.cost(two).flops == pytest.approx(2 * estimated.cost(one).flops)
    assert estimated.cost(two).sent["halo"] == pytest.approx(2 * estimated.cost(one).sent["halo"])
