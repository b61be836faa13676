"""What a finished run of the documents' experiments has to tell."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

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
        """Seconds of load, encode, cold_step and total on the rank that took longest; None where not known.

        The total begins with the ranks' processes: a launcher may have done other runs before.
        """
        ranks: list[dict[str, float]] = self.result["time_s_per_rank"]
        found: dict[str, list[float | None]] = {name: [rank.get(name) for rank in ranks] for name in ("load", "encode")}
        found["total"] = [rank["total"] - rank["launch"] if rank else None for rank in ranks]
        found["cold_step"] = self.result["cold_step_s_per_rank"]
        return {name: max(filter(None, seconds), default=None) for name, seconds in found.items()}
