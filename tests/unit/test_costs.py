"""Operations, bytes and seconds of a step before it runs."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from diffusers.models.attention import TemporalBasicTransformerBlock
from diffusers.models.resnet import TemporalResnetBlock

from vdpp_core import Parallel, RunConfig, models
from vdpp_core.parallel.fsdp_units import units
from vdpp_core.predict import costs, published

PUBLISHED = {row["id"]: row for row in published.figures()["memory_cfg3_28steps_1sample"]}
TINY = RunConfig(device="cpu", latent_shape=(1, 4, 14, 9, 16), parallel=Parallel())


@pytest.mark.parametrize(("row", "tera"), [(1, 44.8), (2, 79.9), (3, 150.5), (6, 709.8)])
def test_operations_of_the_published_unet(row, tera):
    """A forward pass of one of the guidance's two."""
    assert costs.cost(published.memory_config(PUBLISHED[row])).flops / 2e12 == pytest.approx(tera, abs=0.05)


@pytest.mark.parametrize(
    ("ranks", "change"), [(2, {}), (3, {"guidance_mode": "sequential"}), (4, {"guidance_scale": 1.0}), (7, {})]
)
def test_bytes_are_those_of_the_formula(ranks, change):
    config = TINY.replace(parallel=Parallel(frames=ranks), **change)
    counted, formula = costs.sent_by_all(config), costs.formula(config)
    assert counted.keys() == formula.keys()
    for kind, count in counted.items():
        assert count == pytest.approx(formula[kind], rel=0.05), kind


@pytest.mark.parametrize("axes", [{"tp": 2}, {"tp": 4}, {"frames": 2, "tp": 2}], ids=str)
def test_bytes_of_tensors_are_those_of_the_formula(axes):
    """tp 4 divides the feed-forwards and resnets of the tiny UNet, but none of its 2 or 3 heads."""
    config = TINY.replace(parallel=Parallel(**axes), latent_shape=(1, 4, 14, 8, 16))
    counted, formula = costs.sent_by_all(config), costs.formula(config)
    assert counted["partial sums"] == formula["partial sums"] > 0
    assert sum(counted.values()) == pytest.approx(sum(formula.values()), rel=0.05)


@pytest.mark.parametrize("axes", [{"frames": 2}, {"tp": 2}], ids=str)
def test_bytes_of_the_published_unet(axes):
    config = published.memory_config(PUBLISHED[1]).replace(parallel=Parallel(**axes))
    counted, formula = costs.sent_by_all(config), costs.formula(config)
    assert sum(counted.values()) == pytest.approx(sum(formula.values()), rel=0.05)


@pytest.mark.parametrize("frames", [2, 3, 5])
def test_a_rank_between_two_others_sends_most(frames):
    config = TINY.replace(parallel=Parallel(frames=frames))
    most, members = costs.cost(config), [costs.cost(config, member) for member in range(frames)]
    assert most.sent["halo"] == max(member.sent["halo"] for member in members)
    assert most.flops == pytest.approx(max(member.flops for member in members), rel=0.01)  # edges cost a little


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


@pytest.mark.parametrize(("frames", "meetings"), [(2, 1), (1, 0)])
def test_passes_one_after_the_other_cost_the_same_and_meet_twice(frames, meetings):
    batched = TINY.replace(parallel=Parallel(frames=frames))
    at_once, in_turn = (costs.cost(batched.replace(guidance_mode=mode)) for mode in ("batched", "sequential"))
    assert at_once.flops == in_turn.flops > 0
    assert at_once.sent == in_turn.sent
    assert in_turn.exchanges == 2 * at_once.exchanges
    assert bool(at_once.exchanges) == meetings


def test_a_rank_meets_the_others_once_for_each_layer_that_looks_across():
    """A temporal transformer: there and back; a temporal resnet: once a convolution; the prediction: once."""
    kinds = Counter(type(module) for module in models.on_meta(TINY, torch.float32).modules())
    resnets, transformers = kinds[TemporalResnetBlock], kinds[TemporalBasicTransformerBlock]
    assert min(resnets, transformers) > 0
    found = costs.cost(TINY.replace(parallel=Parallel(frames=2)))
    assert found.exchanges == 2 * resnets + 2 * transformers + 1


def test_parameters_are_gathered_part_by_part():
    alone, sharded = (costs.cost(TINY.replace(parallel=Parallel(dp=2, fsdp=fsdp))) for fsdp in (False, True))
    assert (alone.gathered, alone.gathers) == (0, 0)
    unet = models.on_meta(TINY, torch.float32)
    assert sharded.gathered == sum(parameter.nbytes for parameter in unet.parameters()) // 2
    assert sharded.gathers == 1 + len(units(unet))
    assert costs.cost(TINY.replace(parallel=Parallel(dp=2, fsdp=True), guidance_mode="sequential")).gathered == (
        2 * sharded.gathered
    )
