"""Forward passes of one UNet, shared out in several ways in turn between the same two CPU ranks of one thread each.

python -m tests.distributed.forked 2 tests.benchmarks.forward_passes MODEL REPEATS
Prints a row of JSON per repeat: layout -> seconds of the slower rank.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from vdpp_core import Parallel, RunConfig, models, parallelize
from vdpp_core.engine.measure import keep_freed_memory

SIZE = (1, 4, 14, 24, 24)
MODELS = {
    "tiny": RunConfig(latent_shape=SIZE, parallel=Parallel()),
    "medium": RunConfig(model="medium", random_weights=True, latent_shape=SIZE, parallel=Parallel()),
}
ALONE, LIMIT = "one rank", "two processes"
LAYOUTS = {  # of one video on two ranks; the second rank of the first one is idle
    ALONE: Parallel(),
    LIMIT: Parallel(dp=2),
    "frames 2": Parallel(frames=2),
    "cfg 2": Parallel(cfg=2),
    "tp 2": Parallel(tp=2),
    "fsdp 2": Parallel(dp=2, fsdp=True),
}


def inputs(unet: Any) -> dict[str, Any]:
    _, channels, frames, rows, columns = SIZE
    generator = torch.Generator().manual_seed(0)
    return {
        "sample": torch.randn(2, frames, 2 * channels, rows, columns, generator=generator),
        "timestep": torch.tensor(1.0),
        "encoder_hidden_states": torch.randn(2, 1, unet.config.cross_attention_dim, generator=generator),
        "added_time_ids": torch.tensor([[6, 127, 0.02]] * 2),
    }


@torch.no_grad()
def main() -> None:
    model, repeats = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    keep_freed_memory(True)
    dist.init_process_group("gloo")
    unet = models.load(MODELS[model], torch.device("cpu"), torch.float32)
    given = inputs(unet)
    split = {
        name: parallelize(copy.deepcopy(unet), layout.mesh("cpu"), layout.fsdp) if layout.world_size > 1 else unet
        for name, layout in LAYOUTS.items()
    }

    def seconds(name: str) -> float:
        took = torch.zeros(1)
        dist.barrier()
        if LAYOUTS[name].world_size > dist.get_rank():
            began = time.perf_counter()
            split[name](**given)
            took += time.perf_counter() - began
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return took.item()

    for name in LAYOUTS:
        seconds(name)
    for repeat in range(repeats):
        order = list(LAYOUTS)[:: -1 if repeat % 2 else 1]
        row = {name: seconds(name) for name in order}
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()
