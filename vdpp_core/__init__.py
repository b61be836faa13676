"""Denoising of video diffusion models, split over ranks, measured and explained."""

from vdpp_core.config import RunConfig
from vdpp_core.errors import ConfigError
from vdpp_core.layout import Parallel
from vdpp_core.steps import split

__all__ = ["ConfigError", "Parallel", "RunConfig", "split"]
