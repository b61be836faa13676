"""Denoising of video diffusion models, split over ranks, measured and explained."""

from vdpp_core.config import ConfigError, Parallel, RunConfig
from vdpp_core.steps import split

__all__ = ["ConfigError", "Parallel", "RunConfig", "split"]
