"""Decode latents to frames with the official pipeline's own code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from diffusers import StableVideoDiffusionPipeline
from torch import Tensor

from vdpp_core import models
from vdpp_core.config import RunConfig
from vdpp_core.models import pipelines
from vdpp_core.models.images import Frames
from vdpp_core.models.stage import NoClock, Recording, Stage
from vdpp_core.models.stand_ins import Real, Recorder, StandIn

NOT_TO_DECODE = ("unet", "image_encoder", "scheduler", "feature_extractor")
NOT_FINITE = "the decoded frames are not finite: use --dtype fp32 or bf16"


class Decoder:
    """The VAE of a run. An fp16 VAE that asks for it (`force_upcast`) decodes in fp32; in fp16 its frames are black.

    Args:
        chunk_done: called after every `decode_chunk_size` frames.
    """

    def __init__(self, config: RunConfig, device: torch.device, dtype: torch.dtype, chunk_done: Callable[[], None]):
        self.pipeline = pipelines.load_official(config, device, dtype, without=NOT_TO_DECODE)
        self.chunk_size, self.num_frames = config.decode_chunk_size, config.shape[2]
        vae = self.pipeline.vae
        if vae.dtype == torch.float16 and vae.config.force_upcast:
            vae.to(torch.float32)
        vae.decoder.register_forward_hook(lambda *_: chunk_done())

    @torch.no_grad()
    def frames(self, _sample: int, latents: Tensor) -> Frames:
        """Decode (B, F, 4, H, W) to (B, F, 8·H, 8·W, 3), the bytes of the official pipeline's images.

        Raises:
            FloatingPointError: the frames are black or not finite.
        """
        pixels = decode(self.pipeline, latents.to(self.pipeline.vae.dtype), self.num_frames, self.chunk_size)
        if not torch.isfinite(pixels).all():
            raise FloatingPointError(NOT_FINITE)
        return _checked(self.pipeline.video_processor.postprocess_video(pixels, output_type="np"))


class OfficialDecoder:
    """What any other pipeline does after its loop, with its VAE. See `Decoder` for the arguments.

    Args:
        samples: those to be encoded now, unless they are in the recording.
        recording: what the encoders returned; the caller may add samples to it.
    """

    def __init__(
        self,
        config: RunConfig,
        device: torch.device,
        dtype: torch.dtype,
        chunk_done: Callable[[], None],
        samples: Sequence[int],
        recording: Recording | None,
    ) -> None:
        self.stage = Stage.around(config, models.denoisers_on_meta(config, dtype), device, dtype, NoClock())
        real = Real(partial(pipelines.load_part, config, device=device, dtype=dtype))
        self.stage.recording = {} if recording is None else recording
        self.stage.encode([sample for sample in samples if sample not in self.stage.recording], Recorder(real))
        real.modules = {}  # the encoders are not needed any more
        vae: Any = real.load("vae")
        real.modules["vae"] = vae
        vae.decoder.register_forward_hook(lambda *_: chunk_done())

        def answer(asked: StandIn, *question: Any) -> Any:
            return (real if asked.name == "vae" else self.stage.player)(asked, *question)

        self.stage.official.answer(answer)

    def frames(self, sample: int, latents: Tensor) -> Frames:
        """Decode latents, as the pipeline's loop left them, to (B, F, height, width, 3).

        Raises:
            FloatingPointError: the frames are black or not finite.
        """
        return _checked(self.stage.decode(sample, latents))


def _checked(frames: np.ndarray) -> Frames:
    if not np.isfinite(frames).all():
        raise FloatingPointError(NOT_FINITE)
    made = to_bytes(frames)
    if not all(video.any() for video in made):
        raise FloatingPointError("all decoded frames are black: use --dtype fp32 or bf16, or another image")
    return made


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
