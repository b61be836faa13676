"""What each rank does for test_tensor_training.py: experiments in one process, compared with one rank.

python -m tests.distributed.forked RANKS tests.distributed.tensor_training
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from vdpp_core.lessons import rank
from vdpp_core.lessons.experiments import Experiment
from vdpp_core.lessons.problems import PROBLEMS, TransformerProblem

PROBLEMS["tall"] = TransformerProblem(hidden=64, layers=6, heads=4, sequence=32, vocabulary=64)
EXPERIMENTS = [
    *(Experiment("TP", "tall", 4, 3, precision=precision) for precision in ("fp32", "fp64", "bf16")),
    *(Experiment("TP × FSDP", "tall", 4, 4, precision=precision) for precision in ("fp32", "bf16")),
    Experiment("TP × FSDP", "tall", 4, 5, precision="fp64"),  # parts of unequal sizes
    Experiment("TP × FSDP", "tall", 4, 4, checkpointing=True),
    Experiment("PP × TP × FSDP", "tall", 8, 8, micro_batches=2),
    Experiment("PP × TP × FSDP", "tall", 8, 8, precision="fp64", micro_batches=2, checkpointing=True),
]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = []
    for experiment in (one for one in EXPERIMENTS if one.ranks == dist.get_world_size()):
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
