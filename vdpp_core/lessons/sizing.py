"""How much memory and traffic parallel training needs, by formula: the sizing rules of an article, corrected.

The article is zenn.dev/turing_motors/articles/0e6e2baf72ebbc; docstrings name its section, or the paper that corrects
it: Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models"; Narayanan et al. 2021,
"Efficient Large-Scale Language Model Training on GPU Clusters"; Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models"; Rajbhandari et al. 2020, "ZeRO"; Zhao et al. 2023, "PyTorch FSDP".

Memory and messages are bytes; traffic is the bytes that a GPU sends in an iteration; GB and Gbit are 1e9. Every
function raises ConfigError for what is no `Size` or `Count`; their bounds keep all products finite.
"""

import functools
import math
from typing import Annotated, NamedTuple

from pydantic import Field

from vdpp_core.config.errors import ConfigError
from vdpp_core.predict.checked_arguments import checked

Size = Annotated[float, Field(ge=1e-100, le=1e100)]
Count = Annotated[int, Field(ge=1, le=10**12)]


class TrainingState(NamedTuple):
    """Bytes that training keeps from one iteration to the next."""

    parameters: float
    gradients: float
    optimizer: float

    @checked
    def sharded(self, gpus: Count) -> "TrainingState":
        """A GPU's share with FSDP, 1/N of each, in bytes (ZeRO stage 3); unsharded activations come on top."""
        return TrainingState(*(size / gpus for size in self))


@checked
def training_state(parameters: Size, each: tuple[Size, Size, Size] = (2, 2, 4)) -> TrainingState:
    """State of so many parameters, in bytes (article: FSDP, memory).

    Args:
        each: bytes per parameter of the parameter itself, its gradient and Adam's two moments: (2, 2, 4) is all bf16,
            (4, 4, 8) mixed precision, where FSDP keeps fp32 and casts as it gathers (Zhao et al. 2023).
    """
    return TrainingState(*(parameters * size for size in each))


@checked
def activation_factor(tensor_parallel: Count = 1, each: Size = 2, dropout: bool = True) -> float:
    """Activation bytes per position, channel and layer of a GPT with fused attention: 10 + 24/TP in 16 bits, so 34.

    Korthikanti et al. 2022: 4 + 12/TP values of `each` bytes, and two masks of dropout of a byte. The 16 values are the
    inputs and outputs of both norms, queries, keys, values, the output of attention, and 4 + 4 around the activation
    function. Their further 5·a·s/h is the attention matrix, which fused kernels do not keep. The article has 16 (FSDP,
    requirement 1): the number of values, as if each had a byte.
    """
    return (4 + 12 / tensor_parallel) * each + (2 if dropout else 0)


@checked
def activations(batch: Count, sequence: Count, hidden: Count, layers: Count, factor: Size) -> float:
    """Bytes kept for the backward pass: batch · sequence · hidden · layers · factor (article: FSDP, requirement 1).

    With one layer and the bytes of a value it is the message of tensor and pipeline parallelism (their requirement 2).
    """
    return batch * sequence * hidden * layers * factor


@checked
def checkpointed(
    batch: Count,
    sequence: Count,
    hidden: Count,
    layers: Count,
    tensor_parallel: Count = 1,
    each: Size = 2,
    dropout: bool = True,
) -> float:
    """Bytes kept where only the input of each layer is, and one layer at a time is computed again.

    Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; Korthikanti et al. 2022.
    """
    again = activations(batch, sequence, hidden, 1, activation_factor(tensor_parallel, each, dropout))
    return activations(batch, sequence, hidden, layers, each) + again


@checked
def all_gather(size: Size, gpus: Count) -> float:
    """Traffic of an all-gather or a reduce-scatter of `size` bytes: size · (N−1)/N (article: FSDP, requirement 2)."""
    return size * (gpus - 1) / gpus


def all_reduce(size: float, gpus: int) -> float:
    """Traffic of an all-reduce of `size` bytes, a reduce-scatter and an all-gather: 2 · size · (N−1)/N."""
    return 2 * all_gather(size, gpus)


def fsdp_traffic(parameters: float, gradients: float, gpus: int, reshard_after_forward: bool = True) -> float:
    """Traffic of FSDP, with P and G bytes as sent: (2P + G) · (N−1)/N, or (P + G) · (N−1)/N without resharding.

    Rajbhandari et al. 2020 and Zhao et al. 2023. The article describes the second all-gather (FSDP, requirement 3) and
    leaves it out of its sum (requirement 2).
    """
    passes = 2 if reshard_after_forward else 1
    return passes * all_gather(parameters, gpus) + all_gather(gradients, gpus)


@checked
def gbit_per_s(size: Size, seconds: Size = 1) -> float:
    """Bandwidth that carries `size` bytes in `seconds`: 8 · size / seconds / 1e9 (article: FSDP, requirement 2)."""
    return 8 * size / seconds / 1e9


