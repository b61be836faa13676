"""What a finished run of the documents' experiments has to tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

import psutil
from torch import Tensor

from vdpp_core.config import RunConfig
from vdpp_core.runs import event_types as kinds
from vdpp_core.runs.run import Run


@dataclass(frozen=True)
class Measured:
    """A run that has ended, its configuration and its result."""

    run: Run
    config: RunConfig
    result: dict[str, Any]

    @property
    def outcome(self) -> str:
        """ok, oom, failed or stopped."""
        return str(self.result["outcome"])

    @property
    def failure(self) -> str:
        """The rank that failed first and why, in words."""
        failure = self.result.get("failure") or {}
        rank = "" if failure.get("rank") is None else f"rank {failure['rank']}: "
        return f"{rank}{failure.get('cause', 'no cause is known')}"

    @cached_property
    def latents(self) -> Tensor:
        """(B, C, F, H, W) of the first sample."""
        return self.run.load_latents(0)

    @cached_property
    def step_s(self) -> float | None:
        """Median seconds of a step."""
        steps = [step.seconds for step in kinds.of(self.run.events(), kinds.Step) if step.sample >= 0]
        return median(steps) if steps else None

    @cached_property
    def phases(self) -> dict[str, float | None]:
        """Seconds of load, encode, cold_step and total on the rank that took longest; None where not known."""
        result, events = self.result, self.run.events()
        ranks: list[dict[str, Any]] = result.get("time_s_per_rank") or []
        if ranks:
            cold = result.get("cold_step_s_per_rank") or [None] * len(ranks)
            ranks = [known | {"cold_step": step} for known, step in zip(ranks, cold, strict=True)]
        else:  # of an earlier version
            ranks = [_from_events(events, rank) for rank in range(self.config.layout.world_size)]
        names = ("load", "encode", "cold_step", "total")
        found = {name: [rank[name] for rank in ranks if rank.get(name) is not None] for name in names}
        return {name: max(seconds, default=None) for name, seconds in found.items()}


def _from_events(events: Sequence[kinds.Event], rank: int) -> dict[str, float]:
    """What events alone tell: loading includes encoding, and the first step includes connecting."""
    own = [event for event in events if event.rank == rank]
    start, warm, done = kinds.of(own, kinds.Start)[-1:], kinds.of(own, kinds.Warm)[-1:], kinds.of(own, kinds.Done)[-1:]
    loaded = [event for event in own if event.kind == "loaded"]
    if not (start and loaded and warm and done):
        return {}
    return {
        "load": loaded[0].t - start[0].t,
        "cold_step": warm[0].t - warm[0].seconds - loaded[0].t,
        "total": done[0].t - psutil.boot_time() - start[0].created,
    }
