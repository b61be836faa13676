"""UNets behind one interface."""

from __future__ import annotations

import pytest
import torch
from diffusers import UNetSpatioTemporalConditionModel

from vdpp_core import RunConfig, models
from vdpp_core.engine.measure import Stopwatch
from vdpp_core.models.architectures import PUBLISHED_SCHEDULER, PUBLISHED_UNET
from vdpp_core.models.stage import Stage

CPU = torch.device("cpu")


def test_the_published_configuration_has_the_published_size():
    with torch.device("meta"):
        unet = UNetSpatioTemporalConditionModel(**PUBLISHED_UNET)
    assert sum(parameter.numel() for parameter in unet.parameters()) == pytest.approx(1.525e9, rel=1e-3)


@pytest.mark.parametrize("config", [RunConfig(model="dummy"), RunConfig(), RunConfig(random_weights=True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_interface(config: RunConfig, dtype: torch.dtype):
    unet = models.load(config, CPU, dtype)
    assert {parameter.dtype for parameter in unet.parameters()} == {dtype}
    width = unet.config.cross_attention_dim
    told = {"encoder_hidden_states": torch.zeros(2, 1, width, dtype=dtype)}
    told["added_time_ids"] = torch.tensor([[6, 127, 0.02]] * 2, dtype=dtype)
    with torch.no_grad():
        (prediction,) = unet(torch.zeros(2, 3, 8, 4, 6, dtype=dtype), torch.tensor(1.6), **told, return_dict=False)
    assert prediction.shape == (2, 3, 4, 4, 6)
    assert prediction.dtype == dtype


def test_the_schedule_starts_at_700_as_the_official_one():
    """The documents found 11.68 with diffusers' defaults, and videos unrelated to the image."""
    for model in (RunConfig(model="svd", random_weights=True), RunConfig(), RunConfig(model="dummy")):
        config = model.replace(total_steps=25)
        unet = models.on_meta(config, torch.float32)
        scheduler = Stage.around(config, {"unet": unet}, CPU, torch.float32, Stopwatch(CPU)).solver.scheduler
        assert {name: scheduler.config[name] for name in PUBLISHED_SCHEDULER} == PUBLISHED_SCHEDULER
        scheduler.set_timesteps(25)
        assert scheduler.sigmas[0].item() == pytest.approx(700.0)
        assert float(scheduler.init_noise_sigma) == pytest.approx(700.0, rel=1e-3)


def test_random_weights_are_the_same_on_every_rank_and_leave_the_callers_generator_alone():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first, second = (models.load(RunConfig(random_weights=True), CPU, torch.float32) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    assert torch.get_default_dtype() == torch.float32
