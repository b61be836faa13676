"""Cost of a step on a rank before it runs: operations and bytes, counted on the meta device."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from vdpp_core import models
from vdpp_core.config import ConfigError, RunConfig
from vdpp_core.config.axes import FSDP
from vdpp_core.config.execution import resolve
from vdpp_core.config.layout import Parallel
from vdpp_core.models.patches import Patches
from vdpp_core.parallel import sequence, tensor
from vdpp_core.parallel.fsdp_units import units
from vdpp_core.parallel.group import Group
from vdpp_core.predict import memory, trace

GROUPS_OF_NORM = 32  # in each group norm of SVD


@dataclass(frozen=True)
class Cost:
    """Cost of one step of a rank, both guidance passes included.

    Attributes:
        flops: floating-point operations; a multiplication and an addition count as two.
        sent: kind -> bytes that the rank sends within its lockstep group.
        exchanges_of: lockstep axis -> the number of collectives that carry them.
        gathered: bytes of parameters that FSDP gathers from other ranks (Zhao et al. 2023, "PyTorch FSDP").
        gathers: the number of all-gathers that carry them.
        ranks: lockstep axis, or "fsdp" -> how many ranks meet in an exchange or a gather.
    """

    flops: int
    sent: dict[str, int]
    exchanges_of: dict[str, int]
    gathered: int
    gathers: int
    ranks: dict[str, int] = field(default_factory=dict)

    @property
    def exchanges(self) -> int:
        """The number of collectives of all axes."""
        return sum(self.exchanges_of.values())


def cost(config: RunConfig, member: int | None = None) -> Cost:
    """Cost of a step for one member of a lockstep group, of the stage with the largest; a second or two for the
    published UNet.

    By default the largest cost of any member: the first one's share of the work, and halos for two neighbours where
    the frames are split that far. Sequential guidance passes cost as much as batched ones, with twice the exchanges.

    Raises:
        ConfigError: the video is too large for the meta device.
    """
    return max(per_stage(config, member), key=lambda cost: cost.flops)


def per_stage(config: RunConfig, member: int | None = None) -> list[Cost]:
    """`cost` of each stage or, where experts are swapped, with each expert. Of a stage with several experts, the mean
    of its steps.

    Raises:
        ConfigError: the video is too large for the meta device.
    """
    layout = config.parallel or Parallel()
    if config.experts is None:
        return [_with_expert(config, None, layout.shards_of(0), member)] * layout.pp
    if config.swap is not None:
        return [_with_expert(config, name, 1, member) for name, _ in config.experts]
    config = config.replace(parallel=layout)
    return [
        _mean(
            [_with_expert(config, name, layout.shards_of(stage), member) for name, _ in parts],
            [len(own) for _, own in parts],
        )
        for stage, steps in enumerate(config.stages())
        for parts in (config.segments(steps),)
    ]


def _with_expert(config: RunConfig, name: str | None, shards: int, member: int | None) -> Cost:
    """Cost of a step in which an expert, or the only denoiser, is called."""
    alike = memory.alike(config.replace(guidance_mode="batched", forward_chunking=False, enable_memory_opt=False))
    with memory.countable(config):
        flops, counted, exchanged = _counted(alike, resolve(config).dtype, member or 0, name)
    sent = dict(counted)
    if member is None and (config.parallel or Parallel()).frames > 2 and "halo" in sent:
        sent["halo"] *= 2
    exchanges_of = {axis: config.calls_per_step * count for axis, count in exchanged.items()}
    return Cost(flops, sent, exchanges_of, *gathering(config, shards, name), meeting(config, shards))


def meeting(config: RunConfig, shards: int) -> dict[str, int]:
    """Lockstep axis, or "fsdp" -> how many ranks meet in an exchange or a gather."""
    return {**(config.parallel or Parallel()).lockstep_sizes, FSDP.name: shards}


def _mean(costs: list[Cost], steps: list[int]) -> Cost:
    if len(costs) == 1:
        return costs[0]

    def of(values: list[int]) -> int:
        return sum(value * share for value, share in zip(values, steps, strict=True)) // sum(steps)

    def of_each(counts: list[dict[str, int]]) -> dict[str, int]:
        return {kind: of([count.get(kind, 0) for count in counts]) for kind in sorted({*itertools.chain(*counts)})}

    return Cost(
        of([cost.flops for cost in costs]),
        of_each([cost.sent for cost in costs]),
        of_each([cost.exchanges_of for cost in costs]),
        gathered=of([cost.gathered for cost in costs]),
        gathers=of([cost.gathers for cost in costs]),
        ranks=costs[0].ranks,
    )


def gathering(config: RunConfig, shards: int | None = None, name: str | None = None) -> tuple[int, int]:
    """Bytes of parameters that a rank gathers in a step with FSDP, and the number of all-gathers.

    (N−1)/N of the parameters per pass (ZeRO stage 3, Rajbhandari et al. 2020).

    Args:
        shards: by default those of the stage with most ranks.
        name: of the denoiser that is called, if not all are.
    """
    shards = (config.parallel or Parallel()).shards if shards is None else shards
    if shards == 1:
        return 0, 0
    units = _units(config.model, config.model_id, resolve(config).dtype, (config.parallel or Parallel()).tp)
    whole, pieces = map(sum, zip(*(units.values() if name is None else [units[name]]), strict=True))
    dtype = resolve(config).dtype
    calls = config.calls_per_step if config.is_svd else trace.calls_per_step(memory.alike(config), dtype)
    return calls * whole * (shards - 1) // shards, calls * pieces


def parameters(config: RunConfig) -> int:
    """Bytes of the denoisers' parameters."""
    return sum(experts(config).values())


