"""NCCL's communicators: how many a rank opens, and the device memory they use outside PyTorch's allocator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vdpp_core.config import RunConfig
from vdpp_core.config.execution import resolve
from vdpp_core.config.layout import Parallel
from vdpp_core.runs import files

# Assumed where nothing was measured: the middle of the 0.1 to 0.3 GiB seen between cards on PCIe, where NCCL has few
# channels and keeps about 10 MiB of buffers per connection and channel (4 MiB of them NCCL_BUFFSIZE). Between A100 on
# NVLink it was 0.5 to 0.7 GiB (github.com/NVIDIA/nccl, issue 964), and more for all-to-all (issue 1685).
ASSUMED_GIB = 0.2
MEASURED = Path(__file__).resolve().parents[2] / "figures" / "hardware"  # where `make gpu-check` writes


def opened(layout: Parallel, rank: int) -> int:
    """The number of communicators that a rank opens in a run.

    One for all ranks, one for each rank that it exchanges samples with (unbatched sends and receives use a communicator
    per pair), and one for each of its replica, cfg, frames and shard groups that has other ranks in it, but not all
    ranks.
    """
    if layout.world_size == 1:
        return 0
    _, stage, _, copy = layout.place(rank)
    neighbours = sum(len(layout.partners(stage, copy, other)) for other in (stage - 1, stage + 1))
    groups = (layout.groups * layout.lockstep, *layout.lockstep_sizes.values(), layout.shards_of(stage))
    return 1 + neighbours + sum(1 < size < layout.world_size for size in groups)


def most(config: RunConfig) -> int:
    """The largest number of communicators that any rank of a run opens; 0 without NCCL."""
    layout = config.parallel or Parallel()
    if resolve(config).backend != "nccl":
        return 0
    return max(opened(layout, layout.rank(0, stage)) for stage in range(layout.pp))


def gib_each() -> tuple[float, str]:
    """GiB per communicator, and the source: `make gpu-check` on this kind of card, or an assumption."""
    measured = ((facts.get("communicator_gib"), f"measured {facts['date']}") for facts in checks())
    return next(((gib, source) for gib, source in measured if gib), (ASSUMED_GIB, "assumed"))


def checks() -> list[dict[str, Any]]:
    """Results of `make gpu-check` on the kind of card that is here, newest first; empty without a card."""
    if not torch.cuda.is_available():
        return []
    card = torch.cuda.get_device_name(0)
    found = (files.read_object(path, "card", "date") for path in MEASURED.glob("*.json"))
    alike = (facts for facts in found if facts is not None and facts["card"] == card)
    return sorted(alike, key=lambda facts: facts["date"], reverse=True)
