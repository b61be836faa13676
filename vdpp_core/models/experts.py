"""Denoisers that take turns: each serves a range of timesteps (Balaji et al. 2022, "eDiff-I"; Wan 2.2 A14B)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import ConfigMixin, ModelMixin, UNetSpatioTemporalConditionModel
from torch import Tensor, nn


class Experts(ModelMixin, ConfigMixin):
    """Several UNets in the place of one, with its signature, so that the official pipeline runs them.

    Saved as a folder with its own config.json and a folder for each expert.

    Args:
        experts: name -> UNet, the one for the noisiest timesteps first. All take and return the same shapes.
        boundaries: the lowest timestep of each expert but the last one, which serves all below.

    Raises:
        ValueError: the boundaries are not one less than the experts and falling, or the experts' shapes differ.
    """

    config_name = "config.json"
    experts: nn.ModuleDict

    def __init__(self, experts: Mapping[str, Any], boundaries: Sequence[float]) -> None:
        super().__init__()
        if len(boundaries) != len(experts) - 1 or sorted(boundaries, reverse=True) != [*boundaries]:
            raise ValueError(f"boundaries {boundaries}: must be {len(experts) - 1} falling timesteps")
        if odd := different_shapes(experts):
            raise ValueError(f"experts: {odd}")
        self.experts = nn.ModuleDict(experts)
        first = next(iter(experts.values()))
        shapes = {name: value for name, value in first.config.items() if not name.startswith("_")}
        self.register_to_config(**shapes, names=[*experts], boundaries=[*map(float, boundaries)])

    def forward(self, sample: Tensor, timestep: Any, *args: Any, **kwargs: Any) -> Any:
        """The prediction of the timestep's expert."""
        return self.experts[self.name_for(timestep)](sample, timestep, *args, **kwargs)

    @property
    def device(self) -> torch.device:
        """Device of the experts, also where something without parameters is in their place."""
        return next(iter(self.experts.values())).device

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the experts."""
        return next(iter(self.experts.values())).dtype

    def name_for(self, timestep: Any) -> str:
        """Name of the expert that serves a timestep, which is one number."""
        lower = sum(float(timestep) < boundary for boundary in self.config.boundaries)
        return self.config.names[lower]

    @property
    def _first(self) -> Any:
        return next(iter(self.experts.values()))

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the first expert's parameters."""
        return self._first.dtype

    @property
    def device(self) -> torch.device:
        """Device of the first expert's parameters."""
        return self._first.device

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("experts", "_first"):
                raise
            return getattr(self._first, name)

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Save all experts, and how they take turns."""
        for name in self.config.names:
            expert: Any = self.experts[name]
            expert.save_pretrained(Path(save_directory) / name, **kwargs)
        ConfigMixin.save_config(self, save_directory)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **kwargs: Any) -> Experts:
        """Load all experts from a folder."""
        folder = Path(pretrained_model_name_or_path) / kwargs.pop("subfolder", "")
        config = json.loads((folder / cls.config_name).read_bytes())
        load: Any = UNetSpatioTemporalConditionModel.from_pretrained
        experts: dict[str, Any] = {name: load(folder / name, **kwargs) for name in config["names"]}
        return cls(experts, config["boundaries"])


def different_shapes(experts: Mapping[str, Any]) -> str:
    """In which way the latents that experts take or return differ, in words; "" where they do not."""
    for setting in ("in_channels", "out_channels", "patch_size"):
        values = {name: getattr(expert.config, setting, None) for name, expert in experts.items()}
        if len(set(map(str, values.values()))) > 1:
            words = " and ".join(f"{value} of {name}" for name, value in values.items())
            return f"must all take latents of one shape: {setting} is {words}"
    return ""
