"""Measure how fast latents move between two ranks: torchrun --nproc_per_node=2 -m vdpp_core.compare.link_probe [device]

Ping-pong of messages from 4 bytes to 64 MB between ranks 0 and 1. Rank 0 prints a JSON list with one entry per size:
bytes, seconds one way (median), and bandwidth in GB/s (1e9 bytes).
"""

from __future__ import annotations

import json
import sys
import time
from statistics import median

import torch
import torch.distributed as dist

from vdpp_core.config import Parallel, RunConfig
from vdpp_core.config.execution import resolve
from vdpp_core.parallel.rendezvous import Ranks
from vdpp_core.parallel.world import World, joined

SIZES = [4**power for power in range(1, 14)]
ROUNDS = 15


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


def main() -> None:
    """Measure every size on the device named on the command line, and print the results on rank 0."""
    device = dict(enumerate(sys.argv)).get(1, "auto")
    execution, ranks = resolve(RunConfig(device=device, threads=1), local_ranks=2), Ranks.from_environment()
    with joined(Parallel(pp=2), execution, ranks, "probe") as world:
        for _ in range(20):
            one_way_s(world, SIZES[0])  # opens the connection and wakes the cores
        seconds = {size: one_way_s(world, size) for size in SIZES}
    if world.rank == 0:
        print(json.dumps([{"bytes": size, "seconds": s, "gb_per_s": size / s / 1e9} for size, s in seconds.items()]))


if __name__ == "__main__":
    main()
