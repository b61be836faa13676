"""RunConfig and Parallel: what they accept, and how they say no."""

import json
import math

import pytest

from vdpp_core import ConfigError, Parallel, RunConfig
from vdpp_core.config.fields import EXAMPLE_IMAGE

BAD = [
    # arguments, the argument named, its value as shown, a word of what is allowed
    ({"total_steps": 0}, "total_steps", "0", "greater than or equal to 1"),
    ({"total_steps": -3}, "total_steps", "-3", "greater than or equal to 1"),
    ({"total_steps": "many"}, "total_steps", "many", "integer"),
    ({"total_steps": 2.5}, "total_steps", "2.5", "integer"),
    ({"total_steps": 4, "parallel": {"pp": 5}}, "pp", "5", "at most total_steps, 4"),
    ({"num_samples": 0}, "num_samples", "0", "greater than or equal to 1"),
    ({"warmup_samples": -1}, "warmup_samples", "-1", "greater than or equal to 0"),
    ({"seed": -1}, "seed", "-1", "greater than or equal to 0"),
    ({"latent_shape": (1, 4, 14, 8)}, "latent_shape", "1 4 14 8", "five whole numbers B C F H W"),
    ({"latent_shape": (1, 4, 14, 8, 8, 8)}, "latent_shape", "1 4 14 8 8 8", "five whole numbers"),
    ({"latent_shape": (1, 4, 0, 8, 8)}, "latent_shape", "1 4 0 8 8", "each at least 1"),
    ({"latent_shape": (1, 3, 14, 8, 8)}, "latent_shape", "1 3 14 8 8", "C = 4"),
    ({"latent_shape": (1, 4, 14, 8.5, 8)}, "latent_shape", "1 4 14 8.5 8", "whole numbers"),
    ({"latent_shape": ("1", "4", "x", "8", "8")}, "latent_shape", "1 4 x 8 8", "whole numbers"),
    ({"latent_shape": 7}, "latent_shape", "7", "five whole numbers"),
    ({"latent_shape": "1 4 5 8 8"}, "latent_shape", "1 4 5 8 8", "five whole numbers"),
    ({"latent_shape": "14588"}, "latent_shape", "14588", "five whole numbers"),
    ({"latent_shape": (1, 4, 5, 8, 8), "height": 64}, "latent_shape", "1 4 5 8 8", "not both"),
    ({"latent_shape": (1, 4, 5, 8, 8), "num_frames": 5}, "latent_shape", "1 4 5 8 8", "not both"),
    ({"height": 100}, "height", "100", "a multiple of 8"),
    ({"width": 60}, "width", "60", "a multiple of 8"),
    ({"height": 0}, "height", "0", "greater than or equal to 8"),
    ({"num_frames": 0}, "num_frames", "0", "greater than or equal to 1"),
    ({"model": "sdxl"}, "model", "sdxl", "'dummy', 'tiny', 'experts', 'medium', 'svd' or 'wan22'"),
    ({"guidance_scale": math.nan}, "guidance_scale", "nan", "finite"),
    ({"guidance_scale": math.inf}, "guidance_scale", "inf", "finite"),
    ({"guidance_scale": -1}, "guidance_scale", "-1", "greater than or equal to 0"),
    ({"guidance_scale": 1, "min_guidance_scale": 2}, "min_guidance_scale", "2", "at most 1"),
    ({"motion_bucket_id": 256}, "motion_bucket_id", "256", "less than or equal to 255"),
    ({"fps": 0}, "fps", "0", "greater than or equal to 1"),
    ({"noise_aug_strength": -0.1}, "noise_aug_strength", "-0.1", "greater than or equal to 0"),
    ({"totalsteps": 3}, "totalsteps", "3", "is not a parameter"),
    ({"parallel": Parallel(pp=3), "stage_weights": (1, 2.5)}, "stage_weights", "1.0 2.5", "3 positive numbers"),
    ({"parallel": Parallel(pp=2), "stage_weights": (1.5, 0)}, "stage_weights", "1.5 0.0", "2 positive numbers"),
    ({"parallel": Parallel(pp=2), "stage_weights": (1.5, -0.5)}, "stage_weights", "1.5 -0.5", "2 positive numbers"),
    ({"command": "generate", "model": "dummy"}, "model", "dummy", "no image encoders"),
    ({"command": "generate", "random_weights": True}, "model", "tiny", "no image encoders"),
    ({"image": EXAMPLE_IMAGE, "model": "dummy"}, "model", "dummy", "no image encoders"),
    ({"model": "dummy", "model_id": "/somewhere"}, "model_id", "/somewhere", "not with model dummy"),
    ({"command": "dream"}, "command", "dream", "'simulate', 'benchmark' or 'generate'"),
    ({"device": "tpu"}, "device", "tpu", "auto, cpu, mps, cuda"),
    ({"dtype": "fp8"}, "dtype", "fp8", "'fp32'"),
    ({"backend": "mpi"}, "backend", "mpi", "'gloo'"),
    ({"threads": 0}, "threads", "0", "greater than or equal to 1"),
    ({"model": "medium"}, "model", "medium", "random weights only"),
    ({"attention_slicing": True}, "attention_slicing", "True", "has none"),
    ({"guidance_mode": "both"}, "guidance_mode", "both", "'batched' or 'sequential'"),
    ({"model": "dummy", "forward_chunking": True}, "forward_chunking", "True", "no layers that this concerns"),
    ({"model": "dummy", "enable_memory_opt": True}, "enable_memory_opt", "True", "no layers that this concerns"),
    ({"memory_limit_gib": 0}, "memory_limit_gib", "0", "greater than 0"),
    ({"parallel": Parallel(dp=2), "fsdp_same_sample": True}, "fsdp_same_sample", "True", "only with fsdp"),
    ({"parallel": Parallel(dp=2), "fsdp_cpu_offload": True}, "fsdp_cpu_offload", "True", "only with fsdp"),
    ({"timeout_s": 0}, "timeout_s", "0", "greater than or equal to 1"),
]


