"""A Stable Video Diffusion whose UNet is two experts, as a folder that the official pipeline loads: the shipped small
one, and the same with noise in its weights, for the timesteps below a boundary.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from diffusers import StableVideoDiffusionPipeline
from PIL import Image

from vdpp_core.config.fields import EXAMPLE_IMAGE, MODELS
from vdpp_core.models.experts import Experts

NAMES = ("high", "low")
BOUNDARY = 0.2  # timestep, log(sigma) / 4: the first three of six steps are above


def two_unets() -> dict[str, Any]:
    """The shipped UNet twice, the second time with other weights."""
    load, folder = StableVideoDiffusionPipeline.from_pretrained, str(MODELS["tiny"])
    unets = {name: load(folder).unet for name in NAMES}
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in unets["low"].parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=draw)
    return unets


def save(folder: Path, experts: Experts) -> Path:
    """Save the shipped pipeline with these experts for a UNet."""
    pipeline = StableVideoDiffusionPipeline.from_pretrained(str(MODELS["tiny"]))
    parts = {name: part for name, part in pipeline.components.items() if name != "unet"}
    StableVideoDiffusionPipeline(**parts, unet=experts).save_pretrained(folder)
    return folder


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="experts-")


@functools.cache
def folder() -> Path:
    """The pipeline of two experts, in a folder that lives as long as this process."""
    return save(Path(_root().name) / "svd", Experts(two_unets(), [BOUNDARY]))


@functools.cache
def official_pipeline() -> Any:
    """The official pipeline with two experts, loaded as any user would."""
    pipeline = StableVideoDiffusionPipeline.from_pretrained(folder())
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def official(steps: int, frames: int, seed: int) -> torch.Tensor:
    """Latents (B, F, C, H, W) of the official pipeline's own call for the example image at 64 × 64."""
    return official_pipeline()(
        Image.open(EXAMPLE_IMAGE).convert("RGB"),
        **{"height": 64, "width": 64, "num_frames": frames, "num_inference_steps": steps},
        generator=torch.Generator().manual_seed(seed),
        output_type="latent",
    ).frames
