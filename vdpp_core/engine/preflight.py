"""Checks whether this machine can do a run, before any rank starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vdpp_core.config import RunConfig, manifest
from vdpp_core.config.errors import ConfigError, in_one_line
from vdpp_core.config.execution import Execution, resolve
from vdpp_core.models import checkpoint
from vdpp_core.models.images import read_image, whole_image
from vdpp_core.parallel import devices, sequence, tensor

if TYPE_CHECKING:
    from vdpp_core.models.stage import Loop, Stage


def complete(config: RunConfig, ranks: int) -> RunConfig:
    """Fix what a run's configuration leaves open: the layout, which experts serve which steps, and of other pipelines
    than SVD the latents' shape.

    Raises:
        ConfigError: the layout needs another number of ranks, or the pipeline refuses the run.
    """
    config = config.for_ranks(ranks)
    if config.is_svd and not config.svd_experts:
        return _without_experts(config)
    _check_samples(config, resolve(config))
    checkpoint.check_settings(config)
    from vdpp_core import models
    from vdpp_core.models import experts
    from vdpp_core.models.message import Message, Packing
    from vdpp_core.models.stage import NoClock, Stage  # takes seconds to import

    with _settings_read(config):
        denoisers = models.denoisers_on_meta(config, torch.float32)
        if odd := experts.different_shapes(denoisers):
            raise ConfigError(*config.model_argument, odd)
        stage = Stage.around(config, denoisers, torch.device("cpu"), torch.float32, NoClock())
    shapes, served = set[tuple[int, ...]](), set[tuple[tuple[str, int], ...] | None]()
    for number in _different(config):
        with _sample(config, number):
            loop = _loop(stage, number, config)
            shapes.add(made := tuple(loop.latents.shape))
            if len(shapes) > 1:
                raise ConfigError(*config.model_argument, f"makes latents {made}, and of other rows another shape")
            served.add(loop.experts if len(denoisers) > 1 else None)
            passes = loop.passes.calls * loop.passes.stacked
            if config.layout.cfg > 1 and passes != 2:
                allowed = f"buys nothing without guidance: {config.pipeline_class} has {passes} pass in a step"
                raise ConfigError("cfg", 2, f"{allowed} of this run")
    if config.layout.pp > 1:
        try:
            Packing(Message(loop.latents, stage.solver.memory()), stage.solver.name)
        except TypeError as error:
            raise ConfigError("pp", config.layout.pp, str(error)) from None
    found = served.pop() if len(served) == 1 else None
    config = _without_experts(config) if found is None else config.replace(experts=found)
    if config.is_svd:
        return config
    sequence.check(denoisers, loop.calls, config.layout.frames)
    if config.latent_shape not in (None, made):
        raise ConfigError("latent_shape", config.latent_shape, f"leave it out: {config.pipeline_class} makes {made}")
    return config.replace(latent_shape=made)


@contextmanager
def _settings_read(config: RunConfig) -> Iterator[None]:
    """Report whatever diffusers or transformers raise at settings that they cannot use."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        words = f"must be a whole pipeline: {type(error).__name__}: {in_one_line(str(error))[:300]}"
        raise ConfigError(*config.model_argument, words) from None


def _without_experts(config: RunConfig) -> RunConfig:
    """Check that a run of a model with one denoiser asks for nothing that only experts have."""
    for name in ("swap", "split"):
        if (value := getattr(config, name)) in ("host", "disk", "boundary"):
            raise ConfigError(name, value, "only for a model with experts, such as Wan 2.2 A14B: this has one denoiser")
    return config


def _different(config: RunConfig) -> Iterable[int]:
    """One sample of each set of columns and each set of arguments that a pipeline may refuse or take otherwise."""
    if config.rows is None:
        return [0]
    rows = reversed([*enumerate(config.rows)])
    return sorted({(frozenset(row), config.of_sample(number).call): number for number, row in rows}.values())


def _loop(stage: Stage, sample: int, config: RunConfig) -> Loop:
    """Go through a sample's loop, without any weights."""
    from vdpp_core.models.stand_ins import Inventor, Recorder

    try:
        stage.encode([sample], Recorder(Inventor(0)))
        return stage.loop(sample)
    except ConfigError:
        raise
    except Exception as error:  # whatever a pipeline raises at arguments that it does not check
        words = f"{config.pipeline_class} refuses the run: {type(error).__name__}: {in_one_line(str(error))[:300]}"
        raise ConfigError(*config.model_argument, words) from None


def check(config: RunConfig, local_ranks: int) -> Execution:
    """Check that this machine can do a run (whose layout is known) with `local_ranks` of its ranks.

    Returns:
        How the run executes here.

    Raises:
        ConfigError: it cannot; one line that names the argument and what is allowed.
    """
    execution = resolve(config, local_ranks)
    devices.check_device(config, execution)
    devices.check_memory_options(config, execution)
    devices.check_dtype(config, execution)
    if config.random_weights and not config.is_svd:
        allowed = f"{config.model} can only be predicted without its weights: use memory or plan, or leave it out"
        raise ConfigError("random_weights", True, allowed)
    if config.is_svd:
        checkpoint.check_model(config, execution)
    else:
        checkpoint.check_denoisers(config, execution.dtype)
    if config.layout.tp > 1:
        from vdpp_core import models  # takes seconds to import

        tensor.check(models.denoisers_on_meta(config, execution.dtype), config.layout.tp, config.layout.frames)
    if config.is_svd or config.rows is not None:
        _check_samples(config, execution)
    return execution


@contextmanager
def _sample(config: RunConfig, number: int) -> Iterator[RunConfig]:
    """A sample's own configuration. Where there is a manifest, errors name the row."""
    with nullcontext() if config.rows is None else manifest.errors_of_row(config.manifest, number):
        yield config.of_sample(number)


def _check_samples(config: RunConfig, execution: Execution) -> None:
    """Check what the samples are made from, each by its row where there is a manifest."""
    rows, known = config.rows or ({},), set[Path | None]()
    some_have_images = any("image" in row for row in rows)
    for number in range(len(rows)):
        with _sample(config, number) as sample:
            _check_sample(sample, execution, known)
            if config.is_svd and sample.guidance_passes != config.guidance_passes:
                allowed = "must be above 1 in all rows or in none, as the run's --guidance-scale is"
                raise ConfigError("guidance_scale", sample.guidance_scale, allowed)
            if some_have_images and sample.image is None:
                raise ConfigError("image", "''", "is missing in this row, while others have one")


def _check_sample(config: RunConfig, execution: Execution, known: set[Path | None]) -> None:
    """Check a sample's arguments and image, unless the image is known to be readable."""
    if config.is_svd:
        checkpoint.check_guidance(config, execution)
    else:
        from vdpp_core.models import pipelines  # takes seconds to import

        pipelines.check(config)
    if config.image_path is not None and config.image_path not in known:
        if config.is_svd:
            read_image(config.image_path, config.image_size)
        else:
            whole_image(config.image_path)
        known.add(config.image_path)