@pytest.mark.parametrize(("arguments", "argument", "value", "allowed"), BAD, ids=[str(row[0]) for row in BAD])
def test_a_bad_input_is_answered_in_one_line(arguments, argument, value, allowed):
    with pytest.raises(ConfigError) as caught:
        RunConfig(**arguments)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(f"{argument} ")
    assert value in line.partition(":")[0]
    assert allowed in line
    assert caught.value.argument == argument
    assert caught.value.as_flag() == f"--{argument.replace('_', '-')} {line.partition(' ')[2]}"


@pytest.mark.parametrize(
    "axes", [{"dp": 0}, {"pp": 0}, {"pp": -2}, {"dp": "two"}, {"cfg": 3}, {"frames": 0}, {"tp": 0}, {"ep": 2}]
)
def test_a_bad_axis_is_named(axes):
    (name, value), *_ = axes.items()
    with pytest.raises(ConfigError, match=f"^{name} {value}: "):
        Parallel(**axes)
    with pytest.raises(ConfigError) as caught:
        RunConfig(parallel=axes)
    assert caught.value.argument == name
    assert str(value) in str(caught.value)


@pytest.mark.parametrize(("dp", "pp", "ranks"), [(2, 2, 3), (1, 4, 5), (3, 1, 1), (2, 2, 8)])
def test_a_layout_for_another_number_of_ranks_is_refused(dp, pp, ranks):
    with pytest.raises(ConfigError) as caught:
        RunConfig(parallel=Parallel(dp=dp, pp=pp)).for_ranks(ranks)
    assert f"dp × pp × cfg × frames × tp = {dp} × {pp} × 1 × 1 × 1 must be" in str(caught.value)
    assert str(caught.value).endswith(f"{ranks}")


@pytest.mark.parametrize("ranks", [0, -1])
def test_no_ranks_is_refused(ranks):
    with pytest.raises(ConfigError, match=f"^world_size {ranks}: "):
        RunConfig().for_ranks(ranks)


def test_more_ranks_than_steps_is_refused():
    with pytest.raises(ConfigError, match=r"^pp 5: must be at most total_steps, 4$"):
        RunConfig(total_steps=4).for_ranks(5)


def test_every_rank_is_a_stage_where_no_layout_is_given():
    assert RunConfig().for_ranks(7).parallel == Parallel(dp=1, pp=7)
    assert RunConfig(parallel=Parallel(dp=7)).for_ranks(7).parallel == Parallel(dp=7, pp=1)


@pytest.mark.parametrize(
    "config",
    [
        RunConfig(),
        RunConfig(command="simulate"),
        RunConfig(command="generate", image=EXAMPLE_IMAGE, height=72, width=128, num_frames=5, save_latents=False),
        RunConfig(latent_shape=(2, 4, 5, 9, 16), parallel=Parallel(dp=2, pp=3), stage_weights=(1, 2.5, 1)),
        RunConfig(model="svd", random_weights=True, threads=3, timeout_s=5, warmup_samples=0),
    ],
)
def test_json_round_trip(config):
    assert RunConfig(**json.loads(config.to_json())) == config


def test_read(tmp_path):
    config = RunConfig(total_steps=9, parallel=Parallel(pp=3))
    (tmp_path / "config.json").write_text(config.to_json())
    assert RunConfig.read(tmp_path) == config


def test_frozen():
    with pytest.raises(ConfigError, match="total_steps"):
        RunConfig(total_steps=5).replace(total_steps=0)
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().total_steps = 5


