"""How much memory and traffic parallel training needs, by formula: the sizing rules of an article, corrected.

The article is zenn.dev/turing_motors/articles/0e6e2baf72ebbc; docstrings name its section, or the paper that corrects
it. Memory and messages are bytes, traffic is the bytes a GPU sends in an iteration, GB and Gbit are 1e9. A size that
is not positive, or a count that is no whole number of at least 1, raises ConfigError; so do those beyond any machine,
whose products could be infinite.
"""

import functools
import math
from numbers import Integral, Real
from typing import NamedTuple

from vdpp_core.config.errors import ConfigError

LARGEST, MOST = 1e100, 10**12  # of sizes, of counts


def _sizes(**sizes: float) -> None:
    for name, size in sizes.items():
        if not isinstance(size, Real) or not 1 / LARGEST <= size <= LARGEST:
            raise ConfigError(name, size, f"must be positive and finite, from {1 / LARGEST:g} to {LARGEST:g}")


def _counts(**counts: int) -> None:
    for name, count in counts.items():
        if not isinstance(count, Integral) or isinstance(count, bool) or not 1 <= count <= MOST:
            raise ConfigError(name, count, f"must be a whole number of at least 1, at most {MOST:g}")


class TrainingState(NamedTuple):
    """Bytes that training keeps from one iteration to the next."""

    parameters: float
    gradients: float
    optimizer: float

    def sharded(self, gpus: int) -> "TrainingState":
        """A GPU's share with FSDP, 1/N of each; activations are not sharded and come on top (FSDP, memory)."""
        _counts(gpus=gpus)
        return TrainingState(*(size / gpus for size in self))


def training_state(parameters: float, each: tuple[float, float, float] = (2, 2, 4)) -> TrainingState:
    """Parameters times the bytes `each` has of itself, gradients and Adam's two states (FSDP, memory).

    (2, 2, 4) is all bf16; mixed precision is (4, 4, 8), FSDP keeps fp32 and casts as it gathers (PyTorch, FSDP).
    """
    _sizes(parameters=parameters, parameter_bytes=each[0], gradient_bytes=each[1], optimizer_bytes=each[2])
    return TrainingState(*(parameters * size for size in each))


def activation_factor(tensor_parallel: int = 1) -> float:
    """Bytes for each position, channel and layer of a GPT, 16-bit values, fused attention: 34, with TP 10 + 24/TP.

    Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"; their further 5·a·s/h is
    the attention matrix, which fused kernels do not keep. The article has 16 (FSDP, requirement 1).
    """
    _counts(tensor_parallel=tensor_parallel)
    return 10 + 24 / tensor_parallel


def activations(batch: int, sequence: int, hidden: int, layers: int, factor: float) -> float:
    """Bytes kept for the backward pass: batch · sequence · hidden · layers · factor (FSDP, requirement 1).

    With one layer and the bytes of a value it is the message of tensor and pipeline parallel (requirement 2 of each).
    """
    _counts(batch=batch, sequence=sequence, hidden=hidden, layers=layers)
    _sizes(factor=factor)
    return batch * sequence * hidden * layers * factor


def all_gather(size: float, gpus: int) -> float:
    """What gives `size` bytes to all: size · (N−1)/N. As much as a reduce-scatter (FSDP, requirement 2)."""
    _sizes(size=size)
    _counts(gpus=gpus)
    return size * (gpus - 1) / gpus


def all_reduce(size: float, gpus: int) -> float:
    """A reduce-scatter and an all-gather: 2 · size · (N−1)/N."""
    return 2 * all_gather(size, gpus)


def fsdp_traffic(parameters: float, gradients: float, gpus: int, reshard_after_forward: bool = True) -> float:
    """(2P + G) · (N−1)/N, or (P + G) · (N−1)/N where parameters stay after the forward pass; P and G as sent.

    The article describes the second all-gather (requirement 3) and leaves it out of its sum (FSDP, requirement 2).
    """
    passes = 2 if reshard_after_forward else 1
    return passes * all_gather(parameters, gpus) + all_gather(gradients, gpus)


def gbit_per_s(size: float, seconds: float = 1) -> float:
    """Gbit/s that carry `size` bytes in so many seconds: 8 · size / seconds / 1e9 (FSDP, requirement 2)."""
    _sizes(size=size, seconds=seconds)
    return 8 * size / seconds / 1e9


class Strategy(NamedTuple):
    """Of a GPU: bytes of state as it computes, what it gathers for a while apart; traffic within and between nodes."""

    memory: float
    inside: float
    between: float


