"""What the experiments run on, and why figures obtained there differ from the published ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.documents import figures
from vdpp_core.config import RunConfig
from vdpp_core.config.layout import Parallel


@dataclass(frozen=True)
class Machine:
    """So many GPUs, or CPU ranks where there are none.

    Attributes:
        name: hardware in words.
        card_gib: memory of a GPU; None where it is not known.
    """

    gpus: int
    cores: int
    name: str
    card_gib: float | None = None

    @property
    def small(self) -> bool:
        """Whether the experiments have small sizes."""
        return not self.gpus

    @property
    def on_device(self) -> dict[str, Any]:
        """Device and threads of a run, as of RunConfig."""
        return {"device": "cpu", "threads": 1} if self.small else {"device": "cuda"}

    def ranks(self, published: int) -> int:
        """The ranks for an experiment of so many GPUs: as many, or all GPUs that there are."""
        return min(published, self.gpus) if self.gpus else published

    def svd(self, published: Sequence[int], small: Sequence[int], small_model: str = "tiny") -> RunConfig:
        """A benchmark of the published UNet at the published size, or on a CPU of a small model at a small size.

        Weights are random where the package has none: neither times nor memory depend on them.
        """
        if self.small:
            random = small_model == "medium"
            model: dict[str, Any] = {"model": small_model, "random_weights": random, "latent_shape": small}
        else:
            model = {"model": "svd", "random_weights": True, "latent_shape": published, "dtype": "fp16"}
        return RunConfig(**model, **self.on_device)

    def split(self, base: RunConfig, axis: str = "pp") -> dict[int, RunConfig]:
        """Published number of GPUs -> the run on as many ranks, or on as many as there are."""
        return {count: base.replace(parallel=Parallel(**{axis: self.ranks(count)})) for count in figures.RANKS}

    def why(self, config: RunConfig, published: int, *others: str) -> str:
        """Why a run's figures differ from those published for so many GPUs, in words."""
        ranks, reasons = config.layout.world_size, []
        if config.device == "cpu" and config.shape != figures.DUMMY_LATENTS:
            reasons.append(f"small: {config.model}, {config.size_text}, CPU")
        elif config.device != "cpu" and figures.CARD not in self.name:
            reasons.append(self.name)
        if ranks < published:
            reasons.append(f"{ranks_text(ranks)}: no more {'GPUs' if self.gpus else 'cores'} here")
        if config.device == "cpu" and ranks > self.cores:
            reasons.append(f"{ranks_text(ranks)} share {cores_text(self.cores)}")
        return "; ".join([*reasons, *filter(None, others)])


def ranks_text(count: int) -> str:
    """`1 rank`, `7 ranks`."""
    return f"{count} rank{'s' * (count != 1)}"


def cores_text(count: int) -> str:
    """`1 core`, `2 cores`."""
    return f"{count} core{'s' * (count != 1)}"


def named(runs: Mapping[int, RunConfig]) -> dict[str, RunConfig]:
    """Runs by their number of ranks, in words."""
    return {ranks_text(count): config for count, config in runs.items()}
