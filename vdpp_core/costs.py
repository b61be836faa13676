"""What a step costs a rank, before it runs: operations and bytes, counted on the meta device; then seconds."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from vdpp_core import machine, memory, tables, trace, unets
from vdpp_core.config import RunConfig
from vdpp_core.layout import Parallel

GROUPS_OF_NORM = 32  # in each group norm of SVD
PUBLISHED_STEPS = 28


@dataclass(frozen=True)
class Cost:
    """Of one step (both passes of the guidance where there are two).

    flops: floating-point operations of the rank, a multiplication and an addition counted as two.
    sent: kind -> bytes that the rank sends to others of its lockstep group.
    gathered: bytes of parameters that come from other ranks with FSDP.
    """

    flops: int
    sent: dict[str, int]
    gathered: int


@dataclass(frozen=True)
class Rates:
    """What a rank computes and sends in a second, and where that is known from."""

    flops_per_s: float
    bytes_per_s: float
    source: str


def cost(config: RunConfig, member: int = 0) -> Cost:
    """The cost of a step for number `member` of a lockstep group; 0 has the largest share. A second or two."""
    layout = config.parallel or Parallel()
    alike, dtype = memory.alike(config.replace(num_samples=1)), machine.dtype(config)
    flops, sent = _counted(alike, dtype, member)
    passes = 2 if config.sequential and config.guidance_scale > 1 else 1
    gathered = trace.step(alike, dtype).parameters.shard(1) if layout.shards > 1 else 0
    return Cost(flops, dict(sent), passes * gathered * (layout.shards - 1) // layout.shards)


def step_s(config: RunConfig, rates: Rates) -> float:
    """Seconds of a step of the slowest rank: what the lockstep group exchanges, and beside that the longer of computing
    and gathering parameters. Pessimistic where exchanges overlap, optimistic where ranks wait for each other."""
    found = cost(config)
    computing, gathering = found.flops / rates.flops_per_s, found.gathered / rates.bytes_per_s
    return sum(found.sent.values()) / rates.bytes_per_s + max(computing, gathering)


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
    size = torch.empty(0, dtype=machine.dtype(config)).element_size()
    resnets, transformers = _temporal_values(config)
    frame = videos * size  # bytes of one value of a frame, in all videos
    return {
        "positions": 2 * frame * frames * sum(transformers) * (ranks - 1) / ranks,
        "halo": 4 * frame * sum(resnets) * (ranks - 1),
        "statistics": ranks * (ranks - 1) * 8 * videos * GROUPS_OF_NORM * 2 * len(resnets),
        "prediction": ranks * (ranks - 1) * -(-frames // ranks) * frame * channels * rows * columns,
    }


def _temporal_values(config: RunConfig) -> tuple[list[int], list[int]]:
    """Channels × rows × columns of each temporal resnet and each temporal transformer; each level halves the size."""
    unet = unets.on_meta(config, torch.float32)
    levels = len(unet.down_blocks)
    blocks = [*enumerate(unet.down_blocks), (levels - 1, unet.mid_block)]
    blocks += [(levels - 1 - number, block) for number, block in enumerate(unet.up_blocks)]
    resnets, transformers = [], []
    for level, block in blocks:
        rows, columns = (-(-length // 2**level) for length in config.shape[3:])
        resnets += [resnet.temporal_res_block.in_channels * rows * columns for resnet in block.resnets]
        attentions = getattr(block, "attentions", [])
        transformers += [attention.in_channels * rows * columns for attention in attentions]
    return resnets, transformers


@functools.lru_cache(maxsize=256)
def _counted(config: RunConfig, dtype: torch.dtype, member: int) -> tuple[int, Counter[str]]:
    """Operations of a step, and kind -> bytes sent in it."""
    unet = unets.ready(config, unets.on_meta(config, dtype))
    groups = trace.rehearse(unet, config.layout, member)
    denoiser, latents = trace.before_step(config, unet, dtype)
    with FlopCounterMode(display=False) as counter:
        denoiser.begin(0, 0).step(latents, 0)
    sent: Counter[str] = Counter()
    for axis, group in groups.items():
        for (_, kind), count in group.sent.items():
            sent["guidance" if axis == "cfg" else kind] += count
    return counter.get_total_flops(), sent


def published_config(row: dict[str, Any]) -> RunConfig:
    """The run of a row of the published memory experiment."""
    sharded = row["mode"] == "fsdp"
    return RunConfig(
        model="svd",
        random_weights=True,
        device="cuda",
        dtype="fp16",
        total_steps=PUBLISHED_STEPS,
        latent_shape=(1, 4, row["frames"], *row["latent_hw"]),
        guidance_mode="sequential",
        fsdp_same_sample=sharded,
        parallel=Parallel(dp=row["gpus"], fsdp=True) if sharded else Parallel(pp=row["gpus"]),
    )


def published_rates() -> Rates:
    """Of an A5000, from the user's own figures: operations a second of the largest video that one card computed, and
    bytes a second of FSDP at 25 × 72 × 128, which waited for its parameters (so at least that)."""
    rows = {row["id"]: row for row in tables.published()["memory_cfg3_28steps_1sample"]}
    one, sharded = rows[3], rows[5]
    return Rates(
        cost(published_config(one)).flops * PUBLISHED_STEPS / one["first_sample_time_s"],
        cost(published_config(sharded)).gathered * PUBLISHED_STEPS / sharded["first_sample_time_s"],
        "published: one A5000 at 25 × 96 × 160; FSDP on seven at 25 × 72 × 128",
    )
