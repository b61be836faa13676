"""Layers cut over ranks: how exact they are, what each rank holds and sends, and what stays whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from tests.conftest import one_thread
from tests.doubles.threads import together
from tests.families import FAMILIES, folder
from vdpp_core import RunConfig
from vdpp_core.models.patches import Patches
from vdpp_core.models.stand_ins import replaced
from vdpp_core.parallel import tensor
from vdpp_core.parallel.group import Group

MEDIUM = RunConfig(model="medium", random_weights=True, latent_shape=(1, 4, 4, 8, 8))


def first_call(family: str) -> tuple[nn.Module, tuple, dict[str, Any]]:
    """A family's denoiser, and the arguments of the first call of it in fp64."""
    pipeline = DiffusionPipeline.from_pretrained(folder(family))
    pipeline.set_progress_bar_config(disable=True)
    denoiser = getattr(pipeline, "unet", None) or pipeline.transformer
    calls: list[tuple[tuple, dict[str, Any]]] = []

    class SeenError(Exception):
        pass

    def see(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs))
        raise SeenError

    hook = denoiser.register_forward_pre_hook(see, with_kwargs=True)
    with pytest.raises(SeenError):
        pipeline(**FAMILIES[family].call, num_inference_steps=2, generator=torch.Generator().manual_seed(0))
    hook.remove()
    args, kwargs = replaced(calls[0], lambda one: one.double() if one.is_floating_point() else one)
    return nn.Module.to(denoiser, torch.float64).eval(), args, kwargs


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"wan-2.2"}))
def test_other_families(family):
    with one_thread(), torch.no_grad():
        denoiser, args, kwargs = first_call(family)
        expected = denoiser(*args, **kwargs | {"return_dict": False})[0]

        def work(group: Group) -> tuple[Tensor, int]:
            own, patches = copy.deepcopy(denoiser), Patches()
            tensor.split(own, group, patches)
            made = own(*args, **kwargs | {"return_dict": False})[0]
            return made, sum(one.numel() for one in own.parameters())

        for made, held in together(2, work):
            assert ((made - expected).norm() / expected.norm()).item() < 1e-12
            assert 0.5 < held / sum(one.numel() for one in denoiser.parameters()) < 0.8
