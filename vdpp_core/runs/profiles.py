"""What torch.profiler recorded of each rank of a run with --profile: profile/rank-N.json.gz."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from vdpp_core.config.errors import ConfigError

LAYER = "layer "  # begins the name of a layer's span
STEPS = 2  # that are recorded


def path_of(folder: Path, rank: int) -> Path:
    """Where a rank writes its profile."""
    return folder / "profile" / f"rank-{rank}.json.gz"


def read(folder: Path, rank: int) -> list[dict[str, Any]]:
    """The entries of a rank's profile, in the trace event format, times in µs.

    Raises:
        ConfigError: the rank wrote none.
    """
    path = path_of(folder, rank)
    if not path.exists():
        raise ConfigError("profile", path, "is not there: a run with --profile writes it after its last sample")
    with gzip.open(path) as file:
        return json.load(file)["traceEvents"]
