"""One rank against diffusers' own pipeline, in this process, on the tiny model."""

import pytest
import torch

from vdpp_core import ConfigError, Parallel, RunConfig
from vdpp_core.config.fields import MODELS
from vdpp_core.engine import worker
from vdpp_core.runs import runfolder, saved_latents

SMALL = {"total_steps": 4, "num_frames": 5}


@pytest.fixture
def generate(tmp_path):
    """generate(…): the run folder of a run in this process."""

    def run(**arguments):
        folder = tmp_path / f"run-{len(list(tmp_path.glob('run-*')))}"
        return worker.run(RunConfig(command="generate", threads=1, output_dir=folder, **arguments))

    return run


def assert_official(folder, official):
    config = RunConfig.read(folder)
    for sample in range(config.num_samples):
        latents = saved_latents.load_latents(folder, sample)
        assert latents.shape == config.shape
        assert torch.isfinite(latents).all()
        assert torch.equal(latents, official(config, sample)), f"sample {sample}"


@pytest.mark.parametrize(
    "arguments",
    [
        SMALL,
        SMALL | {"seed": 42, "num_samples": 3},
        SMALL | {"total_steps": 1},
        SMALL | {"guidance_scale": 1.0},
        SMALL | {"guidance_scale": 0.0, "min_guidance_scale": 0.0},
        SMALL | {"guidance_scale": 7.5, "min_guidance_scale": 2.0},
        SMALL | {"height": 72, "width": 128},
        SMALL | {"height": 8, "width": 24},
        SMALL | {"num_frames": 1, "guidance_scale": 1.0},
        SMALL | {"num_frames": 1, "guidance_scale": 0.5, "min_guidance_scale": 0.0},
        SMALL | {"num_frames": 1, "min_guidance_scale": 1.5},
        {"total_steps": 4, "latent_shape": (2, 4, 5, 8, 8), "num_samples": 2},
        SMALL | {"fps": 12},
        SMALL | {"motion_bucket_id": 255},
        SMALL | {"noise_aug_strength": 0.5},
        SMALL | {"noise_aug_strength": 0.0},
        SMALL | {"warmup_samples": 2, "num_samples": 2},
    ],
    ids=str,
)
def test_latents_are_those_of_the_official_pipeline(arguments, generate, official):
    assert_official(generate(**arguments), official)


@pytest.mark.parametrize(
    "arguments",
    [
        SMALL | {"num_frames": 1},
        SMALL | {"num_frames": 1, "min_guidance_scale": 1.003, "dtype": "bf16"},
        SMALL | {"guidance_scale": 1.003, "dtype": "bf16"},
    ],
    ids=str,
)
def test_where_the_official_pipeline_fails_nothing_is_made(arguments, generate, official):
    with pytest.raises(ConfigError, match="the official pipeline then fails"):
        generate(**arguments)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        official(RunConfig(command="generate", **arguments), 0)


def test_defaults_are_the_official_defaults(generate, official):
    """25 steps, 14 frames, guidance 1 to 3, fps 7, bucket 127, augmentation 0.02: what `pipe(image)` does."""
    assert_official(generate(), official)


def test_fsdp_on_one_rank(generate, official):
    """It saves nothing, and works."""
    assert_official(generate(parallel=Parallel(fsdp=True), **SMALL), official)


def test_two_images_one_after_the_other(generate, official, other_image):
    """Nothing of the first run is left in the second."""
    first, second, again = generate(**SMALL), generate(image=other_image, **SMALL), generate(**SMALL)
    for folder in (first, second, again):
        assert_official(folder, official)
    one, other = (saved_latents.load_latents(folder, 0) for folder in (first, second))
    assert not torch.equal(one, other)


@pytest.mark.parametrize("changed", [{"fps": 12}, {"motion_bucket_id": 255}, {"guidance_scale": 1.0}, {"seed": 1}])
def test_what_the_model_is_told_matters(changed, generate):
    """So that the comparisons above compare something."""
    plain, other = (saved_latents.load_latents(generate(**SMALL, **more), 0) for more in ({}, changed))
    assert (plain - other).abs().max() > 1e-3


@pytest.mark.parametrize(
    "arguments",
    [
        {"guidance_mode": "sequential"},
        {"guidance_mode": "sequential", "latent_shape": (2, 4, 3, 8, 8), "num_frames": None},
        {"forward_chunking": True},
        {"enable_memory_opt": True, "height": 72, "width": 128},
        {"enable_memory_opt": True, "guidance_scale": 1.0},
    ],
)
def test_memory_options_reorder_sums_only(arguments, generate, official):
    folder = generate(**SMALL | arguments)
    ours, theirs = saved_latents.load_latents(folder, 0), official(RunConfig.read(folder), 0)
    assert ((ours - theirs).abs().max() / theirs.abs().max()).item() < 1e-5


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision(dtype, generate, official):
    folder = generate(dtype=dtype, num_samples=2, total_steps=2, num_frames=3)  # fp16 is slow on a CPU
    assert saved_latents.load_latents(folder, 0).dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert runfolder.read_result(folder)["dtype"] == {"bf16": "bfloat16", "fp16": "float16"}[dtype]
    assert_official(folder, official)


def test_the_tiny_model_is_an_ordinary_small_pipeline():
    from diffusers import StableVideoDiffusionPipeline

    pipeline = StableVideoDiffusionPipeline.from_pretrained(MODELS["tiny"])
    assert pipeline.unet.dtype == torch.float32


def test_random_weights_are_the_same_every_time(tmp_path):
    def latents(name):
        config = RunConfig(random_weights=True, threads=1, save_latents=True, output_dir=tmp_path / name, **SMALL)
        return saved_latents.load_latents(worker.run(config), 0)

    first = latents("first")
    torch.manual_seed(123)
    state = torch.random.get_rng_state()
    assert torch.equal(first, latents("second"))
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.get_default_dtype() == torch.float32


def test_what_a_run_in_a_notebook_leaves_behind(generate):
    threads = torch.get_num_threads()
    folder = generate(**SMALL)
    result = runfolder.read_result(folder)
    assert (result["outcome"], result["samples_finished"], result["threads_per_rank"]) == ("ok", 1, [1])
    assert not torch.distributed.is_initialized()
    assert torch.get_num_threads() == threads
    with pytest.raises(ConfigError, match=r"^output_dir "):
        worker.run(RunConfig.read(folder))


def test_several_ranks_do_not_fit_in_one_process():
    with pytest.raises(ConfigError, match=r"^pp 2: "):
        worker.run(RunConfig(parallel={"pp": 2}))
