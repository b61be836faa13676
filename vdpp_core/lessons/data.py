"""Data parallelism: one rank, DDP, and FSDP with its sharding strategies (Zhao et al. 2023, "PyTorch FSDP").

Every rank computes the gradient of its part of the batch; what differs is which part of parameters, gradients and
optimizer states it keeps, and what it therefore has to send.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from vdpp_core.lessons import sizing
from vdpp_core.lessons.experiments import PRECISIONS, Experiment
from vdpp_core.lessons.problems import PROBLEMS, Batch, Problem
from vdpp_core.lessons.techniques import Technique, adam, new_model, refuse_unless
from vdpp_core.parallel.process_groups import make_mesh


class Data(Technique):
    """A whole model on every rank, each with a part of the batch."""

    casts = True  # computes with rounded copies of its parameters, in bf16

    def __init__(self, experiment: Experiment, problem: Problem, device: torch.device) -> None:
        super().__init__(experiment, problem, device)
        model = new_model(experiment, problem, device, self.casts)
        self.model = self.spread(model, problem.blocks(model))
        self.modules, self.optimizer = [self.model], adam(self.model)

    @classmethod
    def check(cls, experiment: Experiment) -> None:
        """Refuse ranks without a sample."""
        parts = cls.parts(experiment)
        words = f"must be at least {parts}, so that each part of the batch has a sample"
        refuse_unless("batch", experiment.batch, experiment.batch >= parts, words)

    @classmethod
    def parts(cls, experiment: Experiment) -> int:
        """A part for each rank."""
        return experiment.ranks

    @staticmethod
    def grid(ranks: int) -> tuple[int, int]:
        """How many groups hold everything, and how many ranks each of them shards it over."""
        return ranks, 1

    @classmethod
    def formula(cls, experiment: Experiment) -> dict[str, float]:
        """State over the shards; parameters gathered in the type computed with, gradients sent in the type kept."""
        count, trained = size(experiment.problem)
        each = 8 if experiment.precision == "fp64" else 4
        computed = count * PRECISIONS[experiment.precision].itemsize
        state = sizing.TrainingState(each * count, each * trained, 2 * each * trained)
        replicas, shards = cls.grid(experiment.ranks)
        samples = math.ceil(experiment.batch / cls.parts(experiment))
        return {
            **state.sharded(shards)._asdict(),
            "gathered": cls.gathered(experiment, computed),
            "activations": PROBLEMS[experiment.problem].kept(samples, experiment.precision, experiment.checkpointing),
            "all_gather": cls.gathers * sizing.all_gather(computed, shards),
            "reduce_scatter": sizing.all_gather(state.gradients, shards),
            "all_reduce": sizing.all_reduce(state.gradients / shards, replicas),
        }

    gathers = 0

    @classmethod
    def gathered(cls, experiment: Experiment, computed: float) -> float:
        """Bytes of whole parameters that are kept beside the state, of so many in the type that is computed with."""
        return computed if experiment.precision == "bf16" else 0.0

    def spread(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """The model as it is trained on several ranks."""
        raise NotImplementedError

    def mine(self, batch: Batch) -> list[Batch]:
        """What this rank takes of a batch."""
        parts = self.parts(self.experiment)
        return [batch.parts(parts)[dist.get_rank() * parts // self.experiment.ranks]]

    def step(self, batch: Batch) -> float:
        """One training step. The gradient that torch averages over the ranks is the sum of losses · N / batch size, so
        parts of unequal sizes are right, too."""
        parts, ranks = self.parts(self.experiment), self.experiment.ranks
        scale, total = parts / len(batch), torch.zeros((), dtype=torch.float64, device=self.device)
        for part in self.mine(batch):
            with self.timeline.span("forward"):
                losses = self.problem.losses(self.problem.predict(self.model, part.inputs), part.target)
            with self.timeline.span("backward"):
                (losses.sum() * scale).backward()
            total += losses.detach().sum()
        with self.timeline.span("optimizer"):
            self.optimizer.step()
        self.optimizer.zero_grad()
        if ranks > 1:
            dist.all_reduce(total)
        return total.item() / len(batch) * parts / ranks

    def weights(self) -> dict[str, Tensor]:
        """All weights on every rank."""
        return {name.removeprefix("module."): whole(value).detach() for name, value in self.model.named_parameters()}


class OneRank(Data):
    """Training on one rank, which everything else is compared with.

    Args:
        parts: number of parts in which it takes the batch, whose gradients it adds up.
    """

    def __init__(self, experiment: Experiment, problem: Problem, device: torch.device, parts: int = 1) -> None:
        super().__init__(experiment, problem, device)
        self.number = parts

    @classmethod
    def check(cls, experiment: Experiment) -> None:
        """Refuse several ranks."""
        super().check(experiment)
        refuse_unless("ranks", experiment.ranks, experiment.ranks == 1, "must be 1 for one rank")

    def spread(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """The model as it is."""
        return model

    def mine(self, batch: Batch) -> list[Batch]:
        """All of it."""
        return batch.parts(self.number)


class DDP(Data):
    """Everything on every rank; one all-reduce of the gradients, in buckets, while the backward pass runs."""

    def spread(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Gradients live in the buckets that are sent, so they take no memory twice."""
        return DistributedDataParallel(model, gradient_as_bucket_view=True)


