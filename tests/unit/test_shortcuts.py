"""The shortcuts give what the UNet gives without them, for any context, and can be taken back."""

from __future__ import annotations

import copy

import pytest
import torch

from vdpp_core import Parallel, RunConfig, models
from vdpp_core.models import shortcuts

CONFIG = RunConfig(device="cpu", parallel=Parallel())


@pytest.fixture(scope="module")
def plain():
    return models.load(CONFIG, torch.device("cpu"), torch.float32)


@pytest.fixture
def short(plain):
    unet = copy.deepcopy(plain)
    unet.patches = shortcuts.take(unet)
    return unet


def arguments(seed, batch=2, frames=5, tokens=1):
    generator = torch.Generator().manual_seed(seed)
    return {
        "sample": torch.randn(batch, frames, 8, 9, 8, generator=generator),
        "timestep": torch.tensor(0.7),
        "encoder_hidden_states": torch.randn(batch, tokens, 32, generator=generator),
        "added_time_ids": torch.tensor([[6, 127, 0.02]] * batch),
    }


@torch.no_grad()
def difference(plain, short, given):
    expected = plain(**given).sample
    return ((short(**given).sample - expected).norm() / expected.norm()).item()


def test_one_image_after_another(plain, short):
    """Also the first one again, other shapes, and one context in turns with another, as with sequential guidance."""
    calls = [{"seed": 1}, {"seed": 2}, {"seed": 3}, {"seed": 1}, {"seed": 1, "frames": 2}, {"seed": 4, "batch": 1}]
    for call in [*calls, *[{"seed": 5, "batch": 1}, {"seed": 6, "batch": 1}] * 2]:
        assert difference(plain, short, arguments(**call)) < 1e-6, call


def test_a_context_is_computed_once(short):
    attention = short.mid_block.attentions[0].transformer_blocks[0].attn2
    calls = []
    attention.to_v.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        for seed in (1, 1, 1, 2, 1, 2):
            short(**arguments(seed))
    assert len(calls) == 2


def test_more_tokens_are_refused(short):
    with pytest.raises(ValueError, match=r"^encoder_hidden_states of 2 tokens: the shortcuts need exactly one$"):
        short(**arguments(1, tokens=2))


@torch.no_grad()
def test_taken_back(plain, short):
    given = arguments(1)
    short(**given)
    short.patches.undo()
    assert torch.equal(short(**given).sample, plain(**given).sample)
    assert short.state_dict().keys() == plain.state_dict().keys()
    several = arguments(1, tokens=2)
    assert torch.equal(short(**several).sample, plain(**several).sample)


def test_a_run_takes_them_where_it_is_told_to(plain):
    unet = models.load(CONFIG.replace(shortcuts=True), torch.device("cpu"), torch.float32)
    with pytest.raises(ValueError, match="tokens"):
        unet(**arguments(1, tokens=2))
    assert 0 < difference(plain, unet, arguments(1)) < 1e-6
