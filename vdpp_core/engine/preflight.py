"""Checks whether this machine can do a run, before any rank starts."""

from __future__ import annotations

import torch

from vdpp_core.config import ConfigError, RunConfig
from vdpp_core.config.execution import Execution, resolve
from vdpp_core.models import checkpoint
from vdpp_core.models.images import read_image
from vdpp_core.parallel import devices, sequence


def complete(config: RunConfig, ranks: int) -> RunConfig:
    """Fix what a run's configuration leaves open: the layout, and of other pipelines than SVD the latents' shape.

    Raises:
        ConfigError: the layout needs another number of ranks, or the pipeline refuses the run.
    """
    config = config.for_ranks(ranks)
    if config.is_svd or config.latent_shape is not None:
        return config
    from vdpp_core.models import pipelines  # takes seconds to import

    pipelines.check(config)
    stage = pipelines.without_weights(config, torch.float32)
    loop = stage.loop(0)
    passes = loop.passes.calls * loop.passes.stacked
    if config.layout.cfg > 1 and passes != 2:
        allowed = f"buys nothing without guidance: {config.pipeline_class} has {passes} pass in a step of this run"
        raise ConfigError("cfg", 2, allowed)
    sequence.check(stage.official.denoisers, loop.calls, config.layout.frames)
    return config.replace(latent_shape=tuple(loop.latents.shape))


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
    if not config.is_svd:
        return execution
    checkpoint.check_guidance(config, execution)
    checkpoint.check_model(config, execution)
    if config.image_path is not None:
        read_image(config.image_path, config.image_size)
    return execution
