"""Experts by timestep: one UNet in the official pipeline, found in a pipeline, held by stages, swapped; bad input."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from diffusers import StableVideoDiffusionPipeline, UNetSpatioTemporalConditionModel
from PIL import Image

from tests import experts, families
from tests.conftest import one_thread
from tests.unit.test_many_ranks import rank_of
from vdpp_core import ConfigError, Parallel, RunConfig, models
from vdpp_core.compare import peers_report
from vdpp_core.config import family
from vdpp_core.config.execution import resolve
from vdpp_core.config.fields import EXAMPLE_IMAGE, MODELS
from vdpp_core.engine import preflight, worker
from vdpp_core.engine.measure import Stopwatch
from vdpp_core.engine.swapping import Swap
from vdpp_core.models.experts import Experts
from vdpp_core.models.stage import Stage
from vdpp_core.parallel import loading
from vdpp_core.parallel.rendezvous import Ranks
from vdpp_core.runs import runfolder
from vdpp_core.runs.events import EventLog
from vdpp_core.runs.run import Run

CPU, WEIGHTS = torch.device("cpu"), "diffusion_pytorch_model.safetensors"
WAN = "wan-2.2"
SVD = {"height": 64, "width": 64, "num_frames": 2, "image": EXAMPLE_IMAGE}


def config_of(model: Path, **more: Any) -> RunConfig:
    """A run of either model with experts."""
    small: dict[str, Any] = SVD
    if "wan" in model.name:
        small = {"prompt": "a red ball", "height": 32, "width": 48, "num_frames": 9}
    known: dict[str, Any] = {"model_id": str(model), "total_steps": 6, "threads": 1, "device": "cpu"}
    return RunConfig(**(known | small | more))


def test_experts_are_what_a_user_gets_who_replaces_the_unet_in_mid_run() -> None:
    pipeline = StableVideoDiffusionPipeline.from_pretrained(str(MODELS["tiny"]))
    pipeline.set_progress_bar_config(disable=True)
    unets = experts.two_unets()
    pipeline.unet = unets["high"]

    def after(pipe: Any, step: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 1:  # two of three timesteps are above the boundary
            pipe.unet = unets["low"]
        return tensors

    with one_thread():
        found = experts.official(3, 2, seed=5)
        expected = pipeline(
            Image.open(EXAMPLE_IMAGE).convert("RGB"),
            **{"height": 64, "width": 64, "num_frames": 2, "num_inference_steps": 3},
            generator=torch.Generator().manual_seed(5),
            output_type="latent",
            callback_on_step_end=after,
        ).frames
    assert pipeline.unet is unets["low"]
    assert torch.equal(found, expected)


def test_experts_are_saved_and_loaded(tmp_path: Path) -> None:
    made = Experts(experts.two_unets(), [0.2])
    made.save_pretrained(tmp_path / "unet")
    loaded = Experts.from_pretrained(tmp_path, subfolder="unet")
    assert (loaded.config.names, loaded.config.boundaries) == (["high", "low"], [0.2])
    assert all(map(torch.equal, made.state_dict().values(), loaded.state_dict().values()))
    assert loaded.state_dict().keys() == made.state_dict().keys()
    assert [loaded.name_for(timestep) for timestep in (1.6, 0.2, 0.19, torch.tensor(-1.5))] == ["high"] * 2 + [
        "low"
    ] * 2
    assert family.experts(str(tmp_path)) == ["high", "low"]
    assert loaded.config.in_channels == 8
    assert loaded.add_embedding is loaded.experts["high"].add_embedding


@pytest.mark.parametrize(
    ("setting", "value"), [("in_channels", 12), ("cross_attention_dim", 64), ("addition_time_embed_dim", 16)]
)
def test_experts_of_different_shapes_are_refused(setting: str, value: int) -> None:
    high = UNetSpatioTemporalConditionModel.from_config(
        models.load(config_of(experts.folder()), CPU, torch.float32, "unet/high").config
    )
    low = UNetSpatioTemporalConditionModel.from_config({**high.config, setting: value})
    with pytest.raises(ValueError, match=f"experts: must all take and return the same shapes: {setting} is"):
        Experts({"high": high, "low": low}, [0.2])


@pytest.mark.parametrize("boundaries", [[], [0.2, 0.1], [float("nan")], [float("inf")], ["a"]])
def test_experts_without_as_many_boundaries_are_refused(boundaries: list[Any]) -> None:
    with pytest.raises(ValueError, match="experts: must have falling boundaries, one fewer than its 2 experts"):
        Experts({"high": SimpleNamespace(), "low": SimpleNamespace()}, boundaries)


@pytest.mark.parametrize("ratio", [0.875, 0.5, 0.97, 0.0, None])
@pytest.mark.parametrize("solver", families.FAMILIES[WAN].solvers)
def test_experts_are_found_as_the_official_pipeline_calls_them(
    solver: str, ratio: float | None, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(families.folder(WAN, solver), tmp_path / "wan"))
    index = json.loads((model / "model_index.json").read_text())
    (model / "model_index.json").write_text(json.dumps(index | {"boundary_ratio": ratio}))
    pipeline = diffusers.DiffusionPipeline.from_pretrained(model)
    pipeline.set_progress_bar_config(disable=True)
    seen: list[tuple[str, float]] = []  # one for each timestep, whose passes follow one another
    for name in ("transformer", "transformer_2"):

        def note(_module: Any, _args: Any, kwargs: dict[str, Any], name: str = name) -> None:
            if (now := (name, float(kwargs["timestep"][0]))) not in seen:
                seen.append(now)

        getattr(pipeline, name).register_forward_pre_hook(note, with_kwargs=True)
    config = config_of(model, num_frames=1)
    call = {"prompt": "a", "num_inference_steps": 6, "height": 32, "width": 48, "num_frames": 1}
    pipeline(**call, output_type="latent")
    assert len(seen) == 6
    used = tuple((name, len(list(steps))) for name, steps in itertools.groupby(name for name, _ in seen))
    found = preflight.complete(config, 2)
    assert found.experts == used
    sizes = [len(steps) for steps in found.stages()]
    assert sizes == ([3, 3] if len(used) == 1 else [steps for _, steps in used])


@pytest.mark.parametrize(
    ("layout", "split", "held"),
    [
        (Parallel(pp=2), None, [["high"], ["low"]]),
        (Parallel(pp=3), None, [["high"], ["high"], ["low"]]),
        (Parallel(pp=2), "even", [["high"], ["high", "low"]]),
        (Parallel(stage_ranks=(1, 2)), None, [["high"], ["low"], ["low"]]),
        (Parallel(), None, [["high", "low"]]),
    ],
)
def test_a_stage_holds_only_the_experts_of_its_steps(
    layout: Parallel, split: str | None, held: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker._Rank, "_encode", lambda _: None)
    config = config_of(experts.folder(), split=split, parallel=layout, output_dir=tmp_path / "run")
    run = Run(runfolder.create(preflight.complete(config, layout.world_size)))
    execution = resolve(run.config, layout.world_size)
    for number, names in enumerate(held):
        ranks = Ranks(number, layout.world_size, number, layout.world_size, under_torchrun=False)
        with rank_of(layout, number) as world, EventLog(run.folder, number) as log:
            rank = worker._Rank(run, execution, ranks, world, log, None)  # type: ignore[arg-type]
            rank._load()
        assert list(rank.denoisers) == [f"unet/{name}" for name in names]
        sizes = {name: sum(one.nbytes for one in unet.parameters()) for name, unet in rank.denoisers.items()}
        reachable = sum(one.nbytes for one in rank.stage.pipeline.unet.parameters())
        assert reachable == sum(sizes.values()) > 8e6 * len(names)


@pytest.mark.parametrize("model", [experts.folder, lambda: families.folder(WAN)], ids=["svd", WAN])
def test_experts_are_swapped_from_host_memory(model: Callable[[], Path], tmp_path: Path) -> None:
    config = preflight.complete(config_of(model(), swap="host", output_dir=tmp_path / "run"), 1)
    names = models.denoisers(config)
    whole = models.load_denoisers(config, CPU, torch.float32)
    stage, prepared = Stage.around(config, {}, CPU, torch.float32, Stopwatch(CPU)), list[Any]()
    with EventLog(runfolder.create(config), 0) as log:
        load, skeleton = (partial(one, config, dtype=torch.float32) for one in (loading.load, loading.structure))
        swap = Swap(config, stage, CPU, log, load, lambda names: skeleton(only=names), prepared.append)
        for name in (*names, *names, names[-1]):
            swap.use(name)
            assert list(swap.resident) == [name]
            assert stage.official.denoisers[name] is swap.resident[name] is prepared[-1]
            found, expected = swap.resident[name].state_dict(), whole[name].state_dict()
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], expected[key]) for key in expected)
            assert not any(tensor.is_meta for tensor in swap.resident[name].buffers())
    assert len(prepared) == 4  # the last was there
    swaps = [event for event in Run(tmp_path / "run").events() if event.kind == "swapped"]
    assert [event.expert for event in swaps] == [*names, *names]
    assert swaps[0].size == sum(one.nbytes for one in whole[names[0]].parameters())


def edited(name: str, **changes: Any) -> Callable[[Path], None]:
    """Change settings in a pipeline's folder; None stands for a setting that is missing."""

    def edit(model: Path) -> None:
        settings = json.loads((model / name).read_text()) | changes
        (model / name).write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))

    return edit


