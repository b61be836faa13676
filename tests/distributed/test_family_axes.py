"""Runs of other pipelines than SVD's, split along cfg, frames and fsdp, against the official pipeline."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.conftest import one_thread
from tests.families import FAMILIES, PROMPT, folder, official
from vdpp_core import ConfigError, RunConfig, models
from vdpp_core.engine import preflight
from vdpp_core.parallel import loading
from vdpp_core.parallel.fsdp_units import units
from vdpp_core.parallel.process_groups import merged
from vdpp_core.predict import costs
from vdpp_core.runs import runfolder
from vdpp_core.runs.run import Run

STEPS = 3
FIELDS = ("prompt", "negative_prompt", "num_frames", "height", "width")
TRUE_CFG = {"true_cfg_scale": 3.0}
CFG, FSDP, FRAMES, TP = {"cfg": 2}, {"dp": 2, "fsdp": True}, {"frames": 2}, {"tp": 2}
EQUAL, CLOSE = 0.0, 1e-5  # shards are close: the official weights lie in a mapped file, aligned otherwise
UNETS = ("animatediff", "text-to-video", "i2vgen-xl")
CASES = (
    {  # name: (family, changes of its call, layout, further arguments, tolerance)
        "hunyuan-video cfg": ("hunyuan-video", TRUE_CFG, CFG, {}, EQUAL),
        "wan-2.2 cfg fsdp": ("wan-2.2", {}, CFG | {"fsdp": True}, {}, CLOSE),
        "animatediff sequential": ("animatediff", {}, {"dp": 2}, {"guidance_mode": "sequential"}, CLOSE),
        "wan sequential": ("wan", {}, {"dp": 2}, {"guidance_mode": "sequential"}, EQUAL),
        "wan frames": ("wan", {}, FRAMES, {}, CLOSE),
        "wan-2.2 frames": ("wan-2.2", {}, FRAMES, {}, CLOSE),
        "wan-image-to-video frames": ("wan-image-to-video", {}, FRAMES, {}, CLOSE),
        "ltx frames": ("ltx", {}, FRAMES, {}, CLOSE),
        "animatediff frames sequential": ("animatediff", {}, FRAMES, {"guidance_mode": "sequential"}, CLOSE),
        "animatediff frames cfg": ("animatediff", {}, FRAMES | CFG, {}, CLOSE),
        "wan tokens cfg": ("wan", {}, FRAMES | CFG, {}, CLOSE),  # two calls a step over cfg are not predicted
    }
    | {f"{family} frames": (family, {}, FRAMES, {}, CLOSE) for family in UNETS}
    | {f"{family} frames fsdp": (family, {"num_frames": 5}, FRAMES | {"fsdp": True}, {}, CLOSE) for family in UNETS}
    | {
        f"{family} cfg": (family, {}, CFG, {}, EQUAL if "wan" in family else CLOSE)
        for family in FAMILIES
        if family != "hunyuan-video"
    }
    | {
        f"{family} tp": (family, {}, TP, {}, CLOSE)
        for family in ("animatediff", "i2vgen-xl", "cogvideox", "ltx", "wan", "wan-image-to-video", "hunyuan-video")
    }
    | {
        "wan-2.2 tp, swapped from disk": ("wan-2.2", {}, TP, {"swap": "disk"}, CLOSE),
        "wan-2.2 tp, swapped from the host": ("wan-2.2", {}, TP, {"swap": "host"}, CLOSE),
        "wan-2.2 cfg tensors": ("wan-2.2", {}, TP | CFG, {}, CLOSE),
        "wan tp fsdp": ("wan", {}, TP | FSDP, {}, CLOSE),
        "ltx frames tp": ("ltx", {}, FRAMES | TP, {}, CLOSE),
        "text-to-video frames tp fsdp": ("text-to-video", {}, FRAMES | TP | {"fsdp": True}, {}, CLOSE),
        "wan-2.2 stages tp": ("wan-2.2", {}, TP | {"pp": 2}, {}, CLOSE),
    }
    | {f"{family} fsdp": (family, {}, FSDP, {}, CLOSE) for family in FAMILIES}
)


def call_of(family, changes):
    """A small call of a family, with its prompt as text."""
    call = FAMILIES[family].call
    return PROMPT | {name: call[name] for name in call if not name.endswith("_embeds")} | changes


def config(family, changes, **arguments):
    """A run of a small call of a family."""
    call = call_of(family, changes)
    fields = {name: call[name] for name in FIELDS if name in call}
    if "image" in call:
        fields["image"] = folder(family).parent / f"{family}.png"
        call["image"].save(fields["image"])
    rest = {name: value for name, value in call.items() if name not in FIELDS and name != "image"}
    known = {"model_id": str(folder(family)), "total_steps": STEPS, "save_latents": True, "device": "cpu", "threads": 1}
    return RunConfig(command="benchmark", warmup_samples=0, call=rest or None, **known, **fields, **arguments)


@pytest.fixture(scope="module")
def runs(warm_ranks, tmp_path_factory):
    """Name -> the run, of all cases, in two or four processes."""
    root, folders = tmp_path_factory.mktemp("axes"), {2: {}, 4: {}}
    for number, (name, (family, changes, layout, more, _)) in enumerate(CASES.items()):
        run = config(family, changes, parallel=layout, output_dir=root / str(number), **more)
        ranks = run.layout.world_size
        folders[ranks][name] = runfolder.create(preflight.complete(run, ranks))
    for ranks, those in folders.items():
        warm_ranks(ranks, *those.values(), timeout=200)
    return {name: Run(folder) for those in folders.values() for name, folder in those.items()}


@pytest.fixture
def two_ranks():
    """This process is the first of two ranks whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", CASES)
