"""Decode latents to frames with the official pipeline's own method, one video at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from diffusers import StableVideoDiffusionPipeline
from torch import Tensor

from vdpp_core.config import RunConfig
from vdpp_core.models.images import Frames
from vdpp_core.models.svd import load_decoder


class Decoder:
    """The VAE of a run. An fp16 VAE that asks for it (`force_upcast`) decodes in fp32; in fp16 its frames are black.

    Args:
        chunk_done: called after every `decode_chunk_size` frames.
    """

    def __init__(self, config: RunConfig, device: torch.device, dtype: torch.dtype, chunk_done: Callable[[], None]):
        self.pipeline = load_decoder(config, device, dtype)
        self.chunk_size, self.num_frames = config.decode_chunk_size, config.shape[2]
        vae = self.pipeline.vae
        if vae.dtype == torch.float16 and vae.config.force_upcast:
            vae.to(torch.float32)
        vae.decoder.register_forward_hook(lambda *_: chunk_done())

    @torch.no_grad()
    def frames(self, latents: Tensor) -> Frames:
        """Decode (B, F, 4, H, W) to (B, F, 8·H, 8·W, 3), the bytes of the official pipeline's images.

        Raises:
            FloatingPointError: the frames are black or not finite.
        """
        pixels = decode(self.pipeline, latents.to(self.pipeline.vae.dtype), self.num_frames, self.chunk_size)
        if not torch.isfinite(pixels).all():
            raise FloatingPointError("the decoded frames are not finite: use --dtype fp32 or bf16")
        frames = to_bytes(self.pipeline.video_processor.postprocess_video(pixels, output_type="np"))
        if not all(video.any() for video in frames):
            raise FloatingPointError("all decoded frames are black: use --dtype fp32 or bf16, or another image")
        return frames


def decode(pipeline: Any, latents: Tensor, num_frames: int, chunk_size: int) -> Tensor:
    """Decode (B, F, 4, H, W) to pixels (B, 3, F, 8·H, 8·W) from -1 to 1, each video on its own.

    The official pipeline concatenates the frames of a batch before it cuts them into chunks. In a chunk with frames of
    two videos, its temporal layers mix them.
    """
    alone = StableVideoDiffusionPipeline.decode_latents
    return torch.cat([alone(pipeline, one, num_frames, chunk_size) for one in latents.split(1)])


def to_bytes(frames: np.ndarray) -> Frames:
    """Convert values from 0 to 1 to bytes, rounding as diffusers does for images."""
    return (frames * 255).round().astype(np.uint8)
