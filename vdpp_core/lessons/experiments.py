"""What is trained, and how it is split over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vdpp_core.config.errors import ConfigError
from vdpp_core.lessons import techniques
from vdpp_core.lessons.problems import PROBLEMS

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
MOST_RANKS = 16
MOST = 1024  # samples of a batch, and steps


@dataclass(frozen=True)
class Experiment:
    """A few training steps of one model, split in one way.

    Attributes:
        technique: a name in `techniques.PLACES`.
        problem: a name in `problems.PROBLEMS`.
        ranks: processes.
        batch: samples of a step, all ranks together.
        steps: training steps; the last one is measured, the others are timed.
        precision: fp32; fp64; or bf16, with weights, gradients' sums and optimizer in fp32.
        checkpointing: recompute the activations of each block in the backward pass instead of keeping them.
        micro_batches: parts of the batch that a pipeline works on one after another.
        chunks: pieces of the model on each rank of a pipeline.

    Raises:
        ConfigError: this cannot be trained.
    """

    technique: str
    problem: str = "transformer"
    ranks: int = 4
    batch: int = 8
    steps: int = 3
    precision: str = "fp32"
    checkpointing: bool = False
    micro_batches: int = 1
    chunks: int = 1

    def __post_init__(self) -> None:
        names = (("technique", [*techniques.PLACES]), ("problem", [*PROBLEMS]), ("precision", [*PRECISIONS]))
        for name, known in names:
            if getattr(self, name) not in known:
                raise ConfigError(name, getattr(self, name), f"must be one of {', '.join(known)}")
        limits = {"ranks": MOST_RANKS, "batch": MOST, "steps": MOST, "micro_batches": self.batch, "chunks": MOST_RANKS}
        for name, most in limits.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ConfigError(name, value, f"must be a whole number from 1 to {most}")
        kind = techniques.technique(self.technique)
        for name in {"micro_batches", "chunks"} - set(kind.takes):
            techniques.refuse_unless(
                name, getattr(self, name), getattr(self, name) == 1, f"must be 1 for {self.technique}"
            )
        kind.check(self)

    @property
    def name(self) -> str:
        """A line for people: technique, model, and what differs from the defaults."""
        words = [self.technique, self.problem, f"{self.ranks} rank{'s' * (self.ranks > 1)}", f"batch {self.batch}"]
        words += [self.precision] * (self.precision != "fp32") + ["checkpointing"] * self.checkpointing
        words += [f"{self.micro_batches} micro-batches"] * (self.micro_batches > 1)
        words += [f"{self.chunks} chunks"] * (self.chunks > 1)
        return ", ".join(words)
