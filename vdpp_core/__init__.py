"""Video diffusion split over ranks: run, measured, predicted and explained."""

from typing import Any

from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.layout import Parallel
from vdpp_core.config.steps import split

__all__ = ["ConfigError", "Parallel", "RunConfig", "parallelize", "restore", "split"]


def __getattr__(name: str) -> Any:
    """Import what needs torch.distributed on first use."""
    if name not in ("parallelize", "restore"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import vdpp_core.parallel.parallelize as module

    return getattr(module, name)
