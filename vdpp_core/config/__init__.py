"""What a run is: its configuration and its layout over ranks, validated when they are made."""

from vdpp_core.config.errors import ConfigError
from vdpp_core.config.layout import Parallel
from vdpp_core.config.run_config import RunConfig
from vdpp_core.config.steps import split

__all__ = ["ConfigError", "Parallel", "RunConfig", "split"]
