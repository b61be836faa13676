"""Experts by timestep, split at their boundary, on copies of stages, and swapped: the official pipeline's latents."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import experts, families
from tests.conftest import one_thread
from vdpp_core import Parallel, RunConfig
from vdpp_core.config.fields import EXAMPLE_IMAGE
from vdpp_core.engine import preflight
from vdpp_core.runs import event_types as kinds
from vdpp_core.runs import runfolder
from vdpp_core.runs.run import Run

STEPS, SAMPLES = 6, 5
SVD: dict[str, Any] = {"num_frames": 2, "height": 64, "width": 64, "image": EXAMPLE_IMAGE}
EQUAL, CLOSE = 0.0, 1e-5
BOTH = ("svd", "wan-2.2")
Case = tuple[dict[str, Any], dict[str, Any]]  # layout, further arguments
FSDP = {"fsdp": True}
CASES: dict[str, Case] = {
    "swapped, one sample after the other": ({}, {"swap": "disk"}),
    "swapped, two samples at a time": ({"dp": 2}, {"swap": "disk", "swap_batch": 2, "warmup_samples": 1}),
    "a stage for each expert": ({"pp": 2}, {}),
    "stages across the boundary": ({"pp": 2}, {"split": "even"}),
    "three stages": ({"pp": 3}, {}),
    "2+1": ({"stage_ranks": (2, 1)}, {"warmup_samples": 1}),
    "1+3": ({"stage_ranks": (1, 3)}, {}),
    "more copies than samples": ({"stage_ranks": (3, 2)}, {"num_samples": 1}),
    "replicas of 1+2": ({"dp": 2, "stage_ranks": (1, 2)}, {}),
    "2+1, sharded": ({"stage_ranks": (2, 1)} | FSDP, {"warmup_samples": 3}),
    "replicas of 1+2, sharded": ({"dp": 2, "stage_ranks": (1, 2)} | FSDP, {"warmup_samples": 1}),
    "1+2, guidance split": ({"stage_ranks": (1, 2), "cfg": 2}, {}),
}  # fmt: skip
RUNS = [(model, name) for model in BOTH for name in CASES]


def config_of(model: str, layout: dict[str, Any], **more: Any) -> RunConfig:
    """A run of one of the two models with experts."""
    known: dict[str, Any] = {"command": "benchmark", "total_steps": STEPS, "num_samples": SAMPLES, "warmup_samples": 0}
    known |= {"threads": 1, "device": "cpu", "save_latents": True, "parallel": Parallel(**layout)}
    if model == "svd":
        return RunConfig(**(known | {"model_id": str(experts.folder())} | SVD | more))
    call = dict(families.FAMILIES[model].call)
    fields = {name: call.pop(name) for name in ("prompt", "negative_prompt", "num_frames", "height", "width")}
    return RunConfig(**(known | {"model_id": str(families.folder(model)), "call": call} | fields | more))


@functools.cache
def official(model: str, seed: int) -> torch.Tensor:
    """Latents as the pipeline has them."""
    with one_thread():
        if model == "svd":
            return experts.official(STEPS, SVD["num_frames"], seed)
        return families.official(families.folder(model), families.FAMILIES[model].call, STEPS, seed)


def latents_of(run: Run, sample: int) -> torch.Tensor:
    """Latents of a run as the pipeline has them."""
    found = run.load_latents(sample)
    return found.transpose(1, 2) if run.config.is_svd else found


@pytest.fixture(scope="module")
def runs(warm_ranks: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Run]:
    """(model, case) -> the run; those of as many ranks follow one another in the same processes."""
    root, folders = tmp_path_factory.mktemp("experts"), defaultdict[int, dict[tuple[str, str], Path]](dict)
    for number, (model, name) in enumerate(RUNS):
        layout, more = CASES[name]
        config = config_of(model, layout, output_dir=root / str(number), **more)
        ranks = config.layout.world_size
        folders[ranks][model, name] = runfolder.create(preflight.complete(config, ranks))
    for ranks, those in folders.items():
        warm_ranks(ranks, *those.values(), timeout=120)
    return {key: Run(folder) for those in folders.values() for key, folder in those.items()}


@pytest.mark.parametrize(("model", "name"), RUNS)
def test_latents_are_those_of_the_official_pipeline(model: str, name: str, runs: dict[tuple[str, str], Run]) -> None:
    run = runs[model, name]
    result, tolerance = run.result() or {}, CLOSE if "sharded" in name and model != "svd" else EQUAL
    tolerance = CLOSE if "guidance" in name and model == "svd" else tolerance
    assert (result["outcome"], result["samples_finished"]) == ("ok", run.config.num_samples)
    for sample in range(run.config.num_samples):
        found, expected = latents_of(run, sample), official(model, sample)
        assert ((found - expected).norm() / expected.norm()).item() <= tolerance, f"sample {sample}"


@pytest.mark.parametrize(("model", "name"), RUNS)
def test_copies_take_samples_in_turn(model: str, name: str, runs: dict[tuple[str, str], Run]) -> None:
    run = runs[model, name]
    config, layout = run.config, run.config.layout
    did: dict[int, list[int]] = defaultdict(list)
    for step in kinds.of(run.events(), kinds.Step):
        if step.sample >= 0 and step.sample not in did[step.rank]:
            did[step.rank].append(step.sample)
    for rank in range(layout.world_size):
        place = layout.place(rank)
        turns = enumerate(range(place.replica, config.num_samples, layout.dp))
        assert did[rank] == [sample for turn, sample in turns if turn % layout.copies[place.stage] == place.copy]
