"""Operations, bytes and seconds of a step before it runs."""

from __future__ import annotations

import pytest

from vdpp_core import Parallel, RunConfig, costs, tables

PUBLISHED = {row["id"]: row for row in tables.published()["memory_cfg3_28steps_1sample"]}
TINY = RunConfig(device="cpu", latent_shape=(1, 4, 14, 9, 16), parallel=Parallel())


@pytest.mark.parametrize(("row", "tera"), [(1, 44.8), (2, 79.9), (3, 150.5), (6, 709.8)])
def test_operations_of_the_published_unet(row, tera):
    """A forward pass of one of the guidance's two."""
    assert costs.cost(costs.published_config(PUBLISHED[row])).flops / 2e12 == pytest.approx(tera, abs=0.05)


@pytest.mark.parametrize(
    ("ranks", "change"), [(2, {}), (3, {"guidance_mode": "sequential"}), (4, {"guidance_scale": 1.0}), (7, {})]
)
def test_bytes_are_those_of_the_formula(ranks, change):
    config = TINY.replace(parallel=Parallel(frames=ranks), **change)
    counted, formula = costs.sent_by_all(config), costs.formula(config)
    assert counted.keys() == formula.keys()
    for kind, count in counted.items():
        assert count == pytest.approx(formula[kind], rel=0.05), kind


def test_bytes_of_the_published_unet():
    config = costs.published_config(PUBLISHED[1]).replace(parallel=Parallel(frames=2))
    counted, formula = costs.sent_by_all(config), costs.formula(config)
    assert sum(counted.values()) == pytest.approx(sum(formula.values()), rel=0.05)


def test_guidance_exchanges_its_halves_once():
    batch, channels, frames, rows, columns = TINY.shape
    half = 4 * batch * channels * frames * rows * columns
    found = costs.cost(TINY.replace(parallel=Parallel(cfg=2)))
    assert found.sent == {"guidance": half}
    assert found.flops == pytest.approx(costs.cost(TINY).flops / 2, rel=0.01)


def test_frames_share_out_the_operations():
    even = TINY.replace(latent_shape=(1, 4, 14, 16, 28))  # positions, too, are seven equal shares
    alone, split = (costs.cost(even.replace(parallel=Parallel(frames=ranks))).flops for ranks in (1, 7))
    assert split == pytest.approx(alone / 7, rel=0.02)  # the time's embedding is computed by each


def test_published_times():
    """Two rows give the rates; the others are foretold."""
    rates = costs.published_rates()
    for number in (1, 2, 6):
        row = PUBLISHED[number]
        config = costs.published_config(row)
        assert config.total_steps * costs.step_s(config, rates) == pytest.approx(row["first_sample_time_s"], rel=0.1)


def test_a_faster_link_brings_frames_nearer_to_their_share():
    config = TINY.replace(parallel=Parallel(frames=2))
    slow, fast = (costs.step_s(config, costs.Rates(1e9, speed, "")) for speed in (1e6, 1e15))
    assert fast == pytest.approx(costs.cost(config).flops / 1e9)
    assert slow > fast + 0.9 * sum(costs.cost(config).sent.values()) / 1e6
