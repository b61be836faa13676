"""A UNet split by frames, its ranks as threads: how exact it is, and how often its ranks meet."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, UNetSpatioTemporalConditionModel
from diffusers.models.resnet import TemporalConvLayer, TemporalResnetBlock
from diffusers.models.transformers.transformer_temporal import TransformerTemporalModel
from diffusers.models.unets.unet_i2vgen_xl import I2VGenXLTransformerTemporalEncoder
from diffusers.models.unets.unet_motion_model import AnimateDiffTransformer3D
from torch import Tensor, nn

from tests.conftest import one_thread
from tests.doubles.threads import together
from tests.families import FAMILIES, folder
from vdpp_core import Parallel, RunConfig, models
from vdpp_core.config.fields import MODELS
from vdpp_core.models.patches import Patches
from vdpp_core.models.stand_ins import replaced
from vdpp_core.parallel import frames
from vdpp_core.parallel.group import Group
from vdpp_core.predict import costs

Hook = Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]
RATIO = 10.0  # mean / standard deviation of the activations, as large models have them


def inputs(dtype: torch.dtype, num_frames: int = 5) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(num_frames)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "sample": noise(2, num_frames, 8, 9, 16),
        "timestep": torch.tensor(1.3),
        "encoder_hidden_states": noise(2, 1, 32),
        "added_time_ids": torch.tensor([[6, 127, 0.02]] * 2, dtype=dtype),
    }


def shifted(unet: nn.Module) -> nn.Module:
    """The UNet with the activations around its temporal layers moved to a mean of RATIO standard deviations."""

    def hook(shift: float) -> Hook:
        return lambda _, args: (args[0] + shift, *args[1:])

    for module in unet.modules():
        if isinstance(module, TemporalResnetBlock):
            seen: list[float] = []
            handle = module.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].std().item()))
            unet(**inputs(torch.float64))
            handle.remove()
            module.register_forward_pre_hook(hook(RATIO * seen[0]))
    return unet


@pytest.fixture(scope="module")
def unet() -> Any:
    load = UNetSpatioTemporalConditionModel.from_pretrained
    with one_thread(), torch.no_grad():
        return shifted(nn.Module.to(load(MODELS["tiny"], subfolder="unet").eval(), torch.float64))


def split_over(ranks: int, unet: nn.Module, given: dict[str, Any]) -> Tensor:
    """The prediction of so many ranks, the same on all of them."""

    def work(group: Any) -> Tensor:
        own = copy.deepcopy(unet)
        frames.split(own, group, Patches())
        return own(**given).sample

    first, *others = together(ranks, work)
    assert all(torch.equal(first, other) for other in others)
    return first


def in_double(value: Any) -> Any:
    return replaced(value, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


@pytest.fixture(scope="module", params=["animatediff", "text-to-video", "i2vgen-xl"])
def called(request: pytest.FixtureRequest) -> Any:
    """The UNet of another family in fp64, and what its pipeline calls it with, for five frames."""
    pipeline, calls = DiffusionPipeline.from_pretrained(folder(request.param)), list[Any]()
    pipeline.set_progress_bar_config(disable=True)

    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        calls.append(in_double((args, kwargs)))

    handle = pipeline.unet.register_forward_pre_hook(note, with_kwargs=True)
    with one_thread():
        pipeline(**FAMILIES[request.param].other_call, num_inference_steps=1, output_type="latent")
    handle.remove()
    return nn.Module.to(pipeline.unet, torch.float64), *calls[0]


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_unets_of_other_families_are_split_as_exactly(ranks: int, called: Any) -> None:
    unet, args, kwargs = called

    def work(group: Any) -> tuple[Any, Tensor, Tensor, Any]:
        own, patches = copy.deepcopy(unet), Patches()
        frames.split(own, group, patches)
        found, by_name = (
            own(*args, **kwargs),
            own(**kwargs | {"sample": args[0], "timestep": args[1], "return_dict": False}),
        )
        patches.undo()
        return type(found), found[0], by_name[0], own(*args, **kwargs)[0]

    with one_thread(), torch.no_grad():
        alone = unet(*args, **kwargs)
        for kind, split, by_name, again in together(ranks, work):
            assert kind is type(alone)
            assert ((split - alone[0]).norm() / alone[0].norm()).item() < 1e-12
            assert torch.equal(by_name, split)
            assert torch.equal(again, alone[0])


def test_every_temporal_layer_of_other_families_has_its_account(called: Any) -> None:
    """The all-to-alls of two ranks, there and back, together move as many bytes as a whole hidden state has."""
    args, kwargs = replaced(called[1:], lambda tensor: tensor.to("meta"))
    unet, whole, sent = copy.deepcopy(called[0]).to("meta"), Counter[str](), Counter[tuple[str, str]]()

    def names(*kinds: type[nn.Module]) -> set[str]:
        return {name for name, module in unet.named_modules() if isinstance(module, kinds)}

    convolutions = names(TemporalConvLayer)
    transformers = names(TransformerTemporalModel, AnimateDiffTransformer3D)
    encoder = names(I2VGenXLTransformerTemporalEncoder)
    handles = []
    for name, module in unet.named_modules():
        layer, _, within = name.partition(".transformer_blocks.")
        if layer in transformers | encoder and within.isdigit() == (layer in transformers):

            def note(_: nn.Module, given: Any, named: Any, layer: str = layer) -> None:
                whole[layer] += (*given, *named.values())[0].nbytes

            handles.append(module.register_forward_pre_hook(note, with_kwargs=True))
    with torch.no_grad():
        unet(*args, **kwargs)
        for handle in handles:
            handle.remove()
        for group in (Group(2, rank) for rank in range(2)):
            patches = Patches()
            frames.split(unet, group, patches)
            unet(*args, **kwargs)
            patches.undo()
            sent.update(group.sent)
    assert {layer for layer, kind in sent if kind == "halo"} == convolutions
    assert {layer for layer, kind in sent if kind == "statistics"} == transformers | convolutions
    assert {layer: size for (layer, kind), size in sent.items() if kind == "positions"} == whole


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ratio", [0, 3, 10, 30])
def test_a_group_norm_rounds_as_one_rank_does(ratio: float, dtype: torch.dtype) -> None:
    """Of activations with a mean of so many standard deviations, against fp64."""
    torch.manual_seed(ratio)
    norm = nn.GroupNorm(32, 64).to(dtype)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    hidden = (torch.randn(2, 64, 7, 9, 16) + ratio).to(dtype)

    def work(group: Any) -> Tensor:
        own = frames.Frames(group, None, 1)
        own.share_out(7, hidden.device, torch.float32)
        return own.activate(norm, hidden[:, :, own.shares[group.rank]], "layer")[0]

    with torch.no_grad():
        alone = nn.functional.silu(norm(hidden))
        truth = nn.functional.silu(copy.deepcopy(norm).double()(hidden.double()))
        split = torch.cat(together(3, work), dim=2)
    native, ours = ((one.double() - truth).norm() / truth.norm() for one in (alone, split))
    assert ours <= 1.5 * native, f"{ours:.3g} over three ranks, {native:.3g} on one"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_half_precision_is_as_exact_as_on_one_rank(ranks: int, dtype: torch.dtype, unet: Any) -> None:
    given = inputs(dtype)
    with one_thread(), torch.no_grad():
        half = nn.Module.to(copy.deepcopy(unet), dtype)
        exactly = nn.Module.to(copy.deepcopy(half), torch.float64)  # the rounded parameters
        truth = exactly(**{name: value.double() for name, value in given.items()}).sample
        alone, split = half(**given).sample, split_over(ranks, half, given)
    native, ours = ((prediction.double() - truth).norm() / truth.norm() for prediction in (alone, split))
    assert native > 0
    assert ours <= 1.5 * native, f"{ours:.3g} with {ranks} ranks, {native:.3g} with one"


def test_large_means_do_not_cancel_in_double_precision(unet: Any) -> None:
    given = inputs(torch.float64)
    with one_thread(), torch.no_grad():
        alone, split = unet(**given).sample, split_over(3, unet, given)
    assert ((split - alone).norm() / alone.norm()).item() < 1e-12


def test_another_number_of_frames_type_or_device_is_shared_out_anew(unet: Any) -> None:
    def work(group: Any) -> list[int]:
        own = copy.deepcopy(unet)
        frames.split(own, group, Patches())
        return [own(**inputs(torch.float64, count)).sample.shape[1] for count in (5, 2, 5)]

    with one_thread():
        assert together(2, work) == [[5, 2, 5]] * 2


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_only_the_first_step_brings_something_from_the_host(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `torch.tensor` makes of numbers, a GPU waits for."""
    config, made = RunConfig(parallel=Parallel()), list[Any]()
    unet = models.ready(config, models.on_meta(config, torch.float16))
    if ranks > 1:
        frames.split(unet, Group(ranks), Patches())
    given, tensor = {name: value.to("meta") for name, value in inputs(torch.float16).items()}, torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *args, **kwargs: made.append(args) or tensor(*args, **kwargs))
    counts = []
    for _ in range(3):
        with torch.no_grad():
            unet(**given)
        counts.append(len(made))
    assert counts == [int(ranks > 1)] * 3


@pytest.mark.parametrize(("model", "expected"), [("tiny", 25), ("svd", 77)])  # 41 and 121 with two a convolution
def test_how_often_ranks_meet_in_a_step(model: str, expected: int) -> None:
    config = RunConfig(model=model, random_weights=True, device="cpu", parallel=Parallel(frames=2))
    assert costs.cost(config).exchanges == expected
