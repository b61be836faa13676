"""Cost and memory of a rank for any layout, before it runs: counted on the meta device, or fitted for sliders.

A new video takes a minute to count for all layouts on eight GPUs, and the planner's sliders reach 28 800 videos.
No grid of counted videos can be prepared in the seconds that a notebook has, so the fast path is a fit to thirteen of
them. It uses what is known of the UNet: with F frames of P positions (rows × columns of the latents), the operations of
a pass are a sum of convolutions and linear layers (F·P), spatial attention (F·P²), temporal attention (F²·P), and the
embeddings of time (F) and image (P). A rank of N has ⌈F/N⌉ frames, and P/N positions of all frames in temporal
transformers. What it allocates beside parameters grows with frames, positions and simultaneous passes, as long as the
same layer has the peak. With tp, what the other ranks compute is known layer by layer, and activations are those of one
rank times a + b/N. tests/unit/test_predictor.py checks the errors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from vdpp_core.config import RunConfig
from vdpp_core.config.execution import resolve
from vdpp_core.config.layout import Parallel
from vdpp_core.predict import costs, memory
from vdpp_core.predict.costs import Cost
from vdpp_core.runs.metrics import Array

COUNTED = (  # frames, rows, columns, ranks that split the frames
    *((2, 16, 24, 1), (6, 16, 24, 1), (6, 32, 48, 1), (14, 24, 40, 1), (25, 72, 128, 1)),
    *((5, 32, 48, 3), (14, 40, 72, 4), (25, 72, 128, 7)),
)
TRACED = {  # whether frames are split -> guidance mode, frames, rows, columns, ranks
    False: (("sequential", 14, 40, 72, 1), ("batched", 14, 40, 72, 1), ("sequential", 25, 96, 160, 1)),
    True: (
        *(("sequential", 14, 40, 72, 2), ("batched", 14, 40, 72, 4), ("batched", 25, 72, 128, 2)),
        *(("sequential", 25, 96, 160, 7), ("batched", 25, 96, 160, 4), ("batched", 25, 96, 160, 2)),
        ("batched", 14, 48, 80, 2),
    ),
}
SHARDED = 8  # ranks that the fit shards parameters over, or as many as the frames allow
SMALLEST_SHARE = 4  # of activations by tp: beyond that, layers that stay whole have the peak
SMALLEST = 16 * 24  # positions of a frame; smaller videos are counted


class Room(NamedTuple):
    """Memory of a rank in bytes: the peak of its allocations, and the smallest device that has room for them."""

    peak: float
    needed: float


class Predictor:
    """Cost and memory of a rank for any layout, remembered once they are known.

    Counting is exact and takes about two seconds for each new share of the published UNet's work. With `fitted_to`,
    videos of that model, type and device are answered at once, from a fit that takes about ten seconds to make; what
    the fit does not cover is still counted.
    """

    def __init__(self, fitted_to: RunConfig | None = None) -> None:
        self.rooms: dict[tuple[Any, ...], Room] = {}
        has_layers = fitted_to is not None and fitted_to.is_svd and fitted_to.model != "dummy"
        one_unet = has_layers and fitted_to is not None and not fitted_to.svd_experts
        self.fit = _Fit(fitted_to) if fitted_to is not None and one_unet else None

    def cost(self, config: RunConfig) -> Cost:
        """Operations and bytes of a step, on the rank with the largest share of the work.

        Raises:
            ConfigError: the video is too large for the meta device.
        """
        return self.fit.cost(config) if self.fit and self.fit.covers(config) else costs.cost(config)

    def per_stage(self, config: RunConfig) -> list[Cost]:
        """`cost` of each stage; see `costs.per_stage`.

        Raises:
            ConfigError: the video is too large for the meta device.
        """
        return costs.per_stage(config) if config.experts else [self.cost(config)] * config.layout.pp

    def room(self, config: RunConfig) -> Room:
        """Memory of a rank in bytes. What the encoders made of further samples is in host memory and adds nothing.

        Raises:
            ConfigError: the video is too large for the meta device.
        """
        room = self.fit.room(config) if self.fit and self.fit.covers(config) else self._counted(config)
        return Room(room.peak, room.needed + memory.outside(config))

    def _counted(self, config: RunConfig) -> Room:
        decoding = config.command, config.decode, config.decode_chunk_size
        swaps = config.swap is not None
        key = memory.alike(config), *memory.kinds(config), swaps, config.fsdp_cpu_offload, decoding
        if key not in self.rooms:
            self.rooms[key] = _count(config)
        return self.rooms[key]


def _count(config: RunConfig) -> Room:
    return Room(memory.predict(config).total, memory.needed(config) - memory.outside(config))


class _Fit:
    """Formulas for one model in one type on one kind of device, fitted to COUNTED and TRACED."""

    def __init__(self, base: RunConfig) -> None:
        alone = {"parallel": Parallel(), "stage_weights": None, "fsdp_same_sample": False, "fsdp_cpu_offload": False}
        one = base.replace(command="benchmark", num_samples=1, **alone)
        self.family = _family(base)
        self.parameters = costs.parameters(base)
        layers = costs.temporal_layers(base.model, base.model_id)
        across_frames = 2 * len(layers["resnets"]) + 2 * len(layers["transformers"]) + 1  # as in parallel/frames.py
        summed = partial(_summed, base.model, base.model_id)
        # lockstep axis -> exchanges of a pass over so many ranks
        self.exchanges: dict[str, Callable[[int], int]] = {
            "cfg": lambda _: 1,
            "frames": lambda _: across_frames,
            "tp": summed,
        }
        unguided = one.replace(guidance_scale=1.0)
        flops = [costs.cost(_video(unguided, video, Parallel(frames=ranks))).flops for *video, ranks in COUNTED]
        self.flops = _least_squares([_work(*video) for video in COUNTED], flops)
        self.rooms = {(split, fsdp): self._fitted(one, split, fsdp) for split in TRACED for fsdp in (False, True)}
        self.left = {split: self._left(one, split) for split in TRACED}

    def covers(self, config: RunConfig) -> bool:
        *_, rows, columns = config.shape
        beyond = config.command == "generate" or config.fsdp_cpu_offload or rows * columns < SMALLEST
        return not beyond and _family(config) == self.family

    def _fitted(self, one: RunConfig, split: bool, fsdp: bool) -> tuple[Array, Array]:
        """Coefficients of the peak and of the device needed for it, both beside a rank's own parameters."""
        sizes, peaks, needs = [], [], []
        for mode, *video, ranks in TRACED[split]:
            layout = Parallel(dp=SHARDED // ranks if fsdp else 1, frames=ranks, fsdp=fsdp)
            config = _video(one.replace(guidance_mode=mode), video, layout)
            room, own = _count(config), self.parameters / layout.shards
            sizes.append(_held(config))
            peaks.append(room.peak - own)
            needs.append(room.needed - own)
        return _least_squares(sizes, peaks), _least_squares(sizes, needs)

    def _left(self, one: RunConfig, split: bool) -> float:
        """What tp 2 leaves of the memory beside the parameters."""
        mode, *video, ranks = next(traced for traced in TRACED[split] if traced[0] == "batched")
        peaks = []
        for tp in (1, 2):
            config = _video(one.replace(guidance_mode=mode), video, Parallel(frames=ranks, tp=tp))
            peaks.append(_count(config).peak - costs.held(config))
        return peaks[1] / peaks[0]

    def cost(self, config: RunConfig) -> Cost:
        layout, (batch, _, frames, rows, columns) = config.layout, config.shape
        videos = batch * config.guidance_passes // layout.cfg
        saved = _saved(config.model, config.model_id, layout.tp)
        flops = videos * (self.flops - saved) @ _work(frames, rows, columns, layout.frames)
        axes = {axis: size for axis, size in layout.lockstep_sizes.items() if size > 1}
        sent = {kind: int(size) for axis in axes for kind, size in SENT[axis](config).items()}
        exchanges_of = {axis: config.calls_per_step * self.exchanges[axis](size) for axis, size in axes.items()}
        ranks = costs.meeting(config, layout.shards)
        return Cost(int(flops), sent, exchanges_of, *costs.gathering(config), ranks)

    def room(self, config: RunConfig) -> Room:
        """For one sample, without communicators."""
        layout, held = config.layout, _held(config)
        peak, needed = self.rooms[layout.frames > 1, layout.shards > 1]
        own, share = costs.held(config), 1 - 1 / min(layout.tp, SMALLEST_SHARE)
        left = 1 - 2 * (1 - self.left[layout.frames > 1]) * share
        return Room(own + left * float(peak @ held), own + left * float(needed @ held))


def _family(config: RunConfig) -> tuple[Any, ...]:
    """What must be equal for the figures of one run to say something about another."""
    execution = resolve(config)
    kind = config.model, config.model_id, execution.dtype, execution.device_type
    return *kind, config.shortcuts, config.chunked


def _video(config: RunConfig, video: Sequence[int], layout: Parallel) -> RunConfig:
    return config.replace(latent_shape=(1, 4, *video), parallel=layout)


def _sent_for_guidance(config: RunConfig) -> dict[str, float]:
    return {"guidance": math.prod(config.shape) * resolve(config).element_size}


def _sent_for_frames(config: RunConfig) -> dict[str, float]:
    """Bytes that the rank with most of the work, between two neighbours, sends in a step: its part of
    `costs.formula`."""
    ranks, frames = config.layout.frames, config.shape[2]
    both_passes = costs.formula(config.replace(parallel=Parallel(frames=ranks)))
    total = {kind: size / config.layout.cfg for kind, size in both_passes.items()}
    own = math.ceil(frames / ranks)
    there_and_back = own * (ranks - 1) / ranks + (frames - own) / ranks
    return {
        "positions": total["positions"] * there_and_back / (2 * frames * (ranks - 1) / ranks),
        "halo": total["halo"] / max(2, ranks - 1),
        "statistics": total["statistics"] / ranks,
        "prediction": total["prediction"] / ranks,
    }


def _sent_for_tp(config: RunConfig) -> dict[str, float]:
    """Bytes that the rank with the most frames sends in a step."""
    layout, (batch, _, frames, _, _) = config.layout, config.shape
    value = batch * config.guidance_passes / layout.cfg * resolve(config).element_size
    summed = sum(
        one.shape[0]
        * costs.positions(config, one.level)
        * (frames / layout.frames if one.over_frames else math.ceil(frames / layout.frames))
        for one in costs.cut_weights(config.model, config.model_id, layout.tp)
        if one.is_summed
    )
    return {"partial sums": 2 * value * summed * (layout.tp - 1) / layout.tp}


# lockstep axis -> bytes of a step, by kind
SENT = {"cfg": _sent_for_guidance, "frames": _sent_for_frames, "tp": _sent_for_tp}


def _summed(model: str, model_id: str | None, tp: int) -> int:
    return sum(one.is_summed for one in costs.cut_weights(model, model_id, tp))


@functools.lru_cache(maxsize=32)
def _saved(model: str, model_id: str | None, tp: int) -> Array:
    """What tp takes from the coefficients of `_work`: operations with the other ranks' pieces of the weights, and
    attention of their heads."""
    own_frames, over_frames, within, across, of_frame, of_position = range(6)
    saved = np.zeros(7)
    for one in costs.cut_weights(model, model_id, tp) if tp > 1 else ():
        *_, module, layer, _ = one.name.split(".")
        everywhere, share = over_frames if one.over_frames else own_frames, 4.0**-one.level
        basis = everywhere
        if layer == "time_emb_proj":
            basis, share = of_frame, 1.0
        elif module == "attn2" and layer in ("to_k", "to_v"):  # the context is one token
            basis, share = (of_position, share) if one.over_frames else (of_frame, 1.0)
        saved[basis] += 2 * one.shape.numel() * (tp - 1) * share
        if layer == "to_q":
            keys = everywhere if module == "attn2" else across if one.over_frames else within
            saved[keys] += 4 * one.shape[0] * (tp - 1) * share ** (2 if keys == within else 1)
    return saved


def _work(frames: int, rows: int, columns: int, ranks: int) -> Array:
    """What the operations of a pass are linear in, for the rank with most frames."""
    positions, own = rows * columns, math.ceil(frames / ranks)
    mine = positions / ranks
    return np.array([own * positions, frames * mine, own * positions**2, frames**2 * mine, own, mine, 1.0])


def _held(config: RunConfig) -> Array:
    """What a rank's memory is linear in: positions of its frames and simultaneous passes, and of whole latents."""
    batch, _, frames, rows, columns = config.shape
    at_once = config.guidance_passes // config.layout.cfg // config.calls_per_step
    own = math.ceil(frames / config.layout.frames)
    return batch * rows * columns * np.array([at_once * own, frames, 0.0]) + np.array([0.0, 0.0, 1.0])


def _least_squares(sizes: Sequence[Array], values: Sequence[float]) -> Array:
    """Coefficients that minimise the relative error, so that small and large videos count alike."""
    weights = 1 / np.asarray(values, dtype=float)
    scaled = np.array(sizes) * weights[:, None]
    return np.asarray(np.linalg.lstsq(scaled, np.ones(len(sizes)), rcond=None)[0], dtype=np.float64)
