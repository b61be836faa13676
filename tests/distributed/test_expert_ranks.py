"""Experts by timestep, split at their boundary, on copies of stages, and swapped: the official pipeline's latents."""

from __future__ import annotations

import functools
import os
import signal
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageOps

import launch
from tests import experts, families
from tests.conftest import one_thread
from tests.patience import result_of
from vdpp_core import Parallel, RunConfig
from vdpp_core.config.fields import EXAMPLE_IMAGE
from vdpp_core.engine import preflight
from vdpp_core.plots import perfetto
from vdpp_core.runs import event_types as kinds
from vdpp_core.runs import files, results, runfolder
from vdpp_core.runs.run import Run

STEPS, SAMPLES = 6, 4
SVD: dict[str, Any] = {"num_frames": 2, "height": 64, "width": 64, "image": EXAMPLE_IMAGE}
EQUAL, CLOSE = 0.0, 1e-5  # where guidance is split; of other pipelines than SVD, where parameters are sharded
WAN = "wan-2.2"
FSDP, AS_READY = {"fsdp": True}, {"command": "generate", "decode": "as-ready", "compare_official": True}
AT_END = AS_READY | {"decode": "at-end"}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], float]] = {  # model, layout, further arguments, tolerance
    "swapped, one sample after the other": ("svd", {}, {"swap": "disk"}, EQUAL),
    "swapped, two samples at a time": (WAN, {"dp": 2}, {"swap": "disk", "swap_batch": 2, "num_samples": 5}, EQUAL),
    "a stage for each expert": (WAN, {"pp": 2}, {}, EQUAL),
    "a stage for each UNet": ("svd", {"pp": 2}, {"warmup_samples": 1}, EQUAL),
    "stages across the boundary": ("svd", {"pp": 2}, {"split": "even"}, EQUAL),
    "stages of one step and two": ("svd", {"pp": 4}, {}, EQUAL),
    "three stages": (WAN, {"pp": 3}, {}, EQUAL),
    "2+1, decoded at the end": (WAN, {"stage_ranks": (2, 1)}, AT_END | {"num_samples": 3}, EQUAL),
    "1+3, decoded as ready": ("svd", {"stage_ranks": (1, 3)}, AS_READY | {"num_samples": 5}, EQUAL),
    "more copies than samples": ("svd", {"stage_ranks": (3, 2)}, {"num_samples": 1}, EQUAL),
    "replicas of 1+2": ("svd", {"dp": 2, "stage_ranks": (1, 2)}, {"num_samples": 5}, EQUAL),
    "2+1, sharded": ("svd", {"stage_ranks": (2, 1)} | FSDP, {"warmup_samples": 3, "num_samples": 5}, EQUAL),
    "replicas of 1+2, sharded": (WAN, {"dp": 2, "stage_ranks": (1, 2)} | FSDP, {"warmup_samples": 1}, CLOSE),
    "1+2, guidance split": ("svd", {"stage_ranks": (1, 2), "cfg": 2}, {"num_samples": 2}, CLOSE),
    "1+2 swapped copies": ("svd", {"stage_ranks": (3,)}, {"swap": "disk", "swap_batch": 2}, EQUAL),
}  # fmt: skip


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
def runs(warm_ranks: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Case -> the run; those of as many ranks follow one another in the same processes."""
    root, folders = tmp_path_factory.mktemp("experts"), defaultdict[int, dict[str, Path]](dict)
    for number, (name, (model, layout, more, _)) in enumerate(CASES.items()):
        config = config_of(model, layout, output_dir=root / str(number), **more)
        ranks = config.layout.world_size
        folders[ranks][name] = runfolder.create(preflight.complete(config, ranks))
    for ranks, those in folders.items():
        warm_ranks(ranks, *those.values(), timeout=120)
    return {name: Run(folder) for those in folders.values() for name, folder in those.items()}


@pytest.mark.parametrize("name", CASES)
def test_latents_are_those_of_the_official_pipeline(name: str, runs: dict[str, Run]) -> None:
    run, (model, _, more, tolerance) = runs[name], CASES[name]
    result, samples = run.result() or {}, range(run.config.num_samples)
    assert (result["outcome"], result["samples_finished"]) == ("ok", len(samples))
    for sample in samples:
        found, expected = latents_of(run, sample), official(model, sample)
        assert ((found - expected).norm() / expected.norm()).item() <= tolerance, f"sample {sample}"
    if more.get("command") == "generate":
        assert (result["official"]["equal_latents"], result["official"]["equal_frames"]) == (len(samples),) * 2


@pytest.mark.parametrize("name", CASES)
def test_copies_take_samples_in_turn(name: str, runs: dict[str, Run]) -> None:
    config, layout = runs[name].config, runs[name].config.layout
    did: dict[int, list[int]] = defaultdict(list)
    for step in kinds.of(runs[name].events(), kinds.Step):
        if step.sample >= 0 and step.sample not in did[step.rank]:
            did[step.rank].append(step.sample)
    for rank in range(layout.world_size):
        place = layout.place(rank)
        turns = enumerate(range(place.replica, config.num_samples, layout.dp))
        assert did[rank] == [sample for turn, sample in turns if turn % layout.copies[place.stage] == place.copy]


def test_swapping_ranks_finish_a_batch_before_the_next(runs: dict[str, Run]) -> None:
    run = runs["swapped, two samples at a time"]
    config, result = run.config, run.result() or {}
    assert config.experts == (("transformer", 2), ("transformer_2", 4))
    high, low = range(2), range(2, STEPS)
    visits = [(0, high), (2, high), (0, low), (2, low), (4, high), (4, low)]
    own = [event for event in kinds.of(run.events(), kinds.Step) if event.rank == 0]
    assert [(event.sample, event.step) for event in own] == [
        (sample, step) for sample, steps in visits for step in steps
    ]
    swaps = [event for event in kinds.of(run.events(), kinds.Swapped) if event.rank == 0]
    experts_used = [event.expert for event in swaps]
    assert experts_used == ["transformer", "transformer_2", "transformer", "transformer_2"]
    assert all(event.size > 0 and event.seconds > 0 for event in swaps)
    spans = results.measured_spans(run.events())
    assert [span.sample for span in spans if span.rank == 0 and not span.beside] == [0, 2, 0, 2, 4, 4]
    assert len([span for span in spans if span.beside == "swapping" and span.rank == 0]) == 3  # one before the clock
    assert len(result["latency_s"]) == config.num_samples
    assert max(result["utilisation_per_rank"]) < 1


def test_the_trace_shows_swaps_and_hand_offs_between_copies(runs: dict[str, Run]) -> None:
    entries = perfetto.trace(runs["swapped, two samples at a time"])["traceEvents"]
    assert len([entry for entry in entries if entry["name"] == "loading an expert" and entry["tid"] == 0]) == 4
    run = runs["1+3, decoded as ready"]
    arrows = [entry for entry in perfetto.trace(run)["traceEvents"] if entry.get("cat") == "hand-off"]
    assert [entry["tid"] for entry in arrows if entry["ph"] == "s"] == [0] * 5
    assert Counter(entry["tid"] for entry in arrows if entry["ph"] == "f") == {1: 2, 2: 2, 3: 1}


def test_killed_and_resumed_in_another_layout(tmp_path: Path, wait_until: Callable[..., Any]) -> None:
    """Rows of a manifest, encoded in turn by two copies of the first stage, then by the only one of another layout."""
    ball = Image.open(EXAMPLE_IMAGE).convert("RGB")
    ball.save(tmp_path / "ball.png")
    ImageOps.invert(ball).save(tmp_path / "negative.png")
    rows = [f"{('ball', 'negative')[row % 2]}.png,{row // 2}" for row in range(8)]
    (tmp_path / "jobs.csv").write_text("\n".join(["image,seed", *rows]) + "\n")
    config = config_of("svd", {"stage_ranks": (2, 1)}, command="generate", decode="as-ready").replace(
        image=None, manifest=tmp_path / "jobs.csv", output_dir=tmp_path / "run"
    )
    job = launch.start(config)

    def events(kind: type[Any]) -> list[Any]:
        return list(kinds.of(job.run.events(), kind))

    wait_until(lambda: len(events(kinds.Video)) >= 2, 60)
    os.kill(next(start.pid for start in events(kinds.Start) if start.rank == 1), signal.SIGKILL)
    result = result_of(job, 60)
    assert (result["outcome"], result["failure"]["rank"]) == ("failed", 1)
    assert {event.sample % 2 for event in events(kinds.Encode) if event.rank == 1} == {1}
    kept = {path: path.read_bytes() for path in sorted((job.folder / "latents").iterdir())}
    assert len(kept) >= 2
    other = job.run.config.replace(
        parallel=Parallel(stage_ranks=(1, 2)), split="even", decode="at-end", compare_official=True
    )
    files.write_atomically(job.folder / "config.json", other.to_json())
    result = result_of(launch.attach(job.run_id, tmp_path).resume(), 120)
    assert (result["outcome"], result["resumed"]["samples_kept"]) == ("ok", len(kept))
    assert (result["official"]["equal_latents"], result["official"]["equal_frames"]) == (8, 8)
    assert {path: path.read_bytes() for path in kept} == kept
    assert {event.rank for event in kinds.of(Run(job.folder).events(), kinds.Encode)} == {0}
