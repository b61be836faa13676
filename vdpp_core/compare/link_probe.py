"""Measure how fast latents move between two ranks: torchrun --nproc_per_node=2 -m vdpp_core.compare.link_probe [device]

Ping-pong of messages from 4 bytes to 64 MB between ranks 0 and 1. On a CPU, the ranks then split forward passes of the
small model, because an exchange between ranks that compute takes longer: they wake up, wait for the slower one, and
have smaller tensors. Rank 0 prints a JSON object: `rows` with bytes, seconds one way (median) and bandwidth in GB/s
(1e9 bytes) of each size, and `exchange_s` as of `vdpp_core.predict.rates.Link`.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from vdpp_core import models
from vdpp_core.config import Parallel, RunConfig
from vdpp_core.config.axes import FSDP, LOCKSTEP_NAMES
from vdpp_core.config.execution import resolve
from vdpp_core.parallel.parallelize import parallelize
from vdpp_core.parallel.rendezvous import Ranks
from vdpp_core.parallel.world import World, joined
from vdpp_core.predict import costs

SIZES = [4**power for power in range(1, 14)]
ROUNDS = 15
PASSES = 5  # alternately split and alone
VIDEO = (1, 4, 4, 16, 16)  # of the forward passes: a tenth of a second


def one_way_s(world: World, size: int) -> float:
    """Seconds that `size` bytes take from rank to rank: half a round trip, median of ROUNDS after two untimed ones."""
    message = torch.zeros(size // 4, device=world.device)
    trips = []
    for _ in range(ROUNDS + 2):
        began = time.perf_counter()
        if world.rank == 0:
            dist.send(message, 1)
            dist.recv(message, 1)
        else:
            dist.recv(message, 0)
            dist.send(message, 0)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        trips.append(time.perf_counter() - began)
    return median(trips[2:]) / 2


def while_computing(world: World, bytes_per_s: float) -> dict[str, float]:
    """Lockstep axis, or "fsdp" -> seconds of an exchange or a gather besides its bytes.

    A forward pass on both ranks takes that much longer than the rank's share of the operations.
    """
    config = RunConfig(latent_shape=VIDEO, device="cpu", threads=1, parallel=Parallel())
    load, whole, extra = partial(models.load, config, world.device, torch.float32), costs.cost(config), {}
    alone = load()
    for name in (*LOCKSTEP_NAMES, FSDP.name):
        layout = Parallel(dp=2, fsdp=True) if name == FSDP.name else Parallel(**{name: 2})
        own = costs.cost(config.replace(parallel=layout))
        split = parallelize(load(), layout.mesh("cpu"), layout.fsdp)
        pairs = [(_pass_s(world, split), _pass_s(world, alone)) for _ in range(1 + PASSES)]
        took = median(one - other * own.flops / whole.flops for one, other in pairs[1:])
        took -= (sum(own.sent.values()) + own.gathered) / bytes_per_s
        extra[name] = max(0.0, took) / (own.exchanges + own.gathers)
    return extra


@torch.no_grad()
def _pass_s(world: World, unet: Any) -> float:
    """Seconds of a forward pass of both guidance passes."""
    batch, frames, *size = 2, VIDEO[2], *VIDEO[3:]
    given = {
        "sample": torch.zeros(batch, frames, 2 * VIDEO[1], *size),
        "timestep": torch.tensor(1.0),
        "encoder_hidden_states": torch.zeros(batch, 1, unet.config.cross_attention_dim),
        "added_time_ids": torch.zeros(batch, 3),
    }
    world.barrier()
    began = time.perf_counter()
    unet(**given)
    return time.perf_counter() - began


def main() -> None:
    """Measure every size on the device named on the command line, and print the results on rank 0."""
    device = dict(enumerate(sys.argv)).get(1, "auto")
    execution, ranks = resolve(RunConfig(device=device, threads=1), local_ranks=2), Ranks.from_environment()
    with joined(Parallel(pp=2), execution, ranks, "probe") as world:
        for _ in range(20):
            one_way_s(world, SIZES[0])  # opens the connection and wakes the cores
        seconds = {size: one_way_s(world, size) for size in SIZES}
        found: dict[str, Any] = {
            "rows": [{"bytes": size, "seconds": s, "gb_per_s": size / s / 1e9} for size, s in seconds.items()]
        }
        if world.device.type == "cpu":
            found["exchange_s"] = while_computing(world, max(size / s for size, s in seconds.items()))
    if world.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
