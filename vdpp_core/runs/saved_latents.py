"""The latents of finished samples as files, with checksums."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from vdpp_core.config import RunConfig
from vdpp_core.runs import files
from vdpp_core.runs.files import DamagedError


def save_latents(folder: Path, sample: int, latents: Tensor, origin: str = "") -> None:
    """latents (B, C, F, H, W) of a finished sample, whole or not at all, with the digest of what it was made from.

    Raises:
        FullDiskError: there is no room for it.
    """
    tensor = latents.contiguous().cpu()
    digests = f"{_digest(tensor)} {origin}".rstrip()  # one entry: safetensors writes several in no certain order
    data = save({"latents": tensor}, metadata={"sha256": digests})
    files.write_whole(latents_path(folder, sample), lambda draft: draft.write_bytes(data))


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.view(torch.uint8).numpy().data).hexdigest()


def latents_path(folder: Path, sample: int) -> Path:
    return folder / "latents" / f"sample-{sample:03d}.safetensors"


def load_latents(folder: Path, sample: int) -> Tensor:
    """(B, C, F, H, W) of a finished sample.

    Raises:
        FileNotFoundError: there is none.
        DamagedError: the file does not hold what was written.
    """
    path = latents_path(folder, sample)
    try:
        with safe_open(path, "pt") as file:
            latents, told = file.get_tensor("latents"), _digests(file)[0]
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError) as error:
        raise DamagedError(path, str(error)) from None
    if told != _digest(latents):
        raise DamagedError(path, "its numbers are not those that were written")
    return latents


def origin_of(folder: Path, sample: int) -> str:
    """The digest that a whole file of latents carries of what it was made from; empty where that was not recorded."""
    with safe_open(latents_path(folder, sample), "pt") as file:
        return _digests(file)[1]


def _digests(file: Any) -> tuple[str, str]:
    numbers, _, origin = (file.metadata() or {}).get("sha256", "").partition(" ")
    return numbers, origin


def video_names(config: RunConfig, sample: int) -> list[str]:
    """What the files of a sample's videos are called; one each, or one for each of its batch."""
    batch = config.shape[0]
    return [f"sample-{sample:03d}" + (f"-{index}" if batch > 1 else "") for index in range(batch)]
