"""The official pipeline's video of a run, made in this process."""

from __future__ import annotations

import torch

from launch.documents import experiments
from launch.documents.experiments import Done
from vdpp_core.cli import arguments
from vdpp_core.config.execution import resolve


def make(done: Done) -> None:
    """Make it beside the run's own video, if that is there."""
    from vdpp_core.engine import media  # takes seconds to import
    from vdpp_core.engine.videos import Official

    if (run := done.get(experiments.VIDEO)) is None:
        return
    arguments.quiet()
    execution, before = resolve(run.config), torch.get_num_threads()
    torch.set_num_threads(execution.threads)
    try:
        official = Official(run.config, torch.device(execution.device_type), execution.dtype)
        _, frames = official.generate(0, lambda _: None)
    finally:
        torch.set_num_threads(before)
    path = experiments.official_path(run)
    media.save_video(path.parent, path.stem, frames[0], None, run.config.fps)
