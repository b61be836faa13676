"""The shortcuts give what the UNet gives without them, and can be taken back."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.unit.test_exact import CONFIG, CPU, arguments, plain  # noqa: F401
from vdpp_core import models
from vdpp_core.models import shortcuts


@pytest.fixture
def short(plain):  # noqa: F811
    unet = copy.deepcopy(plain)
    unet.patches = shortcuts.take(unet)
    return unet


@torch.no_grad()
def difference(plain, short, given):  # noqa: F811
    expected = plain(**given).sample
    return ((short(**given).sample - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("call", [{}, {"batch": 1, "frames": 2}, {"frames": 1}, {"tokens": 2}], ids=str)
def test_within_1e_6(plain, short, call):  # noqa: F811
    assert 0 < difference(plain, short, arguments(1, **call)) < 1e-6


@torch.no_grad()
def test_taken_back(plain, short):  # noqa: F811
    short.patches.undo()
    assert difference(plain, short, arguments(1)) == 0
    assert short.state_dict().keys() == plain.state_dict().keys()


def test_a_run_takes_them_where_it_is_told_to(plain):  # noqa: F811
    unet = models.load(CONFIG.replace(shortcuts=True), CPU, torch.float32)
    given = arguments(1)
    assert 0 < difference(plain, unet, given) < 1e-6
    assert 0 < difference(plain, unet, given) < 1e-6


@torch.no_grad()
@pytest.mark.parametrize(
    "hidden",
    [
        torch.ones(3, 16)[:, ::2],
        torch.ones(0, 2, 8),
        torch.ones(8, 5).t(),
        torch.ones(4, 8, dtype=torch.float64),
        torch.ones(4, 8, device="meta"),
    ],
    ids=lambda hidden: f"{tuple(hidden.shape)}, {hidden.dtype}, {hidden.device}",
)
def test_linear_layers_of_any_input(hidden):
    linear = nn.Linear(8, 6).to(hidden.device, hidden.dtype)
    result, expected = shortcuts._linear(linear, hidden), F.linear(hidden, linear.weight, linear.bias)
    torch.testing.assert_close(result, expected)
