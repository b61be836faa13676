"""NCCL's communicators: how many a rank opens, and the device memory that they take outside PyTorch's allocator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vdpp_core.config import RunConfig
from vdpp_core.config.execution import resolve
from vdpp_core.config.layout import Parallel
from vdpp_core.runs import files

# Assumed where nothing was measured: the middle of the 0.1 to 0.3 GiB between cards on PCIe. NCCL keeps some 10 MiB of
# buffers (4 MiB of them NCCL_BUFFSIZE) for each connection of each channel, and has few channels there. Between A100 on
# NVLink it was 0.5 to 0.7 GiB (github.com/NVIDIA/nccl, issue 964), and more where all send to all (issue 1685).
ASSUMED_GIB = 0.2
MEASURED = Path(__file__).resolve().parents[2] / "figures" / "hardware"  # where `make gpu-check` writes


def opened(layout: Parallel, rank: int) -> int:
    """Communicators of a rank in a run: one for all ranks, one for each neighbouring stage (a pair of its own, as
    unbatched sends and receives have it), and one for each of its replica, its cfg, frames and shard groups that has
    somebody else in it, but not everybody (`groups.py`)."""
    if layout.world_size == 1:
        return 0
    stage = layout.place(rank).stage
    neighbours = (stage > 0) + (stage + 1 < layout.pp)
    groups = (layout.pp * layout.lockstep, *layout.lockstep_sizes.values(), layout.shards)
    return 1 + neighbours + sum(1 < size < layout.world_size for size in groups)


def most(config: RunConfig) -> int:
    """The most that any rank of a run opens; none without NCCL."""
    layout = config.parallel or Parallel()
    if resolve(config).backend != "nccl":
        return 0
    return max(opened(layout, layout.rank(0, stage)) for stage in range(layout.pp))


def gib_each() -> tuple[float, str]:
    """GiB of a communicator, and where that is from: `make gpu-check` on cards like those here, or assumed."""
    measured = ((facts.get("communicator_gib"), f"measured {facts['date']}") for facts in checks())
    return next(((gib, source) for gib, source in measured if gib), (ASSUMED_GIB, "assumed"))


def checks() -> list[dict[str, Any]]:
    """What `make gpu-check` wrote on cards like the first one here, the newest first; nothing without a card."""
    if not torch.cuda.is_available():
        return []
    card = torch.cuda.get_device_name(0)
    found = (files.read_object(path, "card", "date") for path in MEASURED.glob("*.json"))
    alike = (facts for facts in found if facts is not None and facts["card"] == card)
    return sorted(alike, key=lambda facts: facts["date"], reverse=True)