def without(name: str) -> Callable[[Path], None]:
    return lambda model: (model / name).unlink()


def cut(name: str) -> Callable[[Path], None]:
    return lambda model: (model / name).write_bytes((model / name).read_bytes()[:-1000])


UNET = "unet/config.json"
NAMES = "model_id .*: must name two experts or more, each a word of its own: names is "
BOUNDARIES = "model_id .*: must have falling boundaries, one fewer than its 2 experts: boundaries is "
OTHER_SHAPE = {"in_channels": 20, "out_channels": 20}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (edited(UNET, names="high"), f"{NAMES}'high', in {UNET}"),
        (edited(UNET, names=None), f"{NAMES}None"),
        (edited(UNET, names=["high"]), NAMES),
        (edited(UNET, names=["high", "high"]), NAMES),
        (edited(UNET, names=["high", "../low"]), NAMES),
        (edited(UNET, names=["high", 3]), NAMES),
        (edited(UNET, boundaries=None), f"{BOUNDARIES}None"),
        (edited(UNET, boundaries=0.2), f"{BOUNDARIES}0.2"),
        (edited(UNET, boundaries=["a"]), BOUNDARIES),
        (edited(UNET, boundaries=[float("nan")]), BOUNDARIES),
        (
            edited(UNET, names=["a", "b", "c"], boundaries=[0.1, 0.2]),
            ".* falling boundaries, one fewer than its 3 experts",
        ),
        (edited("unet/low/config.json", cross_attention_dim=64), "model_id .*: must all take .*: cross_attention_dim"),
        (edited("unet/low/config.json", block_out_channels="x"), "model_id .*: must be a whole pipeline: ValueError"),
        (without("unet/low/config.json"), "model_id .*: must be a pipeline's folder, it has no unet/low/config.json"),
        (without(f"unet/low/{WEIGHTS}"), r"model_id .*: must be a pipeline's folder with unet/low/\*.safetensors"),
        (cut(f"unet/low/{WEIGHTS}"), f"model_id .*unet/low/{WEIGHTS}: is damaged or cut off"),
        (
            edited("model_index.json", unet=["diffusers", "UNetSpatioTemporalConditionModel"]),
            "model_id .*: must have a Experts: model_index.json names UNetSpatioTemporalConditionModel",
        ),
    ],
)
def test_damaged_experts_are_named_before_the_start(change: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    assert_refused(shutil.copytree(experts.folder(), tmp_path / "svd"), change, words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            edited("transformer_2/config.json", **OTHER_SHAPE),
            "model_id .*: must all take .* in_channels is 16 of trans",
        ),
        (without("transformer_2/config.json"), "model_id .*folder, it has no transformer_2/config.json"),
        (without(f"transformer_2/{WEIGHTS}"), f"model_id .*/transformer_2: must have {WEIGHTS}"),
        (cut(f"transformer_2/{WEIGHTS}"), f"model_id .*/transformer_2/{WEIGHTS}: is damaged or cut off"),
        (
            lambda model: (model / "transformer_2/config.json").write_text("[]"),
            "model_id .*: must have whole JSON in tr",
        ),
    ],
)
def test_a_damaged_second_transformer_is_named_before_the_start(
    change: Callable[[Path], Any], words: str, tmp_path: Path
) -> None:
    assert_refused(shutil.copytree(families.folder(WAN), tmp_path / "wan"), change, words)


