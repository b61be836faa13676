"""The ways to split training, by name, and what all of them can do."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.optim import Adam, Optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from vdpp_core.config.errors import ConfigError
from vdpp_core.lessons.measure import Timeline, recomputation

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


def named(text: str) -> str:
    """The technique of that name, spelled in any way: full-shard, tp x fsdp, 1f1b.

    Raises:
        ConfigError: there is none.
    """
    known = {_plain(name): name for name in PLACES}
    refuse_unless("techniques", text, _plain(text) in known, f"must be one of {', '.join(PLACES)}")
    return known[_plain(text)]


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.lower().replace("×", "x"))


class Technique:
    """A model that is trained by several ranks; each has one object of this class.

    Attributes:
        modules: the model, or this rank's pieces of it.
        optimizer: Adam over this rank's parameters.
        timeline: where a step records what it does when. The caller restarts it before each step.
        takes: which of an experiment's micro_batches and chunks it uses; what it does not must be 1.
    """

    takes: tuple[str, ...] = ()
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

    @classmethod
    def formula(cls, experiment: Experiment) -> dict[str, float]:
        """What the formulas of `sizing` say that a rank holds and sends in a step, in bytes; only what is known.

        Keys: the attributes of `measure.Memory`, and collectives as of `measure.Sent`. Of ranks that differ, the one
        with most.
        """
        return {}

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


def new_model(experiment: Experiment, problem: Problem, device: torch.device, casts: bool = True) -> nn.Module:
    """The problem's model on a device, in fp64 where the experiment is, with checkpointing of its blocks on demand.

    Args:
        casts: whether it computes with rounded copies of its parameters where the experiment is in bf16.
    """
    dtype = torch.float64 if experiment.precision == "fp64" else torch.float32
    model = nn.Module.to(problem.model(), device, dtype)  # diffusers' own `to` warns
    blocks = problem.blocks(model)
    if casts and experiment.precision == "bf16":
        compute_in(torch.bfloat16, model, blocks)
    for block in blocks if experiment.checkpointing else ():
        checkpointed(block)
    return model


def checkpointed(block: nn.Module) -> None:
    """Have a block keep its input alone, and compute the rest of its activations again in the backward pass."""
    block.forward = partial(
        checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, context_fn=recomputation
    )


def compute_in(dtype: torch.dtype, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Have a model compute with rounded copies of its parameters and inputs, as FSDP's mixed precision does.

    Unit by unit: the parameters stay in fp32, and so are their gradients, each rounded once.
    """
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    for unit in (*blocks, model):
        names = [name for name, value in unit.named_parameters() if unit is not model or id(value) not in inside]
        unit.forward = _rounded(unit, names, dtype)


def _rounded(unit: nn.Module, names: Sequence[str], dtype: torch.dtype) -> Callable[..., Any]:
    forward = unit.forward

    def rounded(value: Tensor) -> Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        copies = {name: rounded(unit.get_parameter(name)) for name in names}
        # A view, so that a unit's gradients are added up before others join them: the order matters in bf16.
        args, kwargs = tree_map_only(Tensor, lambda value: rounded(value).view_as(value), (args, kwargs))
        with _reparametrize_module(unit, copies):
            return forward(*args, **kwargs)

    return run


def adam(*modules: nn.Module) -> Adam:
    """The optimizer of all techniques, over what is trained of some modules."""
    parameters = [one for module in modules for one in module.parameters() if one.requires_grad]
    return Adam(parameters, lr=LEARNING_RATE)