class Strategy(NamedTuple):
    """Of a GPU, in bytes: state kept while computing, without what is gathered; traffic inside and between nodes."""

    memory: float
    inside: float
    between: float


def strategies(
    state: TrainingState, gpus: int, gpus_per_node: int, as_sent: tuple[float, float] | None = None
) -> dict[str, Strategy]:
    """FSDP's sharding strategies on N GPUs in n nodes of g.

    A ring leaves a node once, so a GPU's share of that traffic is 1/g. HYBRID_SHARD is FULL_SHARD over g, and over n an
    all-reduce of each gradient shard: 2 · G/g · (n−1)/n (Zhao et al. 2023; article: FSDP, requirement 3).

    Args:
        as_sent: bytes of all parameters and all gradients as they are sent; by default in the type they are kept in.

    Raises:
        ConfigError: g does not divide N.
    """
    nodes = groups(gpus, gpus_per_node)
    share, in_node = state.sharded(gpus), state.sharded(gpus_per_node)
    parameters, gradients = as_sent or state[:2]
    sent = functools.partial(fsdp_traffic, parameters, gradients)

    def ring(memory: float, traffic: float) -> Strategy:
        between = traffic / gpus_per_node if nodes > 1 else 0
        return Strategy(memory, traffic - between, between)

    return {
        "FULL_SHARD": ring(sum(share), sent(gpus)),
        "SHARD_GRAD_OP": ring(state.parameters + sum(share[1:]), sent(gpus, False)),
        "NO_SHARD": ring(sum(state), all_reduce(gradients, gpus)),
        "HYBRID_SHARD": Strategy(sum(in_node), sent(gpus_per_node), all_reduce(gradients / gpus_per_node, nodes)),
    }


@checked
def tensor_traffic(size: Size, layers: Count, gpus: Count) -> float:
    """Traffic of tensor parallelism with messages of `size` bytes: layers · 4 · 2 · size · (N−1)/N.

    Two all-reduces forward and two backward per layer (Shoeybi et al. 2019). The article has layers · size (tensor
    parallel, requirement 2).
    """
    return layers * 4 * all_reduce(size, gpus)


@checked
def least_gpus(size: Size, capacity: Size, activations: Annotated[float, Field(ge=0, le=1e100)]) -> float:
    """GPUs needed to split a state of `size` bytes: size / (capacity − activations).

    Article: tensor parallel, requirement 3.

    Raises:
        ConfigError: the activations leave no room.
    """
    if capacity <= activations:
        raise ConfigError("capacity", f"{capacity:g}", f"must be above the activations, {activations:g}")
    return size / (capacity - activations)


@checked
def degree(at_least: Size, count: Count) -> int:
    """The smallest divisor of `count` that is at least `at_least` (article: tensor parallel, requirement 3).

    Raises:
        ConfigError: `at_least` is above `count`.
    """
    if at_least > count:
        raise ConfigError("at_least", f"{at_least:.4g}", f"must be at most {count}")
    small = [size for size in range(1, math.isqrt(count) + 1) if count % size == 0]
    return min(size for size in (*small, *(count // size for size in small)) if size >= at_least)


@checked
def groups(gpus: Count, gpus_per_group: Count) -> int:
    """GPUs / GPUs per group: the nodes, or with TP · PP GPUs per group the DP degree (article: guidelines, step 3).

    Raises:
        ConfigError: a group would be incomplete.
    """
    if gpus % gpus_per_group:
        raise ConfigError("gpus", gpus, f"must be a multiple of {gpus_per_group}")
    return gpus // gpus_per_group


@checked
def bubble(stages: Count, micro_batches: Count, chunks: Count = 1) -> float:
    """Share of an iteration that a stage waits: (P−1)/(v·M + P−1) with P stages, M micro-batches.

    v chunks of layers per stage divide its ratio to the work, (P−1)/M (Narayanan et al. 2021; article: pipeline
    parallel, micro-batches).
    """
    return (stages - 1) / (chunks * micro_batches + stages - 1)


@checked
def micro_batches_kept(
    stages: Count, micro_batches: Count, chunks: Annotated[int, Field(ge=2, le=10**12)] = 2
) -> dict[str, float]:
    """Micro-batches whose activations the first stage keeps, by schedule: M, at most P, at most P + (P−1)/v.

    Narayanan et al. 2021; Korthikanti et al. 2022 for the last one, with v chunks and M a multiple of P.
    """
    most = {"GPipe": micro_batches, "1F1B": stages, "Interleaved 1F1B": stages + (stages - 1) / chunks}
    return {schedule: min(count, micro_batches) for schedule, count in most.items()}


@checked
def pipeline_traffic(size: Size, micro_batches: Count, stages: Count) -> float:
    """Traffic of all GPUs together: activations and their gradients over P−1 boundaries, 2 · M · size · (P−1).

    The article has M · size, one way over one boundary (pipeline parallel, requirement 2).
    """
    return 2 * micro_batches * size * (stages - 1)
