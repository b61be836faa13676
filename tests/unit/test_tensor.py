"""Layers cut over ranks: how exact they are, what each rank holds and sends, and what stays whole."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from tests.conftest import one_thread
from tests.doubles.threads import together
from tests.families import FAMILIES, folder
from vdpp_core import ConfigError, Parallel, RunConfig, models
from vdpp_core.config.execution import resolve
from vdpp_core.models import weights
from vdpp_core.models.patches import Patches
from vdpp_core.models.stand_ins import replaced
from vdpp_core.parallel import loading, tensor
from vdpp_core.parallel.group import Group
from vdpp_core.predict import costs, memory

MEDIUM = RunConfig(model="medium", random_weights=True, latent_shape=(1, 4, 4, 8, 8))
LOADING = threading.Lock()


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


def test_each_rank_loads_its_pieces_and_predicts_the_same():
    """The medium UNet with random weights: 3, 6 or 12 heads, 384 to 1536 columns, 32 groups of channels."""
    cpu, dtype = torch.device("cpu"), torch.float32
    generator = torch.Generator().manual_seed(0)
    given = {
        "sample": torch.randn(1, 2, 8, 8, 8, generator=generator),
        "timestep": torch.tensor(1.3),
        "encoder_hidden_states": torch.randn(1, 1, 256, generator=generator),
        "added_time_ids": torch.tensor([[6, 127, 0.02]]),
    }
    with one_thread(), torch.no_grad():
        expected = models.load(MEDIUM, cpu, dtype)(**given).sample

        def work(group: Group) -> tuple[Tensor, int]:
            with LOADING:  # random weights come from the process's generator
                made = loading.structure(MEDIUM, dtype, tp=group)
                loading.materialise(made, MEDIUM, cpu, dtype)
            (unet,) = made.values()
            return unet(**given).sample, sum(one.nbytes for one in unet.parameters())

        found = together(2, work)
    for made, held in found:
        assert ((made - expected).norm() / expected.norm()).item() < 1e-5
        assert held == costs.held(MEDIUM.replace(parallel=Parallel(tp=2), device="cpu", dtype="fp32"))


def test_no_rank_reads_a_whole_tensor_that_is_cut(monkeypatch):
    tiny, read = RunConfig(latent_shape=(1, 4, 5, 8, 8)), Counter[str]()

    class Slice:
        """A slice of a safetensors file that counts what is read of it."""

        def __init__(self, name: str, inner: Any) -> None:
            self.name, self.inner = name, inner

        def __getitem__(self, index: Any) -> Tensor:
            part = self.inner[index]
            read[self.name] += part.numel()
            return part

    stored = weights.stored
    monkeypatch.setattr(weights, "stored", lambda *given: ((name, Slice(name, rows)) for name, rows in stored(*given)))
    (unet,) = loading.load(tiny, torch.device("cpu"), torch.float32, None, tp=Group(2, 1)).values()
    held = {name: one.numel() for name, one in unet.named_parameters()}
    assert read == held
    whole, pieces = models.on_meta(tiny, torch.float32), tensor.pieces_of(unet)
    assert len(pieces) > 100
    assert all(2 * held[name] == whole.get_parameter(name).numel() for name in pieces)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, "20 of 64 attentions stay whole: 2 does not divide 3 heads"),
        (3, "22 of 22 resnets stay whole: 3 does not divide 32 groups of channels"),
    ],
)
def test_what_stays_whole_is_said(ranks, words):
    laid = MEDIUM.replace(parallel=Parallel(tp=ranks), device="cpu", threads=1)
    assert words in (tensor.left_whole(models.on_meta(laid, torch.float32), ranks) or "")
    assert any(line.startswith(f"tp {ranks}: ") and words in line for line in memory.before_start(laid, resolve(laid)))


def test_what_cannot_be_cut_is_refused():
    unet = models.on_meta(MEDIUM, torch.float32)
    with pytest.raises(ConfigError, match=r"^tp 7: must divide at least one of these of UNetSpatioTemporal\w+: "):
        tensor.check({"unet": unet}, 7)
    assert "no attention" in (tensor.refusal(nn.Linear(1, 1), 2) or "")
    with pytest.raises(ConfigError, match=r"^tp 2: not with model dummy"):
        RunConfig(model="dummy", parallel=Parallel(tp=2))


def test_undoing_puts_the_pieces_together_again():
    whole = models.load(RunConfig(), torch.device("cpu"), torch.float32)

    def work(group: Group) -> bool:
        own, patches = copy.deepcopy(whole), Patches()
        tensor.split(own, group, patches)
        assert tensor.pieces_of(own)
        patches.undo()
        found = own.state_dict()
        return all(torch.equal(found[name], value) for name, value in whole.state_dict().items())

    assert together(2, work) == [True, True]


def test_pieces_are_not_saved_as_a_model(tmp_path):
    unet = models.on_meta(RunConfig(latent_shape=(1, 4, 5, 8, 8)), torch.float32)
    tensor.split(unet, Group(2), Patches())
    with pytest.raises(ValueError, match=r"^this rank holds only pieces of the parameters: vdpp_core.restore comes"):
        unet.save_pretrained(tmp_path)
