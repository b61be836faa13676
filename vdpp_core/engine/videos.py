"""The second phase of `generate`: decode a rank's share of the latents into videos in the run folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vdpp_core.config import RunConfig
from vdpp_core.engine import media
from vdpp_core.models import images
from vdpp_core.models.decoding import Decoder, decode, to_bytes
from vdpp_core.models.images import Frames
from vdpp_core.models.svd import call_arguments, load_official
from vdpp_core.runs.events import EventLog
from vdpp_core.runs.files import write_whole
from vdpp_core.runs.runfolder import video_names


def make(
    config: RunConfig, folder: Path, share: dict[int, Tensor], device: torch.device, dtype: torch.dtype, log: EventLog
) -> None:
    """Decode each sample of `share`, latents (B, F, 4, H, W), and write its videos; compare them if the run says so.

    Raises:
        FloatingPointError: a sample's frames are black or not finite; nothing of it was written.
    """
    image = _as_seen(config)
    current: list[int] = []
    decoder = Decoder(config, device, dtype, chunk_done=lambda: log.write("chunk", current[-1]))
    kept = {}  # only for the comparison, because frames are large
    for sample, latents in share.items():
        current.append(sample)
        log.write("decode", sample)
        started = time.perf_counter()
        try:
            made = decoder.frames(latents)
        except FloatingPointError as error:
            raise FloatingPointError(f"sample {sample}: {error}") from None
        for name, frames in zip(video_names(config, sample), made, strict=True):
            media.save_video(folder / "videos", name, frames, image, config.fps)
        log.write("video", sample, seconds=time.perf_counter() - started)
        if config.compare_official:
            kept[sample] = made
    if config.compare_official:
        del decoder
        official = Official(config, device, dtype)
        for sample, latents in share.items():
            done = partial(log.write, "comparing", sample)
            log.write("official", sample, **official.compare(sample, latents, kept[sample], step_done=done))


def make_contact_sheet(config: RunConfig, folder: Path) -> None:
    """Write a sheet of the first 32 videos, and the image as the model saw it."""
    place = folder / "videos"
    write_whole(place / "input.png", _as_seen(config).save)
    names = [name for sample in range(config.num_samples) for name in video_names(config, sample)]
    rows = [Image.open(path) for name in names[: media.SHEET_ROWS] if (path := place / f"{name}.png").exists()]
    write_whole(place / "contact-sheet.png", media.contact_sheet(rows).save)


def _as_seen(config: RunConfig) -> Image.Image:
    """The image, cropped and at the size of the videos."""
    assert config.image_path is not None
    return images.read_image(config.image_path, config.image_size).resize(config.image_size, Image.Resampling.LANCZOS)


class Official:
    """`StableVideoDiffusionPipeline` with the run's arguments."""

    def __init__(self, config: RunConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.pipeline = config, load_official(config, device, dtype)
        self.arguments = call_arguments(config)

    def generate(self, sample: int, step_done: Callable[[int], None]) -> tuple[Tensor, Frames]:
        """Generate a sample: latents (B, F, 4, H, W) before decoding, and frames (B, F, height, width, 3).

        Args:
            step_done: called after each step with its number, from 0.
        """
        last: dict[str, Tensor] = {}

        def keep(_pipeline: Any, step: int, _timestep: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            step_done(step)
            last.update(tensors)
            return tensors

        frames = self.pipeline(
            **self.arguments,
            generator=torch.Generator().manual_seed(self.config.seed + sample),
            output_type="np",
            callback_on_step_end=keep,
        ).frames
        return last["latents"], to_bytes(frames)

    def compare(self, sample: int, latents: Tensor, frames: Frames, step_done: Callable[[int], None]) -> dict[str, Any]:
        """Compare a sample's latents and frames with the official ones: equality and largest difference.

        The videos of a batch are compared with what the official pipeline decodes from each alone.
        `max_batch_difference` is how far that is from decoding the whole batch, where a chunk may mix two videos.
        """
        official_latents, together = self.generate(sample, step_done)
        official_frames, facts = together, {}
        if len(together) > 1:
            official_frames = self._one_by_one(official_latents)
            facts = {"max_batch_difference": _grey_levels(official_frames, together)}
        return facts | {
            "equal_latents": torch.equal(latents, official_latents),
            "equal_frames": bool(np.array_equal(frames, official_frames)),
            "max_latent_difference": (latents - official_latents).abs().max().item(),
            "max_frame_difference": _grey_levels(frames, official_frames),
        }

    @torch.no_grad()
    def _one_by_one(self, latents: Tensor) -> Frames:
        pixels = decode(self.pipeline, latents, self.config.shape[2], self.config.decode_chunk_size)
        return to_bytes(self.pipeline.video_processor.postprocess_video(pixels, output_type="np"))


def _grey_levels(frames: Frames, others: Frames) -> int:
    """The largest difference, out of 255."""
    return int(np.abs(frames.astype(int) - others).max())
