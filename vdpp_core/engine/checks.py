"""What this machine is and whether it can do a run: asked before any rank starts. Starts nothing itself."""

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
    """What is to be said before a run starts on so many ranks of this machine, about its cores and its disk."""
    found = []
    if execution.device_type == "cpu":
        ranks, available = execution.local_ranks, cores()
        if ranks * execution.threads > available:
            found.append(
                f"{ranks} × {execution.threads} threads on {available} cores: ranks take turns, and times say little"
            )
        elif others := other_runs.in_the_way(execution):
            at_work = f"{other_runs.ranks_of_other_runs(others)} {'is' if others == 1 else 'are'} at work"
            found.append(f"{at_work} on these {available} cores: this one will take longer")
    needed = config.num_samples * math.prod(config.shape) * execution.element_size * config.save_latents
    place = (config.output_dir or Path.cwd()).absolute()
    free = shutil.disk_usage(next(path for path in (place, *place.parents) if path.exists())).free
    if needed > free:
        found.append(
            f"the latents of {config.num_samples} samples take {needed / 1e9:.3g} GB, {free / 1e9:.3g} are free"
        )
    return found


def check(config: RunConfig, local_ranks: int) -> Execution:
    """Whether this machine can do the run, whose layout is known, with so many of its ranks.

    Raises:
        ConfigError: one line that says what cannot be and what can.
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