class FullShard(Data):
    """FSDP, ZeRO stage 3: 1/N of everything; each block is gathered in the forward and again in the backward pass."""

    casts = False  # FSDP does, as it gathers
    reshard_after_forward = True
    gathers = 2

    @staticmethod
    def grid(ranks: int) -> tuple[int, int]:
        """One group, which shards over all ranks."""
        return 1, ranks

    @classmethod
    def gathered(cls, experiment: Experiment, computed: float) -> float:
        """Nothing beyond the unit that computes."""
        return 0.0

    def mesh(self) -> DeviceMesh:
        """Between the groups that hold everything, where there are several, and inside them."""
        shape = self.grid(self.experiment.ranks)
        names = ("replicate", "shard")
        first = 0 if shape[0] > 1 else 1
        return make_mesh(self.device.type, shape[first:], names[first:])

    def spread(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Each block is a unit that is gathered on its own, and so is the rest of the model."""
        policy, mesh = mixed_precision(self.experiment), self.mesh()
        for unit in (*blocks, model):
            fully_shard(unit, mesh=mesh, reshard_after_forward=self.reshard_after_forward, mp_policy=policy)
        return model


class ShardGradOp(FullShard):
    """ZeRO stage 2: parameters stay gathered from the forward to the backward pass, which saves the second gather."""

    reshard_after_forward = False
    gathers = 1

    @classmethod
    def gathered(cls, experiment: Experiment, computed: float) -> float:
        """All parameters, when the backward pass begins: this is what makes it larger."""
        return computed


class HybridShard(FullShard):
    """FULL_SHARD in each half of the ranks, as in a node; the halves all-reduce their gradient shards."""

    @staticmethod
    def grid(ranks: int) -> tuple[int, int]:
        """Two groups."""
        return 2, ranks // 2

    @classmethod
    def check(cls, experiment: Experiment) -> None:
        """Refuse what has no two halves."""
        super().check(experiment)
        even = experiment.ranks >= 4 and experiment.ranks % 2 == 0
        refuse_unless("ranks", experiment.ranks, even, "must be an even number from 4 on for HYBRID_SHARD")


class NoShard(FullShard):
    """Everything on every rank, as with DDP. FSDP2 has no such strategy: this is HYBRID_SHARD in groups of one rank."""

    gathers = 0

    @staticmethod
    def grid(ranks: int) -> tuple[int, int]:
        """Groups of one rank."""
        return ranks, 1


def whole(tensor: Tensor) -> Tensor:
    """All of a DTensor, which every rank that has a part of it has to ask for; other tensors as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def mixed_precision(experiment: Experiment) -> MixedPrecisionPolicy:
    """How FSDP computes and reduces."""
    if experiment.precision == "bf16":
        return MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return MixedPrecisionPolicy()


@functools.cache
def size(problem: str) -> tuple[int, int]:
    """Number of a model's parameters, and of those that are trained."""
    parameters = list(PROBLEMS[problem].model().parameters())
    return sum(one.numel() for one in parameters), sum(one.numel() for one in parameters if one.requires_grad)