def test_latents_are_those_of_the_official_pipeline(name, runs):
    family, changes, _, _, tolerance = CASES[name]
    found = runs[name].load_latents(0)
    with one_thread():
        expected = official(folder(family), call_of(family, changes), STEPS, seed=0)
    assert found.shape == expected.shape
    assert ((found - expected).norm() / expected.norm()).item() <= tolerance


@pytest.mark.parametrize("name", [name for name in CASES if {"frames", "tp"} & {*name.replace(",", "").split()}])
def test_bytes_are_those_that_were_predicted(name, runs):
    result, found = runs[name].result(), runs[name].config
    predicted = [costs.cost(found, found.layout.place(rank).member) for rank in range(found.layout.world_size)]
    assert [round(gb * 1e9) for gb in result["lockstep_gb_per_step_per_rank"]] == [
        sum(cost.sent.values()) for cost in predicted
    ]
    for axis, kind in {"frames": "prediction", "tp": "partial sums"}.items():
        assert all((cost.sent.get(kind, 0) > 0) == (found.layout.sizes[axis] > 1) for cost in predicted)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_rank_holds_half_of_the_parameters(family, two_ranks):
    run, dtype = config(family, {}, parallel=FSDP), torch.bfloat16
    sharded = loading.structure(run, dtype, mesh=merged(run.layout.mesh("cpu"), "dp"))
    whole = models.load_denoisers(run, torch.device("cpu"), dtype)
    assert sharded.keys() == whole.keys()
    for part, denoiser in sharded.items():
        expected, found = (dict(each.named_parameters()) for each in (whole[part], denoiser))
        assert {name: one.dtype for name, one in found.items()} == {name: one.dtype for name, one in expected.items()}
        buffers = dict(whole[part].named_buffers())
        assert buffers.keys() == dict(denoiser.named_buffers()).keys()
        for name, buffer in denoiser.named_buffers():
            assert buffer.dtype == buffers[name].dtype
            assert torch.equal(buffer, buffers[name])
        total = sum(one.numel() for one in expected.values())
        assert sum(one.to_local().numel() for one in found.values()) < 0.51 * total
        inside = {id(one) for unit in units(denoiser) for one in unit.parameters()}
        assert (
            sum(one.numel() for one in found.values() if id(one) not in inside) < total / 2
        )  # embeddings: less in larger models


@pytest.mark.parametrize(
    ("family", "changes", "layout", "words"),
    [
        ("wan", {"guidance_scale": 1.0}, CFG, "cfg 2: buys nothing without guidance: WanPipeline has 1 pass in a step"),
        ("ltx", {"guidance_scale": 1.0}, CFG, "cfg 2: buys nothing without guidance: LTXPipeline has 1 pass in a step"),
        ("hunyuan-video", {}, CFG, "cfg 2: buys nothing without guidance: HunyuanVideoPipeline has 1 pass in a step"),
        (
            "wan",
            {},
            {"tp": 3},
            "tp 3: must divide at least one of these of WanTransformer3DModel: attention heads \\(2\\)",
        ),
        ("wan", {}, FRAMES | TP, "tp 2: times frames, 2, must divide the 2 attention heads of WanTransformer3DModel"),
        ("wan", {}, {"frames": 3}, "frames 3: must divide the 2 attention heads of WanTransformer3DModel"),
        ("ltx", {"width": 32, "height": 32}, {"frames": 2}, "frames 2: must divide the 3 tokens that transformer"),
        *(
            (
                family,
                {},
                FRAMES,
                "frames 2: diffusers has no plan to split .* by tokens, and only video UNets are split",
            )
            for family in ("hunyuan-video", "cogvideox")
        ),
        *((family, {"num_frames": 2}, {"frames": 3}, "frames 3: must be at most num_frames, 2$") for family in UNETS),
    ],
)
def test_what_cannot_be_split_is_refused_before_any_rank_starts(family, changes, layout, words):
    run = config(family, changes, parallel=layout)
    with pytest.raises(ConfigError, match=f"^{words}"):
        preflight.check(preflight.complete(run, run.layout.world_size), run.layout.world_size)
