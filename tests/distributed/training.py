"""What each rank does for test_training.py: experiments one after another in one process, compared with one rank."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from vdpp_core.lessons import rank
from vdpp_core.lessons.experiments import Experiment
from vdpp_core.lessons.problems import PROBLEMS, SVDProblem, TransformerProblem

PROBLEMS["small"] = TransformerProblem(hidden=64, layers=4, heads=4, sequence=32, vocabulary=64)
PROBLEMS["small svd"] = SVDProblem(frames=3, clips=2)
SPLIT = ("DDP", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")
EXPERIMENTS = [
    *(Experiment(name, "small", batch=8) for name in SPLIT),
    *(Experiment(name, "small", batch=7, precision="fp64", steps=2) for name in SPLIT),
    *(Experiment(name, "small", batch=6, precision="bf16", steps=2) for name in ("DDP", "FULL_SHARD", "SHARD_GRAD_OP")),
    *(Experiment(name, "small", batch=8, checkpointing=True) for name in ("DDP", "FULL_SHARD")),
    Experiment("DDP", "small", batch=6, precision="bf16", checkpointing=True, steps=2),
    Experiment("FULL_SHARD", "small svd", batch=5, precision="fp64", steps=2),
    Experiment("HYBRID_SHARD", "small svd", batch=4, precision="bf16", steps=2, checkpointing=True),
]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = []
    for experiment in EXPERIMENTS:
        own, weights = rank.carry_out(experiment, torch.device("cpu"))
        everyone: list[Any] = [None] * experiment.ranks
        dist.all_gather_object(everyone, own)
        if dist.get_rank() == 0:
            expected = rank.of_one_rank(*rank.same_for(experiment))
            results.append(rank.compared(experiment, everyone, weights, *expected))
        dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