def test_replace():
    config = RunConfig(total_steps=5, latent_shape=(1, 4, 5, 9, 16))
    assert config.replace(total_steps=6).total_steps == 6
    assert config.replace(total_steps=6).latent_shape == (1, 4, 5, 9, 16)
    assert config.replace(height=80, width=64).shape == (1, 4, 14, 10, 8)
    assert RunConfig(height=80).replace(latent_shape=(1, 4, 2, 3, 5)).shape == (1, 4, 2, 3, 5)
    assert RunConfig(parallel=Parallel(pp=2)).replace(parallel=None).parallel is None


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (RunConfig(model="dummy"), (1, 4, 8, 32, 32)),
        (RunConfig(model="tiny"), (1, 4, 14, 8, 8)),
        (RunConfig(model="svd"), (1, 4, 14, 72, 128)),
        (RunConfig(model_id="some/pipeline"), (1, 4, 14, 72, 128)),
        (RunConfig(model="tiny", height=72, width=128, num_frames=5), (1, 4, 5, 9, 16)),
        (RunConfig(model="tiny", width=128), (1, 4, 14, 8, 16)),
        (RunConfig(latent_shape=(2, 4, 3, 5, 7)), (2, 4, 3, 5, 7)),
        (RunConfig(latent_shape=["2", "4", "3", "5", "7"]), (2, 4, 3, 5, 7)),
    ],
)
def test_shape(config, shape):
    assert config.shape == shape


def test_command_defaults():
    simulate, benchmark, generate = (RunConfig(command=name) for name in ("simulate", "benchmark", "generate"))
    assert (simulate.model, simulate.device, simulate.dtype) == ("dummy", "cpu", "fp32")
    assert (benchmark.model, benchmark.total_steps, benchmark.warmup_samples) == ("tiny", 28, 1)
    assert benchmark.image_path is None
    assert (generate.model, generate.total_steps, generate.save_latents) == ("tiny", 25, True)
    assert generate.image_path == EXAMPLE_IMAGE
    assert RunConfig(command="generate", total_steps=3, save_latents=False).total_steps == 3
    assert RunConfig(command="simulate", model="tiny").model == "tiny"


@pytest.mark.parametrize(("num_samples", "dp"), [(1, 1), (14, 4), (5, 2), (2, 5), (1, 3), (7, 7)])
def test_each_sample_belongs_to_one_replica(num_samples, dp):
    config = RunConfig(num_samples=num_samples, parallel=Parallel(dp=dp, pp=2))
    shares = [list(config.samples(replica)) for replica in range(dp)]
    assert sorted(sample for share in shares for sample in share) == list(range(num_samples))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert sum(not share for share in shares) == max(0, dp - num_samples)


def test_the_mesh_is_counted_replica_by_replica():
    layout = Parallel(dp=2, pp=3)
    assert layout.world_size == 6
    assert [layout.place(rank)[:2] for rank in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert RunConfig(total_steps=7, parallel=layout).stages() == [range(0, 3), range(3, 5), range(5, 7)]


def test_a_lockstep_group_is_innermost():
    layout = Parallel(dp=2, pp=2, cfg=2, frames=3, fsdp=True)
    assert (layout.world_size, layout.lockstep, layout.shards) == (24, 6, 12)
    assert [layout.rank(*layout.place(rank)) for rank in range(24)] == list(range(24))
    assert [layout.place(rank)[:3] for rank in (0, 5, 6, 12, 23)] == [
        (0, 0, 0),
        (0, 0, 5),
        (0, 1, 0),
        (1, 0, 0),
        (1, 1, 5),
    ]
    assert str(layout) == "dp 2 × pp 2 × cfg 2 × frames 3 × fsdp"


@pytest.mark.parametrize(
    ("axes", "arguments", "line"),
    [
        ({"frames": 6}, {"num_frames": 5}, "frames 6: must be at most num_frames, 5"),
        ({"cfg": 2}, {"guidance_scale": 1.0}, "cfg 2: buys nothing without guidance, which has one pass: "),
        ({"frames": 2}, {"model": "dummy"}, "frames 2: not with model dummy: only a spatio-temporal UNet"),
    ],
)
def test_a_lockstep_group_that_cannot_be_is_refused(axes, arguments, line):
    with pytest.raises(ConfigError) as caught:
        RunConfig(parallel=axes, **arguments)
    assert str(caught.value).startswith(line)


def test_shortcuts_are_for_svd():
    with pytest.raises(ConfigError, match=r"^shortcuts True: not with model dummy"):
        RunConfig(model="dummy", shortcuts=True)


def test_with_cfg_2_each_rank_has_one_pass():
    sequential = RunConfig(guidance_mode="sequential", parallel=Parallel())
    assert sequential.sequential
    assert not sequential.replace(parallel=Parallel(cfg=2)).sequential
