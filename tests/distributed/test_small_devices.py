"""Sharded loading and the end of a small device, in real ranks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import launch
from vdpp_core import Parallel, RunConfig
from vdpp_core.parallel.devices import can_limit
from vdpp_core.predict import memory

pytestmark = pytest.mark.skipif(not can_limit("cpu"), reason="a process's memory can be limited under Linux only")
MEDIUM = RunConfig(
    model="medium",
    random_weights=True,
    latent_shape=(1, 4, 2, 8, 8),
    total_steps=1,
    threads=1,
    device="cpu",
    parallel=Parallel(),
)
LOADING = """
import json, sys
import torch
from vdpp_core import RunConfig
from vdpp_core.engine.measure import MemoryMeter, keep_freed_memory
from vdpp_core.config.execution import resolve
from vdpp_core.parallel.rendezvous import Ranks
from vdpp_core.parallel.world import joined
from vdpp_core.parallel import loading

config = RunConfig(**json.loads(sys.argv[1]))
keep_freed_memory(False)
ranks = Ranks.from_environment()
with joined(config.layout, resolve(config, ranks.local_world_size), ranks, "loading") as world:
    unet = loading.structure(config, torch.float32, mesh=world.shards)
    meter = MemoryMeter(world.device)
    meter.reset()
    loading.materialise(unet, config, world.device, torch.float32, world.shards)
    own = [parameter.to_local() for parameter in unet.parameters()]
    facts = {"share": sum(t.nbytes for t in own), "peak": meter.peak()["allocated_gb"] * 1e9}
    with open(f"{sys.argv[2]}/{world.rank}.json", "w") as file:
        json.dump(facts | {"largest": max(parameter.nbytes for parameter in unet.parameters())}, file)
"""


@pytest.mark.parametrize("source", ["random", "stored"])
def test_loading_never_holds_the_whole(source, tmp_path):
    """At most 1.2 × (the rank's share + the largest tensor)."""
    config = MEDIUM.replace(parallel=Parallel(dp=2, fsdp=True))
    if source == "stored":
        config = config.replace(model_id=str(save_medium(tmp_path / "model")), random_weights=False)
    program = tmp_path / "loading.py"
    program.write_text(LOADING)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([*torchrun, program, config.to_json(), tmp_path], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        facts = json.loads((tmp_path / f"{rank}.json").read_text())
        assert facts["share"] == pytest.approx(136.65e6 * 4 / 2, rel=0.01)
        assert facts["share"] < facts["peak"] < 1.2 * (facts["share"] + facts["largest"])


def save_medium(folder):
    from diffusers import EulerDiscreteScheduler, UNetSpatioTemporalConditionModel

    from vdpp_core.models.architectures import MEDIUM_UNET, PUBLISHED_SCHEDULER

    UNetSpatioTemporalConditionModel.from_config(MEDIUM_UNET).save_pretrained(folder / "unet", max_shard_size="200MB")
    EulerDiscreteScheduler(**PUBLISHED_SCHEDULER).save_pretrained(folder / "scheduler")
    return folder


def test_out_of_memory_is_a_result(tmp_path):
    """Between the parameters and the peak: the model is loaded, the first step is too much."""
    config = MEDIUM.replace(latent_shape=(1, 4, 4, 32, 32), output_dir=tmp_path / "run")
    expected = memory.predict(config)
    activations = expected.total - expected.parameters
    limit = (expected.parameters + 0.65 * activations) / 2**30  # a large tensor fails; little is freed on its way out
    with pytest.warns(UserWarning, match="will probably run out of memory"):
        job = launch.start(config.replace(memory_limit_gib=limit))
    result = job.wait(60)
    assert (job.status(), result["outcome"], result["samples_finished"]) == ("oom", "oom", 0)
    failure = result["failure"]
    assert failure["rank"] == 0
    assert failure["cause"].startswith("out of memory while warming up, asked for ")
    assert failure["oom"]["layer"].split(".")[0] in ("down_blocks", "mid_block", "up_blocks", "conv_in")
    assert failure["oom"]["requested_gb"] > failure["oom"]["free_gb"] > 0
    assert failure["oom"]["limit_gib"] == limit
    assert result["predicted"]["max_peak_memory_gb"] == pytest.approx(expected.total / 1e9)
    assert "Traceback" not in job.tail(0)
    assert "out of memory while warming up" in job.tail(0)
    events = job.run.events()
    assert [event.kind for event in events] == ["start", "loaded", "error"]
