"""Tensor parallelism: the ranks hold pieces of each layer, alone or with FSDP (Shoeybi et al. 2019, "Megatron-LM").

Queries, keys, values and the first feed-forward layer are cut by columns, which needs no exchange before; the layers
after them by rows, whose partial sums are added up. That is two all-reduces in the forward pass of a block, and two in
the backward pass for the gradients of what the columns were multiplied with.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)

from vdpp_core.lessons.data import Data, FullShard
from vdpp_core.lessons.experiments import Experiment
from vdpp_core.lessons.problems import PROBLEMS, TransformerProblem
from vdpp_core.lessons.techniques import refuse_unless

TP = 2  # ranks that share a layer where other ranks share the batch


def plan() -> dict[str, ParallelStyle]:
    """How torch cuts a block of the transformer.

    Norms are computed whole by each rank. They hand on DTensors, so that the gradients that come back from queries,
    keys and values are added before the all-reduce, instead of one all-reduce for each.
    """
    whole = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate(), use_local_output=False)
    columns = dict.fromkeys(("to_q", "to_k", "to_v", "fc1"), ColwiseParallel())
    return {"norm1": whole, "norm2": whole, **columns, **dict.fromkeys(("to_out", "fc2"), RowwiseParallel())}


def cut(blocks: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Leave this rank its piece of each block."""
    for block in blocks:
        parallelize_module(block, mesh, plan())


def check_cut(experiment: Experiment, ranks: int) -> None:
    """Refuse what cannot be cut over so many ranks.

    Raises:
        ConfigError: another model than the transformer, or heads that the ranks do not divide.
    """
    problem = PROBLEMS[experiment.problem]
    is_cut = isinstance(problem, TransformerProblem)
    refuse_unless("problem", experiment.problem, is_cut, "must be a transformer for tensor parallelism")
    if isinstance(problem, TransformerProblem):
        words = f"tensor parallelism over {ranks} must divide the {problem.heads} heads"
        refuse_unless("ranks", experiment.ranks, problem.heads % ranks == 0, words)


class TensorParallel(Data):
    """All ranks work on the whole batch, each with its heads and columns."""

    @classmethod
    def check(cls, experiment: Experiment) -> None:
        """Refuse what only pipelines do, and what cannot be cut."""
        super().check(experiment)
        check_cut(experiment, experiment.ranks)

    @classmethod
    def parts(cls, experiment: Experiment) -> int:
        """The batch as a whole."""
        return 1

    def spread(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Embeddings, norms and the head stay whole."""
        cut(blocks, init_device_mesh(self.device.type, (self.experiment.ranks,), mesh_dim_names=("tp",)))
        return model


class TensorAndData(FullShard):
    """Pairs of ranks share each layer; FSDP shards their pieces over the pairs (2D)."""

    @classmethod
    def check(cls, experiment: Experiment) -> None:
        """Refuse ranks that are no pairs, and what cannot be cut."""
        super().check(experiment)
        even = experiment.ranks >= 2 * TP and experiment.ranks % TP == 0
        refuse_unless("ranks", experiment.ranks, even, f"must be an even number from {2 * TP} on for TP × FSDP")
        check_cut(experiment, TP)

    @classmethod
    def parts(cls, experiment: Experiment) -> int:
        """A part for each pair."""
        return experiment.ranks // TP

    def mesh(self) -> DeviceMesh:
        """The dimension over which FSDP shards."""
        return self.both["dp"]

    def spread(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """First the pieces, then their shards."""
        shape = self.experiment.ranks // TP, TP
        self.both = init_device_mesh(self.device.type, shape, mesh_dim_names=("dp", "tp"))
        cut(blocks, self.both["tp"])
        return super().spread(model, blocks)
