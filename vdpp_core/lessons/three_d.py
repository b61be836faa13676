"""Three dimensions at once: a pipeline of stages, cut by tensors and sharded by FSDP (Narayanan et al. 2021)."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed import all_reduce
from torch.distributed.fsdp import fully_shard

from vdpp_core.lessons.data import mixed_precision
from vdpp_core.lessons.experiments import Experiment
from vdpp_core.lessons.layers import Stage
from vdpp_core.lessons.pipelines import OneForwardOneBackward
from vdpp_core.lessons.problems import Batch, Block, Problem
from vdpp_core.lessons.techniques import checkpointed, refuse_unless
from vdpp_core.lessons.tensor import TP, check_cut, cut, formula
from vdpp_core.parallel.process_groups import make_mesh

PP = 2  # stages


class ThreeD(OneForwardOneBackward):
    """Two stages with 1F1B, pairs of ranks that share each layer, and FSDP over what is left.

    The chattiest ranks are neighbours: the order is stages, shards, tensors. torch's stages keep gathered parameters
    and whole gradients until the last micro-batch, so FSDP is SHARD_GRAD_OP here.
    """

    @classmethod
    def check(cls, experiment: Experiment) -> None:
        """Refuse ranks that are no such product, and batches that they cannot divide."""
        ranks, batch, parts = experiment.ranks, experiment.batch, cls.parts(experiment)
        refuse_unless("ranks", ranks, ranks % (PP * TP) == 0, f"must be a multiple of {PP * TP} for PP × TP × FSDP")
        refuse_unless("chunks", experiment.chunks, experiment.chunks == 1, f"must be 1 for {experiment.technique}")
        count = experiment.micro_batches
        refuse_unless("micro_batches", count, count >= PP, f"must be at least {PP}, the stages")
        refuse_unless("batch", batch, batch % parts == 0, f"must be a multiple of {parts}: shards × micro-batches")
        check_cut(experiment, TP)

    @classmethod
    def parts(cls, experiment: Experiment) -> int:
        """The micro-batches of all ranks that share a stage."""
        return experiment.ranks // (PP * TP) * experiment.micro_batches

    @classmethod
    def formula(cls, experiment: Experiment) -> dict[str, float]:
        """As for tensor parallelism with SHARD_GRAD_OP, with half of the layers."""
        return formula(experiment, TP, experiment.ranks // (PP * TP), gathers=1, stages=PP)

    def __init__(self, experiment: Experiment, problem: Problem, device: torch.device) -> None:
        self.replicas = experiment.ranks // (PP * TP)
        self.mesh = make_mesh(device.type, (PP, self.replicas, TP), ("pp", "dp", "tp"))
        self.group = self.mesh["pp"].get_group()
        all_reduce(torch.zeros(1, device=device), group=self.group)  # NCCL: all members meet before the first message
        super().__init__(experiment, problem, device)

    def prepared(self, stage: Stage) -> nn.Module:
        """First the pieces of each block, then their shards."""
        pieces, policy = stage.pieces(), mixed_precision(self.experiment)
        blocks = [piece for piece in pieces if isinstance(piece, Block)]
        for block in blocks if self.experiment.checkpointing else ():
            checkpointed(block)
        cut(blocks, self.mesh["tp"])
        for unit in (*pieces, stage):
            fully_shard(unit, mesh=self.mesh["dp"], reshard_after_forward=False, mp_policy=policy)
        return stage

    def step(self, batch: Batch) -> float:
        """One training step: FSDP averages gradients over its ranks, so the loss is their mean, too."""
        own = super().step(batch.parts(self.replicas)[self.mesh["dp"].get_local_rank()])
        mean = torch.tensor(own / self.replicas, dtype=torch.float64)
        if self.replicas > 1:
            all_reduce(mean, group=self.mesh["dp"].get_group())
        return mean.item()