def strategies(state: TrainingState, gpus: int, gpus_per_node: int) -> dict[str, Strategy]:
    """FSDP's sharding strategies (FSDP, requirement 3), N GPUs in n nodes of g; all is sent as it is kept.

    A ring leaves a node once, so a GPU's share of that is 1/g. HYBRID_SHARD is FULL_SHARD over g, and over n
    an all-reduce of each gradient shard: 2 · G/g · (n−1)/n. ConfigError: g does not divide N.
    """
    nodes = groups(gpus, gpus_per_node)
    share, in_node = state.sharded(gpus), state.sharded(gpus_per_node)
    sent = functools.partial(fsdp_traffic, state.parameters, state.gradients)

    def ring(memory: float, traffic: float) -> Strategy:
        between = traffic / gpus_per_node if nodes > 1 else 0
        return Strategy(memory, traffic - between, between)

    return {
        "FULL_SHARD": ring(sum(share), sent(gpus)),
        "SHARD_GRAD_OP": ring(state.parameters + sum(share[1:]), sent(gpus, False)),
        "NO_SHARD": ring(sum(state), all_reduce(state.gradients, gpus)),
        "HYBRID_SHARD": Strategy(sum(in_node), sent(gpus_per_node), all_reduce(in_node.gradients, nodes)),
    }


def tensor_traffic(size: float, layers: int, gpus: int) -> float:
    """Two all-reduces forward and two backward a layer, of `size` bytes: layers · 4 · 2 · size · (N−1)/N.

    Shoeybi et al. 2019, "Megatron-LM"; the article has layers · size (tensor parallel, requirement 2).
    """
    _counts(layers=layers)
    return layers * 4 * all_reduce(size, gpus)


def least_gpus(size: float, capacity: float, activations: float) -> float:
    """GPUs to split a state of `size` bytes over: size / (capacity − activations) (tensor parallel, requirement 3)."""
    _sizes(size=size, capacity=capacity, **({"activations": activations} if activations else {}))
    if capacity <= activations:
        raise ConfigError("capacity", f"{capacity:g}", f"must be above the activations, {activations:g}")
    return size / (capacity - activations)


def degree(at_least: float, count: int) -> int:
    """The smallest divisor of `count` that is at least so much (tensor parallel, requirement 3). ConfigError: none."""
    _sizes(at_least=at_least)
    _counts(count=count)
    if at_least > count:
        raise ConfigError("at_least", f"{at_least:.4g}", f"must be at most {count}")
    small = [size for size in range(1, math.isqrt(count) + 1) if count % size == 0]
    return min(size for size in (*small, *(count // size for size in small)) if size >= at_least)


def groups(gpus: int, gpus_per_group: int) -> int:
    """GPUs / GPUs per group: nodes, or with TP · PP per group DP (guidelines, step 3). ConfigError: a group in part."""
    _counts(gpus=gpus, gpus_per_group=gpus_per_group)
    if gpus % gpus_per_group:
        raise ConfigError("gpus", gpus, f"must be a multiple of {gpus_per_group}")
    return gpus // gpus_per_group


def bubble(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """The part of an iteration that a stage waits: (P−1)/(v·M + P−1), of P stages (pipeline parallel, micro-batches).

    v chunks of layers a stage divide its ratio to the work, (P−1)/M (Narayanan et al. 2021, on Megatron-LM).
    """
    _counts(stages=stages, micro_batches=micro_batches, chunks=chunks)
    return (stages - 1) / (chunks * micro_batches + stages - 1)


def micro_batches_kept(stages: int, micro_batches: int, chunks: int = 2) -> dict[str, float]:
    """Schedule -> micro-batches of activations a first stage keeps: M, at most P, at most P + (P−1)/v of v chunks.

    Narayanan et al. 2021; Korthikanti et al. 2022 for the last, where P divides M. ConfigError: one chunk.
    """
    _counts(stages=stages, micro_batches=micro_batches, chunks=chunks)
    if chunks < 2:
        raise ConfigError("chunks", chunks, "must be at least 2")
    most = {"GPipe": micro_batches, "1F1B": stages, "Interleaved 1F1B": stages + (stages - 1) / chunks}
    return {schedule: min(count, micro_batches) for schedule, count in most.items()}


def pipeline_traffic(size: float, micro_batches: int, stages: int) -> float:
    """Bytes of all GPUs: activations there and gradients back over P−1 boundaries, 2 · M · size · (P−1).

    The article has M · size, one way over one boundary (pipeline parallel, requirement 2).
    """
    _sizes(size=size)
    _counts(micro_batches=micro_batches, stages=stages)
    return 2 * micro_batches * size * (stages - 1)
