"""What a layout costs, at once: fitted to a few counted videos, for sliders that cannot wait for counting.

With F frames of P positions (rows × columns of the latents), the operations of a pass are a sum of convolutions and
linear layers (F·P), spatial attention (F·P²), temporal attention (F²·P), and what is told of the time (F) and the image
(P). A rank of N has ⌈F/N⌉ frames, and P/N positions of all frames in temporal transformers. What it allocates beside
parameters grows with frames, positions and passes at once, as long as the layer at the peak stays the same.
tests/unit/test_estimates.py has how near that comes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.execution import resolve
from vdpp_core.config.layout import Parallel
from vdpp_core.predict import costs, memory, replay
from vdpp_core.predict.costs import Cost
from vdpp_core.predict.planner import Room
from vdpp_core.runs.metrics import Array

COUNTED = (  # frames, rows, columns, ranks
    *((2, 16, 24, 1), (6, 16, 24, 1), (6, 32, 48, 1), (14, 24, 40, 1), (25, 72, 128, 1)),
    *((5, 32, 48, 3), (14, 40, 72, 4), (25, 72, 128, 7)),
)
TRACED = {  # whether frames are split -> mode of the guidance, frames, rows, columns, ranks
    False: (("sequential", 14, 40, 72, 1), ("batched", 14, 40, 72, 1), ("sequential", 25, 96, 160, 1)),
    True: (
        *(("sequential", 14, 40, 72, 2), ("batched", 14, 40, 72, 4), ("batched", 25, 72, 128, 2)),
        *(("sequential", 25, 96, 160, 7), ("batched", 25, 96, 160, 4)),
    ),
}
SHARDED = 8  # ranks
SMALLEST = 16 * 24  # positions of a frame


class Estimated:
    """Costs and peaks of one model in one type, by formula. To make it takes about ten seconds for the published UNet.

    The figures are those of `vdpp_core.predict.planner.Counted`, without waiting.
    """

    def __init__(self, base: RunConfig) -> None:
        """base: model, type and device of what will be asked for.

        Raises:
            ConfigError: model dummy, which has no layers to count.
        """
        if base.model == "dummy" and base.model_id is None:
            raise ConfigError("model", "dummy", "has no layers that could be estimated")
        one = base.replace(num_samples=1, parallel=Parallel())
        self.parameters = costs.parameters(base)
        layers = costs.temporal_layers(base.model, base.model_id)
        across_frames = 2 * len(layers["resnets"]) + 2 * len(layers["transformers"]) + 1  # as in parallel/frames.py
        self.meetings = {"cfg": 1, "frames": across_frames}  # lockstep axis -> exchanges of a pass
        unguided = one.replace(guidance_scale=1.0)
        flops = [costs.cost(_video(unguided, video, ranks)).flops for *video, ranks in COUNTED]
        self.flops = _fit([_work(*video) for video in COUNTED], flops)
        self.rooms = {(split, shards): self._fitted(one, split, shards) for split in TRACED for shards in (1, SHARDED)}

    def _fitted(self, one: RunConfig, split: bool, shards: int) -> tuple[Array, Array]:
        """Coefficients of what is allocated, and of what the allocator needs for it, beside a rank's parameters."""
        sizes, peaks, rooms = [], [], []
        for mode, *video, ranks in TRACED[split]:
            config = _video(one.replace(guidance_mode=mode), video, ranks)
            found = memory.trace_of(config), shards
            sizes.append(_held(config))
            peaks.append(replay.peak(*found).total - self.parameters / shards)
            rooms.append(replay.room_needed(*found, False) - self.parameters / shards)
        return _fit(sizes, peaks), _fit(sizes, rooms)

    def cost(self, config: RunConfig) -> Cost:
        """As `vdpp_core.predict.costs.cost`, for the rank with the largest share.

        Raises:
            ConfigError: a video smaller than those that were counted.
        """
        layout, (batch, _, frames, rows, columns) = config.layout, config.shape
        if rows * columns < SMALLEST:
            allowed = f"must have at least {SMALLEST} rows × columns to be estimated; smaller ones can be counted"
            raise ConfigError("latent_shape", config.shape, allowed)
        videos = batch * (2 if config.guidance_scale > 1 and layout.cfg == 1 else 1)
        flops = videos * self.flops @ _work(frames, rows, columns, layout.frames)
        sent: dict[str, int] = {}
        meetings = 0
        for axis in (axis for axis, size in layout.lockstep_sizes.items() if size > 1):
            sent |= {kind: int(size) for kind, size in SENT[axis](config).items()}
            meetings += costs.passes(config) * self.meetings[axis]
        return Cost(int(flops), sent, meetings, *costs.gathering(config))

    def room(self, config: RunConfig) -> Room:
        """As `vdpp_core.predict.planner.Counted.room`."""
        layout = config.layout
        own, held = self.parameters / layout.shards, _held(config)
        peak, needed = self.rooms[layout.frames > 1, SHARDED if layout.shards > 1 else 1]
        return Room(own + float(peak @ held), own + float(needed @ held) + memory.outside(config))


def _video(config: RunConfig, video: Sequence[int], ranks: int) -> RunConfig:
    return config.replace(latent_shape=(1, 4, *video), parallel=Parallel(frames=ranks))


def _sent_for_guidance(config: RunConfig) -> dict[str, float]:
    return {"guidance": math.prod(config.shape) * resolve(config).element_size}


def _sent_for_frames(config: RunConfig) -> dict[str, float]:
    """Bytes of a step from the rank with most of the work, between two neighbours: its part of `costs.formula`."""
    ranks, frames = config.layout.frames, config.shape[2]
    guidance = config.guidance_scale if config.layout.cfg == 1 else 1.0
    total = costs.formula(config.replace(guidance_scale=guidance, parallel=Parallel(frames=ranks)))
    own = math.ceil(frames / ranks)
    there_and_back = own * (ranks - 1) / ranks + (frames - own) / ranks
    return {
        "positions": total["positions"] * there_and_back / (2 * frames * (ranks - 1) / ranks),
        "halo": total["halo"] / max(2, ranks - 1),
        "statistics": total["statistics"] / ranks,
        "prediction": total["prediction"] / ranks,
    }


SENT = {"cfg": _sent_for_guidance, "frames": _sent_for_frames}  # lockstep axis -> bytes from a rank in a step


def _work(frames: int, rows: int, columns: int, ranks: int) -> Array:
    """What the operations of a pass are linear in, for the rank with most frames."""
    positions, own = rows * columns, math.ceil(frames / ranks)
    mine = positions / ranks
    return np.array([own * positions, frames * mine, own * positions**2, frames**2 * mine, own, mine, 1.0])


def _held(config: RunConfig) -> Array:
    """What the memory of a rank is linear in: positions of all frames and passes at once; those of whole latents."""
    batch, _, frames, rows, columns = config.shape
    at_once = 2 if config.guidance_scale > 1 and config.layout.cfg == 1 and not config.sequential else 1
    own = math.ceil(frames / config.layout.frames)
    return batch * rows * columns * np.array([at_once * own, frames, 0.0]) + np.array([0.0, 0.0, 1.0])


def _fit(sizes: Sequence[Array], values: Sequence[float]) -> Array:
    """Least squares of the relative error: all videos count alike, small or large."""
    weights = 1 / np.asarray(values, dtype=float)
    scaled = np.array(sizes) * weights[:, None]
    return np.asarray(np.linalg.lstsq(scaled, np.ones(len(sizes)), rcond=None)[0], dtype=np.float64)