def experts(config: RunConfig, tp: int = 1) -> dict[str, int]:
    """Denoiser -> bytes of its parameters, or of the pieces that each of `tp` ranks holds."""
    found = _units(config.model, config.model_id, resolve(config).dtype, tp)
    return {name: whole for name, (whole, _) in found.items()}


@functools.lru_cache(maxsize=64)
def refusal(model: str, model_id: str | None, layout: Parallel) -> str | None:
    """Why a model's denoisers cannot be split along frames and tp, whatever the video; None where they can."""
    found = models.denoisers_on_meta(_any_size(model, model_id), torch.float32)
    for denoiser in found.values():
        if layout.frames > 1 and (reason := sequence.refusal(denoiser, layout.frames)):
            return f"frames {layout.frames}: {reason}"
    try:
        tensor.check(found, layout.tp, layout.frames)
    except ConfigError as error:
        return str(error)
    return None


@functools.lru_cache(maxsize=8)
def tp_sizes(model: str, model_id: str | None, dtype: torch.dtype, most: int) -> tuple[int, ...]:
    """List the sizes of tp, up to a number of ranks, that are worth a plan: with each, a rank holds less than with the
    ones before."""
    sizes, least = [1], math.inf
    for ranks in range(2, most + 1) if model != "dummy" else ():
        if refusal(model, model_id, Parallel(tp=ranks)) is None:
            own = sum(whole for whole, _ in _units(model, model_id, dtype, ranks).values())
            sizes, least = [*sizes, *[ranks] * (own < least)], min(own, least)
    return tuple(sizes)


