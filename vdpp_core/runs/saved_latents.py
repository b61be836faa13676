"""The latents of one finished sample as a safetensors file with checksums."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialised
from torch import Tensor

from vdpp_core.runs import files
from vdpp_core.runs.files import DamagedError


def save(path: Path, latents: Tensor, origin: str = "") -> None:
    """Save latents (B, C, F, H, W) atomically, with the digest of what they were made from (`Origin.digest`).

    Raises:
        FullDiskError: there is no room for them.
    """
    tensor = latents.contiguous().cpu()
    digests = f"{_digest(tensor)} {origin}".rstrip()  # one entry: safetensors writes several in no certain order
    data = serialised({"latents": tensor}, metadata={"sha256": digests})
    files.write_whole(path, lambda draft: draft.write_bytes(data))


def load(path: Path) -> Tensor:
    """The latents (B, C, F, H, W) in a file.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedError: the file does not hold what was written.
    """
    try:
        with safe_open(path, "pt") as file:
            latents, recorded = file.get_tensor("latents"), _digests(file)[0]
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError) as error:
        raise DamagedError(path, str(error)) from None
    if recorded != _digest(latents):
        raise DamagedError(path, "its numbers are not those that were written")
    return latents


def origin_of(path: Path) -> str:
    """The digest that an intact file carries of what its latents were made from; empty where none was recorded."""
    with safe_open(path, "pt") as file:
        return _digests(file)[1]


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.view(torch.uint8).numpy().data).hexdigest()


def _digests(file: Any) -> tuple[str, str]:
    numbers, _, origin = (file.metadata() or {}).get("sha256", "").partition(" ")
    return numbers, origin
