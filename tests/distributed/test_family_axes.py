"""Runs of other pipelines than SVD's, split along cfg, frames and fsdp, against the official pipeline."""

from __future__ import annotations

import pytest
import torch

from tests.families import FAMILIES, folder, official
from vdpp_core import RunConfig
from vdpp_core.engine import preflight
from vdpp_core.runs import runfolder
from vdpp_core.runs.run import Run

STEPS = 3
FIELDS = ("prompt", "negative_prompt", "num_frames", "height", "width")
TRUE_CFG = {"negative_prompt": "blurry", "true_cfg_scale": 3.0}
CFG, FSDP, FRAMES = {"cfg": 2}, {"dp": 2, "fsdp": True}, {"frames": 2}
EQUAL, CLOSE = 0.0, 1e-5  # without sums in another order, and with
CASES = {  # name: (family, changes of its call, layout, further arguments, tolerance)
    "animatediff cfg": ("animatediff", {}, CFG, {}, CLOSE),
    "wan cfg": ("wan", {}, CFG, {}, EQUAL),
    "wan-2.2 cfg": ("wan-2.2", {}, CFG, {}, EQUAL),
    "hunyuan-video cfg": ("hunyuan-video", TRUE_CFG, CFG, {}, EQUAL),
    "animatediff fsdp": ("animatediff", {}, FSDP, {}, EQUAL),
    "wan-2.2 fsdp": ("wan-2.2", {}, FSDP, {}, EQUAL),
    "wan frames": ("wan", {}, FRAMES, {}, CLOSE),
    "ltx frames": ("ltx", {}, FRAMES, {}, CLOSE),
    "wan-2.2 cfg fsdp": ("wan-2.2", {}, CFG | {"fsdp": True}, {}, EQUAL),
    "animatediff sequential": ("animatediff", {}, {"dp": 2}, {"guidance_mode": "sequential"}, CLOSE),
}


def config(family, changes=(), **arguments):
    """A run of a small call of a family."""
    call = FAMILIES[family].call | dict(changes)
    fields = {name: call[name] for name in FIELDS if name in call}
    rest = {name: value for name, value in call.items() if name not in FIELDS and name != "image"}
    known = {"model_id": str(folder(family)), "total_steps": STEPS, "save_latents": True, "device": "cpu", "threads": 1}
    return RunConfig(command="benchmark", warmup_samples=0, call=rest or None, **known, **fields, **arguments)


@pytest.fixture(scope="module")
def runs(warm_ranks, tmp_path_factory):
    root, folders = tmp_path_factory.mktemp("axes"), {}
    for number, (name, (family, changes, layout, more, _)) in enumerate(CASES.items()):
        run = config(family, changes, parallel=layout, num_samples=2, output_dir=root / str(number), **more)
        folders[name] = runfolder.create(preflight.complete(run, 2))
    warm_ranks(2, *folders.values())
    return {name: Run(folder) for name, folder in folders.items()}


@pytest.mark.parametrize("name", CASES)
def test_latents_are_those_of_the_official_pipeline(name, runs):
    family, changes, _, _, tolerance = CASES[name]
    assert runs[name].result()["outcome"] == "ok"
    for sample in range(2):
        found = runs[name].load_latents(sample)
        expected = official(folder(family), FAMILIES[family].call | changes, STEPS, seed=sample)
        assert found.shape == expected.shape
        error = ((found - expected).norm() / expected.norm()).item()
        print(name, "equal" if torch.equal(found, expected) else error)
        assert error <= tolerance
