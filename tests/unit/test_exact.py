"""The work that a UNet leaves out changes no bit, for any context, size and type, and can be taken back."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

from vdpp_core import Parallel, RunConfig, models
from vdpp_core.models import exact

CONFIG = RunConfig(device="cpu", parallel=Parallel())
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def plain():
    return models.load_plain(CONFIG, CPU, torch.float32)


@pytest.fixture
def spared(plain):
    unet = copy.deepcopy(plain)
    unet.patches = exact.take(unet)
    return unet


def arguments(seed, batch=2, frames=5, tokens=1, width=32, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "sample": noise(batch, frames, 8, 9, 8),
        "timestep": torch.tensor(0.7),
        "encoder_hidden_states": noise(batch, tokens, width),
        "added_time_ids": torch.tensor([[6, 127, 0.02]] * batch, dtype=dtype),
    }


@torch.no_grad()
def same(plain, other, given):
    return torch.equal(other(**given).sample, plain(**given).sample)


def test_one_image_after_another(plain, spared):
    """Also the first one again, other shapes and tokens, and one context in turns with another, as in guidance."""
    calls = [{"seed": 1}, {"seed": 2}, {"seed": 3}, {"seed": 1}, {"seed": 1, "frames": 2}, {"seed": 4, "batch": 1}]
    calls += [{"seed": 4, "tokens": 2}, {"seed": 4, "tokens": 2}, {"seed": 4, "frames": 1}]
    for call in [*calls, *[{"seed": 5, "batch": 1}, {"seed": 6, "batch": 1}] * 2]:
        assert same(plain, spared, arguments(**call)), call


@torch.no_grad()
def test_a_context_is_computed_once(spared):
    attention = spared.mid_block.attentions[0].transformer_blocks[0].attn2
    calls = []
    attention.to_v.register_forward_hook(lambda *_: calls.append(1))
    for seed in (1, 1, 1, 2, 1, 2):
        spared(**arguments(seed))
    assert len(calls) == 2


@torch.no_grad()
def test_a_context_that_is_overwritten_is_another(plain, spared):
    given = arguments(1)
    spared(**given)
    given["encoder_hidden_states"].mul_(2)
    assert same(plain, spared, given)


@torch.no_grad()
def test_an_attention_that_depends_on_the_query_is_computed_every_time(plain, spared):
    both = plain, spared = copy.deepcopy(plain), copy.deepcopy(spared)
    for unet in both:
        attention = unet.mid_block.attentions[0].transformer_blocks[0].attn2
        attention.to_out[1] = torch.nn.Softmax(dim=1)
        attention.residual_connection = True
    for seed in (1, 1, 2):
        given = arguments(seed) | {"sample": torch.randn(2, 5, 8, 9, 8)}
        assert same(plain, spared, given)


def test_half_precision(plain):
    plain = copy.deepcopy(plain).to(torch.bfloat16)
    unet = models.load(CONFIG, CPU, torch.bfloat16)
    for _ in range(2):
        assert same(plain, unet, arguments(1, dtype=torch.bfloat16))


def test_medium_model():
    config = CONFIG.replace(model="medium", random_weights=True)
    plain = models.load_plain(config, CPU, torch.float32)
    unet = models.ready(config, copy.deepcopy(plain))
    for _ in range(2):
        assert same(plain, unet, arguments(1, frames=2, width=256))


@torch.no_grad()
def test_an_attention_that_is_patched_afterwards(plain, spared):
    """Its norm is computed then, too."""
    attention = spared.mid_block.attentions[0].transformer_blocks[0].attn2
    attention.forward = functools.partial(type(attention).forward, attention)
    for _ in range(2):
        assert same(plain, spared, arguments(1))


@torch.no_grad()
def test_taken_back(plain, spared):
    given = arguments(1)
    spared(**given)
    spared.patches.undo()
    assert same(plain, spared, given)
    assert "forward" not in vars(spared) | vars(spared.mid_block.attentions[0].transformer_blocks[0].attn2)
    assert spared.state_dict().keys() == plain.state_dict().keys()


@torch.no_grad()
def test_weights_that_are_changed_in_place_count(plain, spared):
    plain, given = copy.deepcopy(plain), arguments(1)
    spared(**given)
    for unet in (plain, spared):
        unet.mid_block.attentions[0].transformer_blocks[0].attn2.to_v.weight.mul_(1.5)
    assert same(plain, spared, given)


@torch.no_grad()
def test_an_attention_is_called_by_itself(plain, spared):
    plain, spared = (unet.mid_block.attentions[0].transformer_blocks[0].attn2 for unet in (plain, spared))
    hidden, context = torch.randn(2, 9, plain.to_q.in_features), torch.randn(2, 1, 32)
    assert torch.equal(spared(hidden, context), plain(hidden, context))
