"""Every way of splitting steps and samples over ranks gives the official pipeline's latents, bit for bit; splitting a
forward pass over a lockstep group reorders sums, and gives them within 1e-5 (1e-4 after 25 steps)."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from vdpp_core import RunConfig
from vdpp_core.config.fields import EXAMPLE_IMAGE
from vdpp_core.predict import costs
from vdpp_core.runs import runfolder
from vdpp_core.runs.run import Run

DENOISING = {"command": "benchmark", "warmup_samples": 0, "save_latents": True}  # of an image, nothing is decoded
QUICK = {"total_steps": 7, "num_frames": 5}
SHARDS = {"dp": 2, "fsdp": True}
CASES = {  # name: (ranks, arguments); all cases with the same number of ranks share one call of torchrun
    f"{stages} stages, {steps} steps, {samples} samples": (
        stages,
        {"total_steps": steps, "num_samples": samples, "num_frames": 5 if steps == 7 else 14},
    )
    for stages, steps, samples in [*itertools.product((1, 2, 3, 4), (7,), (1, 3)), (1, 25, 1), (2, 25, 3), (4, 25, 1)]
} | {
    "2 replicas": (2, QUICK | {"parallel": {"dp": 2}, "num_samples": 3}),
    "2 replicas of 2 stages": (4, QUICK | {"parallel": {"dp": 2, "pp": 2}, "num_samples": 5}),
    "more replicas than samples": (2, QUICK | {"parallel": {"dp": 2}, "num_samples": 1}),
    "more replicas of stages than samples": (4, QUICK | {"parallel": {"dp": 2, "pp": 2}, "num_samples": 1}),
    "uneven stages": (3, QUICK | {"stage_weights": (1, 4, 2), "num_samples": 2}),
    "stages of one step": (4, QUICK | {"total_steps": 4, "num_samples": 2}),
    "latents of odd height": (3, QUICK | {"height": 72, "width": 128, "num_samples": 2}),
    "batch of 2": (2, {"total_steps": 7, "latent_shape": (2, 4, 5, 8, 8), "num_samples": 2}),
    "without guidance": (2, QUICK | {"guidance_scale": 1.0, "num_samples": 2}),
    "after warm-up samples": (2, QUICK | {"warmup_samples": 2, "num_samples": 2}),
    "another image": (2, QUICK | {"image": "other", "num_samples": 2}),
    "the first image again": (2, QUICK | {"num_samples": 2}),
    "half precision": (2, QUICK | {"dtype": "bf16", "num_samples": 2}),
    "shards": (2, QUICK | {"parallel": SHARDS, "num_samples": 3}),
    "shards of 3, more of them than samples": (3, QUICK | {"parallel": {"dp": 3, "fsdp": True}, "num_samples": 2}),
    "shards, all ranks on one sample": (2, QUICK | {"parallel": SHARDS, "num_samples": 2, "fsdp_same_sample": True}),
    "shards, latents of odd height": (2, QUICK | {"parallel": SHARDS, "height": 72, "width": 128, "num_samples": 2}),
    "shards, warm-up and batch": (
        2,
        {"parallel": SHARDS, "total_steps": 3, "latent_shape": (2, 4, 5, 8, 8), "warmup_samples": 1, "num_samples": 1},
    ),
    "shards, from several files": (
        2,
        QUICK | {"parallel": SHARDS, "model_id": "several files", "height": 64, "width": 64, "num_samples": 2},
    ),
    "shards, half precision": (2, QUICK | {"parallel": SHARDS, "dtype": "bf16", "num_samples": 2}),
    "2 stages of shards": (4, QUICK | {"parallel": {"dp": 2, "pp": 2, "fsdp": True}, "num_samples": 3}),
}

WHOLE = {"total_steps": 25, "num_frames": 14, "command": "generate", "compare_official": True}
LOCKSTEP = {  # the same for layouts with cfg and frames; (ranks, arguments, tolerance)
    "frames 2": (2, WHOLE | {"parallel": {"frames": 2}}, 1e-4),
    "cfg 2": (2, WHOLE | {"parallel": {"cfg": 2}}, 1e-4),
    "frames 2, odd": (2, QUICK | {"parallel": {"frames": 2}, "height": 72, "width": 128, "num_samples": 2}, 1e-5),
    "frames 2, shortcuts": (2, QUICK | {"parallel": {"frames": 2}, "shortcuts": True, "num_samples": 2}, 1e-5),
    "frames 2, shortcuts, another image": (
        2,
        QUICK | {"parallel": {"frames": 2}, "shortcuts": True, "image": "other", "num_samples": 2},
        1e-5,
    ),
    "shortcuts alone, sequential guidance": (
        2,
        QUICK | {"shortcuts": True, "guidance_mode": "sequential", "num_samples": 2},
        1e-5,
    ),
    "frames 2 of batch 2": (
        2,
        {"parallel": {"frames": 2}, "total_steps": 3, "latent_shape": (2, 4, 5, 8, 8), "warmup_samples": 1},
        1e-5,
    ),
    "cfg 2 of batch 2": (2, {"parallel": {"cfg": 2}, "total_steps": 3, "latent_shape": (2, 4, 5, 8, 8)}, 1e-5),
    "frames 2, without guidance": (2, QUICK | {"parallel": {"frames": 2}, "guidance_scale": 1.0}, 1e-5),
    "frames 2, chunked": (2, QUICK | {"parallel": {"frames": 2}, "enable_memory_opt": True}, 1e-5),
    "frames 2, fsdp": (2, QUICK | {"parallel": {"frames": 2, "fsdp": True}, "num_samples": 2}, 1e-5),
    "cfg 2, half precision": (2, QUICK | {"parallel": {"cfg": 2}, "dtype": "bf16"}, 0.1),
    "tp 2": (2, QUICK | {"parallel": {"tp": 2}, "num_samples": 2, "warmup_samples": 1}, 1e-5),
    "tp 2, shortcuts, chunked": (
        2,
        QUICK | {"parallel": {"tp": 2}, "shortcuts": True, "enable_memory_opt": True},
        1e-5,
    ),
    "cfg 2 × tp 2": (4, QUICK | {"parallel": {"cfg": 2, "tp": 2}, "num_samples": 2}, 1e-5),
    "pp 2 × tp 2, fsdp": (4, QUICK | {"parallel": {"pp": 2, "tp": 2, "fsdp": True}, "num_samples": 2}, 1e-5),
    "frames 2 × tp 2": (4, QUICK | {"parallel": {"frames": 2, "tp": 2}, "num_samples": 2}, 1e-5),
    "dp 2 × tp 2, fsdp": (4, QUICK | {"parallel": {"dp": 2, "tp": 2, "fsdp": True}, "num_samples": 3}, 1e-5),
    "frames 3 of 14": (3, QUICK | {"parallel": {"frames": 3}, "num_frames": 14, "num_samples": 2}, 1e-5),
    "frames 4": (4, QUICK | {"parallel": {"frames": 4}, "num_samples": 2}, 1e-5),
    "frames 2 × cfg 2": (4, QUICK | {"parallel": {"frames": 2, "cfg": 2}, "num_samples": 2}, 1e-5),
    "pp 2 × frames 2": (4, QUICK | {"parallel": {"pp": 2, "frames": 2}, "num_samples": 3}, 1e-5),
    "dp 2 × cfg 2": (4, QUICK | {"parallel": {"dp": 2, "cfg": 2}, "num_samples": 3}, 1e-5),
    "dp 2 × frames 2, fsdp, shortcuts": (
        4,
        QUICK | {"parallel": {"dp": 2, "frames": 2, "fsdp": True}, "shortcuts": True, "num_samples": 3},
        1e-5,
    ),
    "pp 2 × cfg 2, fsdp": (4, QUICK | {"parallel": {"pp": 2, "cfg": 2, "fsdp": True}, "num_samples": 3}, 1e-5),
}
RUNS = CASES | {name: case[:2] for name, case in LOCKSTEP.items()}


@pytest.fixture(scope="session")
def run_folders(warm_ranks, other_image, several_files, tmp_path_factory):
    """run_folders(ranks): the run folders of all cases for so many ranks, run in one call of torchrun."""

    @functools.cache
    def run(ranks):
        root, folders = tmp_path_factory.mktemp(f"ranks-{ranks}"), {}
        for number, (name, (needed, arguments)) in enumerate(RUNS.items()):
            if needed == ranks:
                image = other_image if arguments.get("image") == "other" else EXAMPLE_IMAGE
                model_id = several_files if "model_id" in arguments else None
                given = DENOISING | arguments | {"image": image, "model_id": model_id}
                config = RunConfig(threads=1, **given)
                folders[name] = runfolder.create(config.replace(output_dir=root / str(number)).for_ranks(ranks))
        warm_ranks(ranks, *folders.values())
        return folders

    return run


@pytest.mark.parametrize("name", sorted(CASES, key=lambda name: CASES[name][0]))
def test_latents_are_those_of_the_official_pipeline(name, run_folders, official):
    folder = run_folders(CASES[name][0])[name]
    config, result = RunConfig.read(folder), Run(folder).result()
    assert (result["outcome"], result["samples_finished"]) == ("ok", config.num_samples)
    assert len(list((folder / "latents").iterdir())) == config.num_samples
    for sample in range(config.num_samples):
        latents = Run(folder).load_latents(sample)
        assert latents.shape == config.shape
        assert torch.equal(latents, official(config, sample)), f"sample {sample}"


@pytest.mark.parametrize("name", sorted(LOCKSTEP, key=lambda name: LOCKSTEP[name][0]))
def test_latents_of_a_lockstep_group_are_close_to_the_official_pipelines(name, run_folders, official):
    folder, tolerance = run_folders(LOCKSTEP[name][0])[name], LOCKSTEP[name][2]
    config, result = RunConfig.read(folder), Run(folder).result()
    assert (result["outcome"], result["samples_finished"]) == ("ok", config.num_samples)
    for sample in range(config.num_samples):
        latents, expected = Run(folder).load_latents(sample), official(config, sample)
        assert latents.shape == config.shape
        assert ((latents - expected).norm() / expected.norm()).item() <= tolerance, f"sample {sample}"
    if config.compare_official:
        assert result["official"]["max_frame_difference"] <= 1  # of 255


COUNTED = ["frames 3 of 14", "cfg 2", "pp 2 × frames 2", "frames 2 × cfg 2", "cfg 2 × tp 2", "frames 2 × tp 2"]


@pytest.mark.parametrize("name", COUNTED)
def test_bytes_are_those_that_were_predicted(name, run_folders):
    folder = run_folders(LOCKSTEP[name][0])[name]
    config, result = RunConfig.read(folder), Run(folder).result()
    for rank, sent_gb in enumerate(result["lockstep_gb_per_step_per_rank"]):
        predicted = costs.cost(config, config.layout.place(rank).member)
        assert sent_gb * 1e9 == pytest.approx(sum(predicted.sent.values()))


@pytest.mark.parametrize("name", sorted(RUNS, key=lambda name: RUNS[name][0]))
def test_each_step_of_each_sample_runs_once_and_in_order(name, run_folders):
    folder = run_folders(RUNS[name][0])[name]
    config, events = RunConfig.read(folder), Run(folder).events()
    layout = config.layout
    for sample in range(config.num_samples):
        replica = 0 if config.fsdp_same_sample else sample % layout.dp
        of_sample = [event for event in events if event.kind == "step" and event.sample == sample]
        assert {layout.place(event.rank).replica for event in of_sample} == {replica}
        for member in range(layout.lockstep):
            steps = [event for event in of_sample if layout.place(event.rank).member == member]
            assert [event.step for event in steps] == list(range(config.total_steps))
            for event in steps:
                assert event.step in config.stages()[layout.place(event.rank).stage]
    warm = sum(event.kind == "step" and event.sample < 0 for event in events)
    replicas_at_work = layout.dp if layout.fsdp else min(layout.dp, config.num_samples)  # shards need all their ranks
    assert warm == config.warmup_samples * config.total_steps * replicas_at_work * layout.lockstep
    for rank in range(layout.world_size):
        kinds = [event.kind for event in events if event.rank == rank]
        assert kinds[0] == "start"
        assert kinds[-1] == "done"
        assert kinds.count("clock") == 1