def assert_refused(model: Path, change: Callable[[Path], Any], words: str) -> None:
    change(model)
    with pytest.raises(ConfigError, match=f"^{words}") as refused:
        preflight.check(preflight.complete(config_of(model), 2), 2)
    assert "\n" not in str(refused.value)


EXPERTS, PLAIN = experts.folder, lambda: Path(str(MODELS["tiny"]))
NEEDS = "split boundary: needs at least 2 stages (pp), for 4 of unet/high and 2 of unet/low"
ONE_DENOISER = "only for a model with experts, such as Wan 2.2 A14B: this has one denoiser"
NOT_SPLIT = "swap disk: only for ranks that run all steps with whole parameters: not with pp or fsdp"


@pytest.mark.parametrize(
    ("model", "ranks", "arguments", "words"),
    [
        (EXPERTS, 1, {"split": "boundary", "total_steps": 1}, "split boundary: the boundary leaves a stage without st"),
        (EXPERTS, 1, {"split": "boundary"}, NEEDS),
        (EXPERTS, 3, {"split": "boundary", "parallel": Parallel(stage_ranks=(3,))}, NEEDS),
        (PLAIN, 2, {"split": "boundary"}, f"split boundary: {ONE_DENOISER}"),
        (PLAIN, 1, {"swap": "disk"}, f"swap disk: {ONE_DENOISER}"),
        (EXPERTS, 2, {"swap": "disk"}, NOT_SPLIT),
        (EXPERTS, 2, {"swap": "disk", "parallel": Parallel(dp=2, fsdp=True)}, NOT_SPLIT),
        (EXPERTS, 1, {"swap": "disk", "total_steps": 1}, "swap disk: only for a model with several experts: all steps"),
        (EXPERTS, 1, {"swap": "host"}, "swap host: needs CUDA: on cpu the experts would be in the host's memory any"),
        (EXPERTS, 1, {"swap_batch": 2}, "swap_batch 2: only with swap"),
        (EXPERTS, 2, {"split": "even", "stage_weights": (1, 2)}, "split even: must be weights where stage_weights are"),
        (EXPERTS, 2, {"image": Path("nowhere.png")}, "image nowhere.png: No such file"),
        (EXPERTS, 3, {"parallel": Parallel(stage_ranks=(1, 3))}, "stage_ranks 1 3: pp 1+3 needs 4 ranks, not 3"),
        (
            EXPERTS,
            7,
            {"parallel": Parallel(stage_ranks=(1,) * 7)},
            "stage_ranks 1 1 1 1 1 1 1: must be at most total_s",
        ),
    ],
)
def test_what_experts_cannot_do_is_one_line(
    model: Callable[[], Path], ranks: int, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        preflight.check(preflight.complete(config_of(model(), **arguments), ranks), ranks)
    assert str(refused.value).startswith(words)
    assert "\n" not in str(refused.value)


def test_experts_have_no_peers() -> None:
    with pytest.raises(
        ConfigError, match=r"model_id .*: not with peers: they are .* Stable Video Diffusion with one UNet"
    ):
        peers_report.configuration({"model_id": str(experts.folder())}, 2, 2)
