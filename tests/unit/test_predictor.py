"""The predictor's fit against counting, at videos that the fit was not made from."""

from __future__ import annotations

import itertools

import pytest

from vdpp_core import Parallel, RunConfig
from vdpp_core.config.axes import LOCKSTEP_NAMES
from vdpp_core.predict.predictor import COUNTED, TRACED, Predictor

BASE = RunConfig(model="tiny", random_weights=True, device="cuda", dtype="fp16", num_samples=1)
VIDEOS = [(25, 80, 144), (9, 40, 72), (40, 64, 64)]
WHOLE = [Parallel(), Parallel(cfg=2), Parallel(frames=2), Parallel(frames=7), Parallel(cfg=2, frames=3)]
TENSORS = [Parallel(tp=2), Parallel(cfg=2, tp=4), Parallel(frames=2, tp=2, fsdp=True)]
SHARDED = [Parallel(dp=7, fsdp=True), Parallel(frames=4, fsdp=True), Parallel(cfg=2, frames=3, fsdp=True)]


@pytest.fixture(scope="module")
def fitted() -> Predictor:
    return Predictor(fitted_to=BASE)


@pytest.fixture(scope="module")
def exact() -> Predictor:
    return Predictor()


def test_the_fit_knows_how_often_the_ranks_of_each_axis_meet(fitted):
    assert set(fitted.fit.exchanges) == set(LOCKSTEP_NAMES)


def test_the_videos_tried_here_are_not_those_of_the_fit():
    of_the_fit = {tuple(video[:3]) for video in COUNTED} | {tuple(v[1:4]) for rows in TRACED.values() for v in rows}
    assert not of_the_fit & set(VIDEOS)


@pytest.mark.parametrize("mode", ["batched", "sequential"])
@pytest.mark.parametrize(
    ("layout", "video"),
    [*itertools.product([*WHOLE, *SHARDED], VIDEOS), *((layout, VIDEOS[0]) for layout in TENSORS)],
    ids=str,
)
def test_the_fit_comes_near_to_counting(fitted, exact, layout, video, mode):
    config = BASE.replace(latent_shape=(1, 4, *video), parallel=layout, guidance_mode=mode)
    near, true = fitted.cost(config), exact.cost(config)
    assert near.flops == pytest.approx(true.flops, rel=0.012)
    assert near.sent == pytest.approx(true.sent, rel=0.002)
    assert (near.exchanges_of, near.gathered, near.gathers) == (true.exchanges_of, true.gathered, true.gathers)
    found, known = fitted.room(config), exact.room(config)
    assert found.peak == pytest.approx(known.peak, rel=0.08 if layout.fsdp else 0.075)
    # In a model as small as this, how much the allocator's blocks fragment varies from size to size. The fit may take
    # that for more than it is, hardly for less; with the published model it is 2 % off at these videos.
    least = 0.95 if layout.tp == 1 else 0.92
    assert least * known.needed <= found.needed <= 1.14 * known.needed


def test_two_videos_at_once_cost_twice_as_much(fitted):
    one, two = (BASE.replace(latent_shape=(batch, 4, 9, 24, 24), parallel=Parallel(frames=3)) for batch in (1, 2))
    assert fitted.cost(two).flops == pytest.approx(2 * fitted.cost(one).flops)
    assert fitted.cost(two).sent["halo"] == pytest.approx(2 * fitted.cost(one).sent["halo"])


@pytest.mark.parametrize(
    "change",
    [{"latent_shape": (1, 4, 3, 8, 8)}, {"dtype": "fp32"}, {"forward_chunking": True}, {"model": "dummy"}],
    ids=str,
)
def test_what_the_fit_does_not_cover_is_counted(fitted, exact, change):
    change = {"random_weights": False} | change if change.get("model") == "dummy" else change
    config = BASE.replace(latent_shape=(1, 4, 3, 24, 24), parallel=Parallel()).replace(**change)
    assert fitted.cost(config) == exact.cost(config)
    assert fitted.room(config) == exact.room(config)
