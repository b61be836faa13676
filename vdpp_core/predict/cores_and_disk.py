"""Whether this machine has the cores and the room on its disk that a run needs."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from vdpp_core.config import RunConfig
from vdpp_core.config.execution import Execution, cores
from vdpp_core.runs import other_runs


def before_start(config: RunConfig, execution: Execution) -> list[str]:
    """Warnings about this machine's cores and disk before a run starts on it."""
    found = []
    if execution.device_type == "cpu":
        ranks, available = execution.local_ranks, cores()
        if ranks * execution.threads > available:
            wanted = f"{ranks} × {execution.threads} threads on {available} core{'s' * (available > 1)}"
            found.append(f"{wanted}: ranks take turns, and their times mean little")
        elif others := other_runs.in_the_way(execution):
            running = f"{other_runs.ranks_of_other_runs(others)} {'is' if others == 1 else 'are'} running"
            these = f"these {available} cores" if available > 1 else "this machine's core"
            found.append(f"{running} on {these}: this run will take longer")
    needed = config.num_samples * math.prod(config.shape) * execution.element_size * config.save_latents
    place = (config.output_dir or Path.cwd()).absolute()
    free = shutil.disk_usage(next(path for path in (place, *place.parents) if path.exists())).free
    if needed > free:
        found.append(
            f"the latents of {config.num_samples} sample{'s' * (config.num_samples > 1)} take {needed / 1e9:.3g} GB, "
            f"{free / 1e9:.3g} are free"
        )
    return found
