"""Denoising of video diffusion models, split over ranks, measured and explained."""

from typing import Any

from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.layout import Parallel
from vdpp_core.config.steps import split

__all__ = ["ConfigError", "Parallel", "RunConfig", "parallelize", "restore", "split"]


def __getattr__(name: str) -> Any:
    """What needs torch.distributed is imported when it is asked for."""
    if name not in ("parallelize", "restore"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import vdpp_core.parallel.parallelize as module

    return getattr(module, name)
