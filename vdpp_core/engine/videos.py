"""What `generate` does beside denoising: decode latents into videos in the run folder."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image
from torch import Tensor

from vdpp_core.config import RunConfig
from vdpp_core.engine import media
from vdpp_core.models import images, pipelines
from vdpp_core.models.decoding import Decoder, OfficialDecoder, decode, to_bytes
from vdpp_core.models.images import Frames
from vdpp_core.models.stage import Recording
from vdpp_core.runs.events import EventLog
from vdpp_core.runs.files import write_whole
from vdpp_core.runs.runfolder import video_names


class Maker:
    """Decodes samples and writes their videos, on one rank.

    Args:
        samples, recording: what the encoders returned, for pipelines that need it to decode; see `OfficialDecoder`.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        samples: Sequence[int],
        device: torch.device,
        dtype: torch.dtype,
        log: EventLog,
        recording: Recording | None = None,
    ) -> None:
        self.config, self.folder, self.log = config, folder, log
        self.device, self.dtype = device, dtype
        self.current = 0
        given = config, device, dtype, lambda: log.write("chunk", self.current)
        self.decoder: Decoder | OfficialDecoder | None = (
            Decoder(*given) if config.is_svd else OfficialDecoder(*given, samples, recording)
        )
        self.made: dict[int, tuple[Tensor, Frames]] = {}  # only for the comparison, because frames are large

    def make(self, sample: int, latents: Tensor) -> None:
        """Decode a sample, latents as the pipeline has them, and write its videos.

        Raises:
            FloatingPointError: its frames are black or not finite; nothing of it was written.
        """
        assert self.decoder is not None, "the comparison comes last"
        config, self.current = self.config, sample
        self.log.write("decode", sample)
        started = time.perf_counter()
        try:
            made = self.decoder.frames(sample, latents)
        except FloatingPointError as error:
            raise FloatingPointError(f"sample {sample}: {error}") from None
        image = _as_seen(config.of_sample(sample), made)
        decoded = time.perf_counter()
        for name, frames in zip(video_names(config, sample), made, strict=True):
            media.save_video(self.folder / "videos", name, frames, image, config.fps)
        written = time.perf_counter()
        self.log.write("video", sample, seconds=written - started, write_s=written - decoded)
        if config.compare_official:
            self.made[sample] = latents, made

    def compare(self) -> None:
        """Free the decoder, and compare all that was made with the official pipeline, if the run says so."""
        self.decoder = None
        if self.made:
            official = Official(self.config, self.device, self.dtype)
            for sample, made in self.made.items():
                done = partial(self.log.write, "comparing", sample)
                self.log.write("official", sample, **official.compare(sample, *made, step_done=done))


def make(
    config: RunConfig,
    folder: Path,
    share: dict[int, Tensor],
    device: torch.device,
    dtype: torch.dtype,
    log: EventLog,
    recording: Recording | None = None,
) -> None:
    """Make the videos of samples, and compare them if the run says so. See `Maker` for the arguments."""
    maker = Maker(config, folder, list(share), device, dtype, log, recording)
    for sample, latents in share.items():
        maker.make(sample, latents)
    maker.compare()


def write_overview(config: RunConfig, folder: Path) -> None:
    """Write a sheet of the first 32 videos, the image as the model saw it, and for a manifest the list of videos."""
    place = folder / "videos"
    names = [name for sample in range(config.num_samples) for name in video_names(config, sample)]
    rows = [Image.open(path) for name in names[: media.SHEET_ROWS] if (path := place / f"{name}.png").exists()]
    if config.rows is not None:
        write_whole(folder / "videos.csv", _table(config).to_csv)
    elif config.image_path is not None:
        width, height = config.image_size if config.is_svd else rows[0].size
        write_whole(place / "input.png", _resized(config.image_path, (width, height)).save)
    write_whole(place / "contact-sheet.png", media.contact_sheet(rows).save)


def _table(config: RunConfig) -> pd.DataFrame:
    """Which video was made from which row of the manifest."""
    rows = [
        {"sample": sample, "video": f"videos/{name}.mp4", "seed": config.seed_of(sample)} | row
        for sample, row in enumerate((config.rows or ())[: config.num_samples])
        for name in video_names(config, sample)
    ]
    return pd.DataFrame(rows).set_index("sample")


def _as_seen(config: RunConfig, made: Frames) -> Image.Image | None:
    """The image, cropped and at the size of the videos."""
    *_, height, width, _ = made.shape
    return None if config.image_path is None else _resized(config.image_path, (width, height))


def _resized(path: Path, size: tuple[int, int]) -> Image.Image:
    return images.read_image(path, size).resize(size, Image.Resampling.LANCZOS)


class Official:
    """The official pipeline with each sample's arguments."""

    def __init__(self, config: RunConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        self.pipeline = pipelines.load_official(config, device, dtype)

    def generate(self, sample: int, step_done: Callable[[int], None]) -> tuple[Tensor, Frames]:
        """Generate a sample: latents before decoding, and frames (B, F, height, width, 3).

        A pipeline that shows its latents to nobody is called twice.

        Args:
            step_done: called after each step with its number, from 0, where the pipeline says so.
        """
        last: dict[str, Tensor] = {}

        def keep(_pipeline: Any, step: int, _timestep: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            step_done(step)
            last.update(tensors)
            return tensors

        if "callback_on_step_end" in inspect.signature(self.pipeline.__call__).parameters:
            frames = self._call(sample, output_type="np", callback_on_step_end=keep)
        else:
            frames, last["latents"] = (self._call(sample, output_type=kind) for kind in ("np", "latent"))
        return last["latents"], to_bytes(np.asarray(frames))

    def _call(self, sample: int, **arguments: Any) -> Any:
        seed, given = self.config.seed_of(sample), pipelines.call_arguments(self.config.of_sample(sample))
        with torch.random.fork_rng():
            torch.manual_seed(seed)  # some pipelines draw without the generator
            generator = torch.Generator().manual_seed(seed)
            return self.pipeline(**given, generator=generator, **arguments).frames

    def compare(self, sample: int, latents: Tensor, frames: Frames, step_done: Callable[[int], None]) -> dict[str, Any]:
        """Compare a sample's latents and frames with the official ones: equality and largest difference, of latents
        also relative to the largest official magnitude.

        The videos of a batch are compared with what the official pipeline decodes from each alone.
        `max_batch_difference` is how far that is from decoding the whole batch, where a chunk may mix two videos.
        """
        official_latents, together = self.generate(sample, step_done)
        official_frames, facts = together, {}
        if len(together) > 1 and self.config.is_svd:
            official_frames = self._one_by_one(official_latents)
            facts = {"max_batch_difference": _grey_levels(official_frames, together)}
        difference = (latents - official_latents).abs().max()
        return facts | {
            "equal_latents": torch.equal(latents, official_latents),
            "equal_frames": bool(np.array_equal(frames, official_frames)),
            "max_latent_difference": difference.item(),
            "relative_latent_difference": (difference / official_latents.abs().max()).item(),
            "max_frame_difference": _grey_levels(frames, official_frames),
        }

    @torch.no_grad()
    def _one_by_one(self, latents: Tensor) -> Frames:
        pixels = decode(self.pipeline, latents, self.config.shape[2], self.config.decode_chunk_size)
        return to_bytes(self.pipeline.video_processor.postprocess_video(pixels, output_type="np"))


def _grey_levels(frames: Frames, others: Frames) -> int:
    """The largest difference, out of 255."""
    return int(np.abs(frames.astype(int) - others).max())
