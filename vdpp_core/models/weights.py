"""Sources of a UNet's parameters, one tensor at a time: random numbers, or safetensors files.

A source yields (name, rows); rows[a:b] reads rows a to b of the tensor, rows[:] all of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vdpp_core.config.errors import ConfigError

FILE = "diffusion_pytorch_model"  # diffusers' name of a weights file
FILES = (FILE, "model")  # and transformers'
BLEND = 0.5  # diffusers' initial mix of spatial and temporal layers in SVD


def random(structure: nn.Module, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield random parameters, equal on every rank: PyTorch's own initialisation, with one seed per layer.

    Args:
        structure: a network on the meta device; it stays there.
    """
    for seed, (path, layer) in enumerate(structure.named_modules()):
        names = [name for name, _ in layer.named_parameters(recurse=False)]
        if not names:
            continue
        layer.to_empty(device=device, recurse=False)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
            torch.manual_seed(seed)
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
            else:
                assert names == ["mix_factor"], f"{path}: {names}"
                layer.mix_factor.fill_(BLEND)
        for name in names:
            yield f"{path}.{name}", getattr(layer, name).detach()
        layer.to("meta")


def stored(folder: Path, dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    """Yield the tensors in a UNet's folder (diffusers' layout, one file or several).

    The file is opened again for each tensor, so that what was mapped before does not stay resident.
    """
    for name, path in files(folder, dtype).items():
        with safe_open(path, framework="pt") as file:
            yield name, file.get_slice(name)


def fill(unet: nn.Module, source: Iterator[tuple[str, Any]]) -> None:
    """Copy a source into a UNet that holds its parameters whole."""
    parameters = dict(unet.named_parameters())
    for name, rows in source:
        parameters[name].data.copy_(rows[:])


def variant(folder: Path, dtype: torch.dtype) -> str | None:
    """Choose between the published variants of a part's weights the one nearest to `dtype`: "fp16", or None for the
    files without a variant in their names."""
    names = [path.name for path in folder.glob("*.safetensors") if path.name.startswith(FILES)]
    half = [name for name in names if ".fp16" in name]
    return "fp16" if half and (dtype != torch.float32 or half == names) else None


def files(folder: Path, dtype: torch.dtype) -> dict[str, Path]:
    """Map each tensor's name to the file that holds it, in the variant for `dtype`.

    Raises:
        ConfigError: there are no weights, or some of their files are missing, truncated or damaged.
    """
    kind = f".{name}" if (name := variant(folder, dtype)) else ""
    index, whole = folder / f"{FILE}.safetensors.index{kind}.json", folder / f"{FILE}{kind}.safetensors"
    if whole.is_file():
        return dict.fromkeys(_names(whole), whole)
    if index.is_file():
        return _indexed(index)
    raise ConfigError("model_id", folder, f"must have {whole.name}")


def _indexed(index: Path) -> dict[str, Path]:
    try:
        places = {name: index.parent / file for name, file in json.loads(index.read_bytes())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError("model_id", index, "must have whole JSON with a weight_map") from None
    for path in sorted(set(places.values())):
        present = _names(path)
        lacking = [name for name, place in places.items() if place == path and name not in present]
        if lacking:
            raise ConfigError("model_id", path, f"must hold {lacking[0]}, as {index.name} has it")
    return places


def _names(path: Path) -> set[str]:
    if not path.is_file():
        raise ConfigError("model_id", path, f"is missing: its folder's index names {path.name}")
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    except (SafetensorError, OSError) as error:
        raise ConfigError("model_id", path, f"is damaged or cut off ({error})") from None


def check(folder: Path, dtype: torch.dtype, structure: nn.Module) -> None:
    """Check that the stored tensors are those of the structure that the folder's config.json describes.

    Raises:
        ConfigError: a tensor is missing, superfluous or of another shape; names the first one.
    """
    places = files(folder, dtype)
    wanted = {name: list(parameter.shape) for name, parameter in structure.named_parameters()}
    for name in sorted(wanted.keys() ^ places.keys()):
        what = "is missing" if name in wanted else "is not in its config.json"
        raise ConfigError("model_id", folder, f"must fit its config.json: {name} {what}")
    for path in sorted(set(places.values())):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                found = file.get_slice(name).get_shape()
                if name in wanted and found != wanted[name]:
                    allowed = f"must fit its config.json: {name} is {found}, not {wanted[name]}"
                    raise ConfigError("model_id", folder, allowed)
