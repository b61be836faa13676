"""The ways to split training, by name, and what all of them can do."""

from __future__ import annotations

import importlib
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.utils.checkpoint import checkpoint

from vdpp_core.config.errors import ConfigError
from vdpp_core.lessons.measure import Timeline

if TYPE_CHECKING:
    from vdpp_core.lessons.experiments import Experiment
    from vdpp_core.lessons.problems import Batch, Problem

LEARNING_RATE = 1e-3
PLACES = {  # technique -> its class, in a module beside this one
    "one rank": "data.OneRank",
    "DDP": "data.DDP",
    "FULL_SHARD": "data.FullShard",
    "SHARD_GRAD_OP": "data.ShardGradOp",
    "HYBRID_SHARD": "data.HybridShard",
    "NO_SHARD": "data.NoShard",
    "TP": "tensor.TensorParallel",
    "TP × FSDP": "tensor.TensorAndData",
    "PP × TP × FSDP": "three_d.ThreeD",
    "GPipe": "pipelines.GPipe",
    "1F1B": "pipelines.OneForwardOneBackward",
    "Interleaved 1F1B": "pipelines.Interleaved",
    "Zero bubble": "pipelines.ZeroBubble",
}


def technique(name: str) -> type[Technique]:
    """The class of a technique. Its module is imported only now, because torch's take seconds."""
    module, _, kind = PLACES[name].partition(".")
    return getattr(importlib.import_module(f"vdpp_core.lessons.{module}"), kind)


class Technique:
    """A model that is trained by several ranks; each has one object of this class.

    Attributes:
        modules: the model, or this rank's pieces of it.
        optimizer: Adam over this rank's parameters.
        timeline: where a step records what it does when. The caller restarts it before each step.
    """

    modules: list[nn.Module]
    optimizer: Optimizer

    def __init__(self, experiment: Experiment, problem: Problem, device: torch.device) -> None:
        self.experiment, self.problem, self.device = experiment, problem, device
        self.timeline = Timeline(device)

    @classmethod
    def check(cls, experiment: Experiment) -> None:
        """Refuse what this technique cannot train.

        Raises:
            ConfigError: with the argument that has to change.
        """

    @classmethod
    def parts(cls, experiment: Experiment) -> int:
        """Parts in which the batch goes through the model, as of `Tensor.tensor_split`.

        Each part's gradient is rounded on its own in bf16, so the one rank that this is compared with takes the batch
        in the same parts.
        """
        return 1

    def step(self, batch: Batch) -> float:
        """One training step on the whole batch, of which each rank takes its part.

        Returns:
            The mean loss of the whole batch before the step, the same on every rank.
        """
        raise NotImplementedError

    def weights(self) -> dict[str, Tensor]:
        """All weights, whole, under the model's own names, on rank 0 at least. Every rank has to call it."""
        raise NotImplementedError


def refuse_unless(argument: str, value: object, condition: bool, allowed: str) -> None:
    """Raise ConfigError unless the condition holds."""
    if not condition:
        raise ConfigError(argument, value, allowed)


def new_model(experiment: Experiment, problem: Problem, device: torch.device) -> nn.Module:
    """The problem's model on a device, in fp64 where the experiment is, with checkpointing of its blocks on demand."""
    model = problem.model().to(device, torch.float64 if experiment.precision == "fp64" else torch.float32)
    for block in problem.blocks(model) if experiment.checkpointing else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
    return model


def adam(*modules: nn.Module) -> Adam:
    """The optimizer of all techniques, over what is trained of some modules."""
    parameters = [one for module in modules for one in module.parameters() if one.requires_grad]
    return Adam(parameters, lr=LEARNING_RATE)
