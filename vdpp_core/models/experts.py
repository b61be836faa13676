"""Denoisers that take turns: each serves a range of timesteps (Balaji et al. 2022, "eDiff-I"; Wan 2.2 A14B)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import ConfigMixin, ModelMixin, UNetSpatioTemporalConditionModel
from torch import Tensor, nn

from vdpp_core.config import family

SHAPES = (  # settings of UNets and transformers on which the shapes of arguments and results depend
    *("in_channels", "out_channels", "patch_size", "cross_attention_dim", "text_dim", "image_dim"),
    *("addition_time_embed_dim", "projection_class_embeddings_input_dim"),
)


class Experts(ModelMixin, ConfigMixin):
    """Several UNets in the place of one, with its signature, so that the official pipeline runs them.

    Saved as a folder with its own config.json and a folder for each expert.

    Args:
        experts: name -> UNet, the one for the noisiest timesteps first. All take and return the same shapes.
        boundaries: the lowest timestep of each expert but the last one, which serves all below.

    Raises:
        ValueError: there are not two experts or more, the boundaries are not one less and falling, or the experts'
            shapes differ.
    """

    config_name = "config.json"
    experts: nn.ModuleDict

    def __init__(self, experts: Mapping[str, Any], boundaries: Sequence[float]) -> None:
        super().__init__()
        if fault := family.fault_of_experts([*experts], [*boundaries]) or different_shapes(experts):
            raise ValueError(f"experts: {fault}")
        self.experts = nn.ModuleDict(experts)
        first = next(iter(experts.values()))
        shapes = {name: value for name, value in first.config.items() if not name.startswith("_")}
        self.register_to_config(**shapes, names=[*experts], boundaries=[*map(float, boundaries)])

    def forward(self, sample: Tensor, timestep: Any, *args: Any, **kwargs: Any) -> Any:
        """The prediction of the timestep's expert."""
        return self.experts[self.name_for(timestep)](sample, timestep, *args, **kwargs)

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
        given = kwargs | {"use_safetensors": True}
        experts: dict[str, Any] = {name: load(folder / name, **given) for name in config["names"]}
        return cls(experts, config["boundaries"])


def different_shapes(experts: Mapping[str, Any]) -> str:
    """In which way what experts take or return differs, in words; "" where it does not."""
    for setting in SHAPES:
        values = {name: getattr(expert.config, setting, None) for name, expert in experts.items()}
        if len(set(map(str, values.values()))) > 1:
            words = " and ".join(f"{value} of {name}" for name, value in values.items())
            return f"must all take and return the same shapes: {setting} is {words}"
    return ""
