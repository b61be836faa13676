"""On two ranks: diffusers' own pipeline before and after `pipe.unet = parallelize(…)`, for two images."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from diffusers import StableVideoDiffusionPipeline
from PIL import Image, ImageOps

import vdpp_core
from vdpp_core import Parallel
from vdpp_core.config.fields import EXAMPLE_IMAGE, MODELS


def generate(pipeline: Any, image: Image.Image, steps: int) -> tuple[torch.Tensor, np.ndarray]:
    """Latents, and the frames that they decode to, in grey levels."""
    generator = torch.Generator().manual_seed(7)
    size = {"height": 64, "width": 64, "num_frames": 14, "num_inference_steps": steps}
    latents = pipeline(image, generator=generator, output_type="latent", **size).frames
    with torch.no_grad():
        frames = pipeline.decode_latents(latents, 14)
    return latents, pipeline.video_processor.postprocess_video(frames, output_type="np") * 255


def compare(layout: Parallel) -> list[dict[str, float]]:
    """For each image, the relative error of this rank's latents, and the largest difference of decoded frames in grey
    levels of 255."""
    pipe = StableVideoDiffusionPipeline.from_pretrained(MODELS["tiny"])
    pipe.set_progress_bar_config(disable=True)
    ball = Image.open(EXAMPLE_IMAGE).convert("RGB")
    images = {25: ball, 5: ImageOps.invert(ball)}  # steps: image
    alone: list[Any] = [None] * len(images)
    if dist.get_rank() == 0:
        alone = [generate(pipe, image, steps) for steps, image in images.items()]
    dist.broadcast_object_list(alone)
    pipe.unet = vdpp_core.parallelize(pipe.unet, layout.mesh("cpu"))
    found = []
    for (steps, image), (latents, frames) in zip(images.items(), alone, strict=True):
        split_latents, split_frames = generate(pipe, image, steps)
        error = (split_latents - latents).norm() / latents.norm()
        levels = np.abs(np.round(split_frames) - np.round(frames)).max()
        found.append({"latents": error.item(), "grey_levels": float(levels)})
    return found
