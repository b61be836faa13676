"""Tensor parallelism: the ranks hold pieces of each layer, alone or with FSDP (Shoeybi et al. 2019, "Megatron-LM").

Queries, keys, values and the first feed-forward layer are cut by columns, which needs no exchange before; the layers
after them by rows, whose partial sums are added up. That is two all-reduces in the forward pass of a block, and two in
the backward pass for the gradients of what the columns were multiplied with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)

from vdpp_core.lessons import sizing
from vdpp_core.lessons.data import Data, FullShard
from vdpp_core.lessons.experiments import PRECISIONS, Experiment
from vdpp_core.lessons.problems import PROBLEMS, TransformerProblem
from vdpp_core.lessons.techniques import refuse_unless
from vdpp_core.parallel.process_groups import make_mesh

TP = 2  # ranks that share a layer where other ranks share the batch


def plan() -> dict[str, ParallelStyle]:
    """How torch cuts a block of the transformer.

    Every rank computes the norms. They hand on DTensors, so that the gradients that come back from queries, keys and
    values are added before they are reduced, in one all-reduce instead of three.
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


def formula(experiment: Experiment, tp: int, shards: int = 1, gathers: int = 0, stages: int = 1) -> dict[str, float]:
    """What a rank of the first stage holds and sends in a step, in bytes; see `Technique.formula`.

    Projections are cut; embeddings, norms and the head are not. Layers whose activations are computed again have one
    all-reduce more: torch stops before their last one.

    Args:
        gathers: how often FSDP gathers the parameters.
    """
    made, each = PROBLEMS[experiment.problem], 8 if experiment.precision == "fp64" else 4
    assert isinstance(made, TransformerProblem)
    computed, layers = PRECISIONS[experiment.precision].itemsize, made.layers // stages
    rest = (made.vocabulary + made.sequence + 4 * layers) * made.hidden
    rest += (made.vocabulary + 2) * made.hidden if stages == 1 else 0
    own = 12 * layers * made.hidden**2 / tp + rest
    state = sizing.TrainingState(each * own, each * own, 2 * each * own)
    samples = math.ceil(experiment.batch * tp * stages / experiment.ranks)
    at_once = samples // experiment.micro_batches
    kept = at_once * min(stages, experiment.micro_batches)
    sizes, message = (made.sequence, made.hidden), samples * made.sequence * made.hidden * computed
    factor = sizing.activation_factor(tp, computed, dropout=False)
    activations = sizing.activations(kept, *sizes, layers, computed if experiment.checkpointing else factor)
    if experiment.checkpointing:
        activations += sizing.activations(at_once, *sizes, 1, factor)  # computed again
    return {
        **state.sharded(shards)._asdict(),
        "gathered": computed * own if gathers == 1 or (computed < each and not gathers) else 0.0,
        "activations": activations,
        "all_gather": gathers * sizing.all_gather(computed * own, shards),
        "reduce_scatter": sizing.all_gather(state.gradients, shards),
        "all_reduce": sizing.tensor_traffic(message, layers, tp) * (5 / 4 if experiment.checkpointing else 1),
        "send": message if stages > 1 else 0.0,
    }


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

    @classmethod
    def formula(cls, experiment: Experiment) -> dict[str, float]:
        """Projections and their activations over the ranks; four all-reduces a layer."""
        return formula(experiment, experiment.ranks)

    def spread(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Embeddings, norms and the head stay whole."""
        cut(blocks, make_mesh(self.device.type, (self.experiment.ranks,), ("tp",)))
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

    @classmethod
    def formula(cls, experiment: Experiment) -> dict[str, float]:
        """The state over all ranks, but for what is not cut."""
        return formula(experiment, TP, experiment.ranks // TP, gathers=2)

    def mesh(self) -> DeviceMesh:
        """The dimension over which FSDP shards."""
        return self.both["dp"]

    def spread(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """First the pieces, then their shards."""
        shape = self.experiment.ranks // TP, TP
        self.both = make_mesh(self.device.type, shape, ("dp", "tp"))
        cut(blocks, self.both["tp"])
        return super().spread(model, blocks)
