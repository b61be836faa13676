"""Fused attention over more rows than its kernels take: in turns, with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from tests.conftest import one_thread
from vdpp_core import Parallel, RunConfig, models
from vdpp_core.models import attention
from vdpp_core.predict import memory, trace


class Watching(TorchFunctionMode):
    """Notes the batches of all attention below it."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.batches.append(args[0].shape[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_turns_give_the_same_bits(dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(23, 2, 5, 8).to(dtype) for _ in range(3))
    whole = F.scaled_dot_product_attention(query, key, value)
    with Watching() as watching, attention.InTurns(most=10):
        assert torch.equal(F.scaled_dot_product_attention(query, key, value, dropout_p=0.0), whole)
    assert watching.batches == [10, 10, 3]


def test_a_unet_whose_attention_takes_turns_predicts_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig(device="cpu", parallel=Parallel(), latent_shape=(1, 4, 3, 8, 8))
    given = {
        "sample": torch.randn(2, 3, 8, 8, 8),
        "timestep": torch.tensor(1.3),
        "encoder_hidden_states": torch.randn(2, 1, 32),
        "added_time_ids": torch.ones(2, 3),
    }
    monkeypatch.setattr(attention.InTurns.__init__, "__defaults__", (50,))
    with one_thread(), torch.no_grad():
        unet = models.load(config, torch.device("cpu"), torch.float32)
        whole = unet(**given).sample
        patches = attention.take_turns(unet)
        with Watching() as watching:
            assert torch.equal(unet(**given).sample, whole)
        assert max(watching.batches) == 50
        patches.undo()
        assert torch.equal(unet(**given).sample, whole)


@pytest.mark.parametrize(
    ("shape", "layout", "most"),
    [
        ((1, 4, 25, 160, 288), Parallel(), 65_535),  # 92 160 rows
        ((1, 4, 25, 160, 288), Parallel(frames=2), 46_080),
        ((1, 4, 25, 160, 288), Parallel(cfg=2), 46_080),
        ((2, 4, 2, 160, 288), Parallel(cfg=2), 65_535),
        ((1, 4, 14, 72, 128), Parallel(), 18_432),
    ],
    ids=str,
)
def test_no_attention_of_a_step_is_over_more_rows(
    shape: tuple[int, ...], layout: Parallel, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen on the meta device, by the shapes, in a step of the engine's own."""
    config = memory.alike(RunConfig(model="svd", random_weights=True, latent_shape=shape, parallel=layout))
    watching = Watching()
    monkeypatch.setattr(trace, "_FusedAttention", lambda: watching)
    trace.step.cache_clear()
    trace.step(config, torch.float16)
    trace.step.cache_clear()
    assert max(watching.batches) == most
