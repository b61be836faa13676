"""Bytes of a hand-off before a run: latents, the solver's memory and the states of the sample's generators."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch

from vdpp_core import models
from vdpp_core.config import RunConfig
from vdpp_core.config.execution import resolve
from vdpp_core.predict import memory, trace


class Messages(NamedTuple):
    """The hand-offs of a run.

    Attributes:
        solver: name of its class.
        latents: bytes of the latents in each.
        after: bytes of a whole one, after each step.
    """

    solver: str
    latents: int
    after: tuple[int, ...]


def of(config: RunConfig) -> Messages:
    """The hand-offs of a run. Stable Video Diffusion's solver remembers nothing; others are rehearsed.

    Raises:
        ConfigError: the pipeline refuses the run.
    """
    dtype = resolve(config).dtype
    if config.is_svd:
        size = math.prod(config.shape) * dtype.itemsize
        return Messages("EulerDiscreteScheduler", size, (size,) * config.total_steps)
    with memory.countable(config):
        return _rehearsed(memory.alike(config).replace(total_steps=config.total_steps, parallel=None), dtype)


def per_stage(config: RunConfig) -> list[int]:
    """Bytes that each stage but the last hands on with a sample.

    Raises:
        ConfigError: the pipeline refuses the run.
    """
    after = of(config).after
    return [after[steps.stop - 1] for steps in config.stages()[:-1]]


def per_rank(config: RunConfig) -> list[int | None]:
    """Bytes that each rank hands on with a sample; None where it hands none on.

    Raises:
        ConfigError: the pipeline refuses the run.
    """
    sizes, places = [*per_stage(config), None], map(config.layout.place, range(config.layout.world_size))
    return [sizes[place.stage] if config.samples_at(place) else None for place in places]


def largest(config: RunConfig) -> int:
    """Bytes of the largest hand-off; of a run in one stage, of the largest that it would have in several.

    Raises:
        ConfigError: the pipeline refuses the run.
    """
    in_stages = config.parallel is not None and config.parallel.pp > 1
    return max(per_stage(config) if in_stages else of(config).after)


@functools.lru_cache(maxsize=64)
def _rehearsed(config: RunConfig, dtype: torch.dtype) -> Messages:
    from vdpp_core.models.message import Message, Packing

    stage = trace.before_step(config, models.denoisers_on_meta(config, dtype), dtype, trace.Marks([]))
    predictions: list[Any] = []
    with trace.Remembering(), stage.seeing(predictions):
        latents = stage.denoise(0, range(1), None).latents
    sizes: list[int] = []

    def done(_step: int, _seconds: float) -> None:
        message = Message(latents, stage.solver.memory(), stage.draws.states())
        sizes.append(Packing(message, stage.solver.name).size)

    stage.rehearse(0, range(config.total_steps), predictions[0], done)
    return Messages(stage.solver.name, latents.nbytes, tuple(sizes))