def held(config: RunConfig) -> int:
    """Bytes of the parameters that a rank of the fullest stage has at once."""
    layout = config.parallel or Parallel()
    sizes = experts(config, layout.tp)
    if config.swap is not None:
        return max(sizes.values())
    if config.experts is None:
        return sum(sizes.values()) // layout.shards
    config = config.replace(parallel=layout)
    stages = ((config.experts_of(stage) or (), layout.shards_of(stage)) for stage in range(layout.pp))
    return max(sum(sizes[name] for name in names) // shards for names, shards in stages)


def sent_by_all(config: RunConfig) -> dict[str, int]:
    """kind -> bytes that all ranks of a lockstep group together send in a step, counted collective by collective."""
    total: Counter[str] = Counter()
    for member in range((config.parallel or Parallel()).lockstep):
        total.update(cost(config, member).sent)
    return dict(total)


def formula(config: RunConfig) -> dict[str, float]:
    """kind -> bytes as of `sent_by_all`, of Stable Video Diffusion by formula: N ranks, F frames, X bytes of a hidden
    state.

    positions: 2·X·(N-1)/N per temporal transformer, an all-to-all there and back (Jacobs et al. 2023, "DeepSpeed
    Ulysses"). halo: 4·X·(N-1)/F per temporal resnet, whose two convolutions exchange the edge frames of each rank.
    statistics: N·(N-1) times mean and M2, 8 bytes per group and video, for two norms per resnet (merged as by Chan,
    Golub and LeVeque 1979). prediction: N·(N-1)·⌈F/N⌉ of its frames, an all-gather. All this for each rank of tp.
    partial sums: 2·(N-1)·X for each self-attention, feed-forward and resnet that tp cuts, an all-reduce (Shoeybi et al.
    2019, "Megatron-LM"). Cross-attention, whose output is constant, is summed in the first step alone.
    """
    layout = config.parallel or Parallel()
    ranks = layout.frames
    batch, channels, frames, rows, columns = config.shape
    videos = batch * config.guidance_passes
    frame = videos * resolve(config).element_size  # bytes of one value of a frame, in all videos
    layers = temporal_layers(config.model, config.model_id)
    transformers, resnets = (
        sum(width * positions(config, level) for level, width in layers[kind]) for kind in ("transformers", "resnets")
    )
    across_frames = {
        "positions": 2 * frame * frames * transformers * (ranks - 1) / ranks,
        "halo": 4 * frame * resnets * (ranks - 1),
        "statistics": ranks * (ranks - 1) * 8 * videos * GROUPS_OF_NORM * 2 * len(layers["resnets"]),
        "prediction": ranks * (ranks - 1) * -(-frames // ranks) * frame * channels * rows * columns,
    }
    found = {kind: layout.tp * size for kind, size in across_frames.items()}
    if layout.tp > 1:
        cut = cut_weights(config.model, config.model_id, layout.tp)
        summed = sum(one.shape[0] * positions(config, one.level) for one in cut if one.is_summed)
        found["partial sums"] = 2 * frame * frames * summed * (layout.tp - 1)
    return found


def positions(config: RunConfig, level: int) -> int:
    """Positions of a frame's hidden state at a level of the UNet, each of which halves rows and columns."""
    *_, rows, columns = config.shape
    return -(-rows // 2**level) * -(-columns // 2**level)


@functools.lru_cache(maxsize=8)
def temporal_layers(model: str, model_id: str | None) -> dict[str, list[tuple[int, int]]]:
    """ "resnets", "transformers" -> (level, channels) of each; each level halves the rows and columns."""
    unet = models.on_meta(_any_size(model, model_id), torch.float32)
    found: dict[str, list[tuple[int, int]]] = {"resnets": [], "transformers": []}
    for level, block in _blocks(unet):
        found["resnets"] += [(level, resnet.temporal_res_block.in_channels) for resnet in block.resnets]
        found["transformers"] += [(level, layer.in_channels) for layer in getattr(block, "attentions", [])]
    return found


class CutWeight(NamedTuple):
    """A weight of a UNet that tp cuts: its name, how often its block halves rows and columns, the shape of a rank's
    piece, and whether its layer ends with an all-reduce in every step."""

    name: str
    level: int
    shape: torch.Size
    is_summed: bool

    @property
    def over_frames(self) -> bool:
        """Whether its layer computes over all frames of some positions, rather than over all positions of a frame."""
        return "temporal_transformer_blocks" in self.name


@functools.lru_cache(maxsize=32)
def cut_weights(model: str, model_id: str | None, tp: int) -> list[CutWeight]:
    """List what so many ranks cut of Stable Video Diffusion's UNet."""
    unet = models.on_meta(_any_size(model, model_id), torch.float32)
    tensor.split(unet, Group(tp), Patches())
    levels = {id(parameter): level for level, block in _blocks(unet) for parameter in block.parameters()}
    cut = ((name, unet.get_parameter(name), piece.dim == 1) for name, piece in tensor.pieces_of(unet).items())
    found = ((name, one, by_rows and ".attn2." not in name) for name, one, by_rows in cut if one.ndim > 1)
    return [CutWeight(name, levels[id(one)], one.shape, summed) for name, one, summed in found]


def _blocks(unet: Any) -> list[tuple[int, Any]]:
    """The blocks of a UNet, each with its level."""
    levels = len(unet.down_blocks)
    up = ((levels - 1 - number, block) for number, block in enumerate(unet.up_blocks))
    return [*enumerate(unet.down_blocks), (levels - 1, unet.mid_block), *up]


def _any_size(model: str, model_id: str | None) -> RunConfig:
    return RunConfig(model=model, model_id=model_id, random_weights=model != "dummy")


@functools.lru_cache(maxsize=32)
def _units(model: str, model_id: str | None, dtype: torch.dtype, tp: int = 1) -> dict[str, tuple[int, int]]:
    """Denoiser -> bytes of a rank's pieces of its parameters, and the number of units that FSDP gathers, the root
    included."""
    made = models.denoisers_on_meta(_any_size(model, model_id), dtype)
    for denoiser in made.values() if tp > 1 else ():
        tensor.split(denoiser, Group(tp), Patches())
    return {
        name: (sum(parameter.nbytes for parameter in denoiser.parameters()), 1 + len(units(denoiser)))
        for name, denoiser in made.items()
    }


@functools.lru_cache(maxsize=256)
def _counted(
    config: RunConfig, dtype: torch.dtype, member: int, expert: str | None = None
) -> tuple[int, Counter[str], Counter[str]]:
    """Operations of a step, one of an expert's; kind -> bytes sent in it; lockstep axis -> exchanges."""
    first = next(steps.start for name, steps in config.segments(range(config.total_steps)) if name == expert)
    denoisers, calls = models.denoisers_on_meta(config, dtype), trace.passes(config, dtype).calls
    rehearsed = [trace.rehearse(denoiser, config.layout, member, calls) for denoiser in denoisers.values()]
    groups = [(axis, group) for each in rehearsed for axis, group in each.items()]
    stage = trace.before_step(config, denoisers, dtype, trace.Marks([]))

    def step_again() -> None:
        for _, group in groups:
            group.sent.clear()
            group.exchanges = 0
        stage.denoise(0, range(first, first + 1), None)

    with trace.Remembering() as counter:
        if calls > 1:  # in the first step, both ranks compute both calls
            step_again()
        before = counter.flops
        step_again()
        flops = counter.flops - before
        if config.layout.tp > 1 and config.is_svd:  # only the first step sums what cross-attention makes of the image
            step_again()
    sent, exchanged = Counter[str](), Counter[str]()
    for axis, group in groups:
        exchanged[axis] += group.exchanges
        for (_, kind), count in group.sent.items():
            sent[kind] += count
    return flops, sent, exchanged
