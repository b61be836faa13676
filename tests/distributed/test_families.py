"""Each family under torchrun, as stages, replicas and both: the latents of the official pipeline, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import families
from tests.conftest import one_thread
from tests.families import FAMILIES
from vdpp_core import Parallel, RunConfig
from vdpp_core.engine import preflight
from vdpp_core.runs import runfolder
from vdpp_core.runs.run import Run

STEPS, SAMPLES = 5, 2
LAYOUTS = {  # name: (layout, weights of the stages)
    "uneven stages": (Parallel(pp=3), (1.0, 3.0, 1.0)),
    "replicas": (Parallel(dp=2), None),
    "replicas of stages": (Parallel(dp=2, pp=2), None),
}
FIELDS = ("prompt", "negative_prompt", "num_frames", "height", "width")
CALLS = [(name, which) for name in FAMILIES for which in ("call", "other_call")]


def arguments(name: str, which: str, root: Path, solver: str | None = None) -> dict[str, Any]:
    """A family's call as arguments of RunConfig. Where it has embeddings instead of a prompt, it gets a prompt."""
    call = dict(getattr(FAMILIES[name], which))
    fields = {field: call.pop(field) for field in FIELDS if field in call}
    if image := call.pop("image", None):
        fields["image"] = root / f"{name}-{which}.png"
        image.save(fields["image"])
    if "prompt_embeds" in call:
        call = {key: value for key, value in call.items() if "embeds" not in key}
        fields["prompt"] = "a red ball"
    return {"model_id": str(families.folder(name, solver)), "call": call, **fields}


@functools.cache
def official(name: str, which: str, sample: int, solver: str | None = None) -> torch.Tensor:
    call = dict(getattr(FAMILIES[name], which))
    if "prompt_embeds" in call:
        call = {key: value for key, value in call.items() if "embeds" not in key} | {"prompt": "a red ball"}
    with one_thread():
        return families.official(families.folder(name, solver), call, STEPS, sample)


@pytest.fixture(scope="module")
def run_folders(
    warm_ranks: Callable[..., None], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[Any, Path]]:
    """run_folders(layout): both calls of each family -> run folder; the ranks do them one after another."""

    @functools.cache
    def run(name: str) -> dict[Any, Path]:
        root, (layout, weights) = tmp_path_factory.mktemp("families"), LAYOUTS[name]
        folders = {}
        for number, call in enumerate(CALLS):
            config = RunConfig(
                total_steps=STEPS, num_samples=SAMPLES, warmup_samples=0, threads=1, save_latents=True,
                parallel=layout, stage_weights=weights, output_dir=root / str(number), **arguments(*call, root),
            )  # fmt: skip
            folders[call] = runfolder.create(preflight.complete(config, layout.world_size))
        warm_ranks(layout.world_size, *folders.values())
        return folders

    return run


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "which"), CALLS)
def test_latents_are_those_of_the_official_pipeline(
    name: str, which: str, layout: str, run_folders: Callable[[str], dict[Any, Path]]
):
    run = Run(run_folders(layout)[name, which])
    result = run.result()
    assert result is not None
    assert (result["outcome"], result["samples_finished"]) == ("ok", SAMPLES)
    for sample in range(SAMPLES):
        assert torch.equal(run.load_latents(sample), official(name, which, sample)), f"sample {sample}"
