"""The official pipeline of a run, around denoisers of ours and without the weights of anything else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vdpp_core.config import RunConfig
from vdpp_core.models import svd
from vdpp_core.models.stand_ins import Answer, StandIn

DENOISERS = ("unet", "transformer", "transformer_2")


@dataclass
class Official:
    """A pipeline whose denoisers are real and whose encoders, the VAE among them, are stand-ins.

    Attributes:
        stand_ins: component -> what stands for it.
    """

    pipeline: Any
    stand_ins: dict[str, StandIn] = field(default_factory=dict)

    @property
    def denoisers(self) -> dict[str, nn.Module]:
        """Component -> the denoiser."""
        found = {name: getattr(self.pipeline, name, None) for name in DENOISERS}
        return {name: module for name, module in found.items() if module is not None}

    def answer(self, answer: Answer) -> None:
        """Have all stand-ins answer so."""
        for stand_in in self.stand_ins.values():
            stand_in.answer = answer

    def replace(self, name: str, module: Any) -> None:
        """Put a module in the place of a component. The pipeline's own record of classes stays as it is."""
        object.__setattr__(self.pipeline, name, module)


def around(config: RunConfig, unet: Any, device: torch.device, dtype: torch.dtype, answer: Answer) -> Official:
    """Make the run's official pipeline around its UNet; whatever else has weights is a stand-in."""
    shells = svd.shells(config, unet)
    pipeline = svd.pipeline(config, unet=unet, **shells)
    pipeline.set_progress_bar_config(disable=True)  # the rank shows one
    official = Official(pipeline)
    for name, shell in shells.items():
        official.stand_ins[name] = StandIn(name, shell, device, dtype, answer)
        official.replace(name, official.stand_ins[name])
    return official
