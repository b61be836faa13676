"""Checks whether this machine can do a run, before any rank starts."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from vdpp_core.config import RunConfig
from vdpp_core.config.execution import Execution, cores, resolve
from vdpp_core.models import checkpoint
from vdpp_core.models.images import read_image
from vdpp_core.parallel import devices
from vdpp_core.runs import other_runs


def before_start(config: RunConfig, execution: Execution) -> list[str]:
    """List warnings about this machine's cores and disk before a run starts on it."""
    found = []
    if execution.device_type == "cpu":
        ranks, available = execution.local_ranks, cores()
        if ranks * execution.threads > available:
            wanted = f"{ranks} × {execution.threads} threads on {available} cores"
            found.append(f"{wanted}: ranks take turns, and their times mean little")
        elif others := other_runs.in_the_way(execution):
            running = f"{other_runs.ranks_of_other_runs(others)} {'is' if others == 1 else 'are'} running"
            found.append(f"{running} on these {available} cores: this run will take longer")
    needed = config.num_samples * math.prod(config.shape) * execution.element_size * config.save_latents
    place = (config.output_dir or Path.cwd()).absolute()
    free = shutil.disk_usage(next(path for path in (place, *place.parents) if path.exists())).free
    if needed > free:
        found.append(
            f"the latents of {config.num_samples} samples take {needed / 1e9:.3g} GB, {free / 1e9:.3g} are free"
        )
    return found


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
    checkpoint.check_guidance(config, execution)
    checkpoint.check_model(config, execution)
    if config.image_path is not None:
        read_image(config.image_path, config.image_size)
    return execution
