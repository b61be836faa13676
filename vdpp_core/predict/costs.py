"""What a step costs a rank, before it runs: operations and bytes, counted on the meta device."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from vdpp_core import models
from vdpp_core.config import RunConfig
from vdpp_core.config.execution import resolve
from vdpp_core.config.layout import Parallel
from vdpp_core.parallel.fsdp_units import units
from vdpp_core.predict import memory, trace

GROUPS_OF_NORM = 32  # in each group norm of SVD


@dataclass(frozen=True)
class Cost:
    """Of one step (both passes of the guidance where there are two).

    flops: floating-point operations of the rank, a multiplication and an addition counted as two.
    sent: kind -> bytes that the rank sends to others of its lockstep group, in so many exchanges.
    gathered: bytes of parameters that come from other ranks with FSDP, in so many gathers.
    """

    flops: int
    sent: dict[str, int]
    exchanges: int
    gathered: int
    gathers: int


def cost(config: RunConfig, member: int | None = None) -> Cost:
    """The cost of a step for number `member` of a lockstep group; a second or two for the published UNet.

    By default the most that any of them has: number 0's share of the work, and edges for two neighbours where there are
    that many.

    Passes of the guidance one after the other cost what they cost at once, but for meeting twice.

    Raises:
        ConfigError: a video too large for the meta device.
    """
    alike = memory.alike(
        config.replace(num_samples=1, guidance_mode="batched", forward_chunking=False, enable_memory_opt=False)
    )
    with memory.countable(config):
        flops, counted, exchanges = _counted(alike, resolve(config).dtype, member or 0)
    sent = dict(counted)
    if member is None and (config.parallel or Parallel()).frames > 2:
        sent["halo"] *= 2
    return Cost(flops, sent, passes(config) * exchanges, *gathering(config))


def passes(config: RunConfig) -> int:
    """Forward passes of a step, one after the other."""
    return 2 if config.sequential and config.guidance_scale > 1 else 1


def gathering(config: RunConfig) -> tuple[int, int]:
    """Bytes of parameters that a rank gathers in a step with FSDP, and in how many parts."""
    shards = (config.parallel or Parallel()).shards
    if shards == 1:
        return 0, 0
    whole, pieces = _units(config.model, config.model_id, resolve(config).dtype)
    return passes(config) * whole * (shards - 1) // shards, passes(config) * pieces


def parameters(config: RunConfig) -> int:
    """Bytes of the UNet's parameters."""
    return _units(config.model, config.model_id, resolve(config).dtype)[0]


def sent_by_all(config: RunConfig) -> dict[str, int]:
    """kind -> bytes that all ranks of a lockstep group send in a step, counted from the collectives one by one."""
    total: Counter[str] = Counter()
    for member in range((config.parallel or Parallel()).lockstep):
        total.update(cost(config, member).sent)
    return dict(total)


def formula(config: RunConfig) -> dict[str, float]:
    """The same for the frames axis by formula: N ranks, F frames, X the bytes of a layer's hidden state.

    positions: 2·X·(N-1)/N for each temporal transformer, there and back. halo: 4·X·(N-1)/F for each temporal resnet,
    two convolutions, the first and the last frame of each rank. statistics: N·(N-1) times mean and M2, 8 bytes a group
    and video, for two norms a resnet. prediction: N·(N-1)·⌈F/N⌉ of its frames.
    """
    ranks = (config.parallel or Parallel()).frames
    batch, channels, frames, rows, columns = config.shape
    videos = batch * (2 if config.guidance_scale > 1 else 1)
    frame = videos * resolve(config).element_size  # bytes of one value of a frame, in all videos
    layers = temporal_layers(config.model, config.model_id)
    transformers, resnets = (
        sum(width * -(-rows // 2**level) * -(-columns // 2**level) for level, width in layers[kind])
        for kind in ("transformers", "resnets")
    )
    return {
        "positions": 2 * frame * frames * transformers * (ranks - 1) / ranks,
        "halo": 4 * frame * resnets * (ranks - 1),
        "statistics": ranks * (ranks - 1) * 8 * videos * GROUPS_OF_NORM * 2 * len(layers["resnets"]),
        "prediction": ranks * (ranks - 1) * -(-frames // ranks) * frame * channels * rows * columns,
    }


@functools.lru_cache(maxsize=8)
def temporal_layers(model: str, model_id: str | None) -> dict[str, list[tuple[int, int]]]:
    """resnets, transformers -> (level, channels) of each; a level halves rows and columns of the one above."""
    unet = models.on_meta(_any_size(model, model_id), torch.float32)
    levels = len(unet.down_blocks)
    blocks = [*enumerate(unet.down_blocks), (levels - 1, unet.mid_block)]
    blocks += [(levels - 1 - number, block) for number, block in enumerate(unet.up_blocks)]
    found: dict[str, list[tuple[int, int]]] = {"resnets": [], "transformers": []}
    for level, block in blocks:
        found["resnets"] += [(level, resnet.temporal_res_block.in_channels) for resnet in block.resnets]
        found["transformers"] += [(level, layer.in_channels) for layer in getattr(block, "attentions", [])]
    return found


def _any_size(model: str, model_id: str | None) -> RunConfig:
    return RunConfig(model=model, model_id=model_id, random_weights=model != "dummy")


@functools.lru_cache(maxsize=8)
def _units(model: str, model_id: str | None, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of a UNet's parameters, and in how many parts FSDP gathers them, the root's included."""
    unet = models.on_meta(_any_size(model, model_id), dtype)
    return sum(parameter.nbytes for parameter in unet.parameters()), 1 + len(units(unet))


@functools.lru_cache(maxsize=256)
def _counted(config: RunConfig, dtype: torch.dtype, member: int) -> tuple[int, Counter[str], int]:
    """Operations of a step; kind -> bytes sent in it; in how many exchanges."""
    unet = models.ready(config, models.on_meta(config, dtype))
    groups = trace.rehearse(unet, config.layout, member)
    denoiser, latents = trace.before_step(config, unet, dtype)
    with trace.Remembering(), FlopCounterMode(display=False) as counter:
        denoiser.begin(0, 0).step(latents, 0)
    sent: Counter[str] = Counter()
    for group in groups.values():
        for (_, kind), count in group.sent.items():
            sent[kind] += count
    return counter.get_total_flops(), sent, sum(group.exchanges for group in groups.values())
