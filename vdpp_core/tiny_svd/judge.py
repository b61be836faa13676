"""Evaluates a tiny Stable Video Diffusion on scenes it was not trained on.

Run: python -m vdpp_core.tiny_svd.judge [FOLDER]      (a few minutes; default: the model in the package)
     python -m vdpp_core.tiny_svd.judge [FOLDER] --experts      (compares the model, FOLDER/control and FOLDER/experts)
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from diffusers import EulerDiscreteScheduler, StableVideoDiffusionPipeline
from numpy.typing import NDArray
from PIL import Image
from scipy.stats import spearmanr

from vdpp_core.config.fields import ASSETS, MODELS
from vdpp_core.models.decoding import to_bytes
from vdpp_core.models.images import Frames
from vdpp_core.plots.video_quality import contact_sheet, strips
from vdpp_core.tiny_svd import quality
from vdpp_core.tiny_svd.clips import FASTEST, SIZE, Scenes, held_out
from vdpp_core.tiny_svd.train import BATCH, EXPERTS, Pool, denoising_losses, draw_sigmas

BUCKETS = (0, 64, 128, 192, 255)
FORGOTTEN: dict[str, Any] = {"sigma_min": None, "sigma_max": None, "timestep_type": "discrete"}


def load(folder: str | Path) -> StableVideoDiffusionPipeline:
    """Load a pipeline from a folder, without progress bars."""
    pipeline = StableVideoDiffusionPipeline.from_pretrained(folder, use_safetensors=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def with_scheduler(pipeline: StableVideoDiffusionPipeline, **settings: Any) -> StableVideoDiffusionPipeline:
    """The same networks with other settings of the scheduler; None stands for the class's default."""
    scheduler = EulerDiscreteScheduler.from_config(pipeline.scheduler.config, **settings)
    changed = StableVideoDiffusionPipeline(**(pipeline.components | {"scheduler": scheduler}))
    changed.set_progress_bar_config(disable=True)
    return changed


def videos(
    pipeline: StableVideoDiffusionPipeline, images: list[Image.Image], seed: int = 0, **arguments: Any
) -> list[Frames]:
    """Animate images in one batch; image i has seed + i.

    Args:
        arguments: of the pipeline's call, for instance num_inference_steps and motion_bucket_id.

    Returns:
        A video (F, height, width, 3) in bytes for each image.
    """
    draws = [torch.Generator().manual_seed(seed + index) for index in range(len(images))]
    size = {"height": SIZE, "width": SIZE, "decode_chunk_size": 4}
    return list(to_bytes(pipeline(images, generator=draws, output_type="np", **size | arguments).frames))


def assess(frames: list[Frames], scenes: Scenes) -> pd.DataFrame:
    """`quality.assess` of each video, a row per video."""
    images = [np.asarray(image) for image in scenes.images()]
    return pd.DataFrame(
        quality.assess(video, image, scenes[index])
        for index, (video, image) in enumerate(zip(frames, images, strict=True))
    )


@torch.no_grad()
def autoencoded(pipeline: StableVideoDiffusionPipeline, scenes: Scenes) -> tuple[NDArray[Any], NDArray[Any]]:
    """The clips of scenes and their reconstructions by the VAE, each (N, F, 3, height, width), 0 to 1."""
    clips = scenes.draw()
    shown = torch.empty_like(clips)
    for index, clip in enumerate(clips):
        latents = pipeline.vae.encode(clip * 2 - 1).latent_dist.mode()
        decoded = [pipeline.vae.decode(part, num_frames=len(part)).sample for part in latents.split(4)]
        shown[index] = (torch.cat(decoded) / 2 + 0.5).clamp(0, 1)
    return clips.numpy(), shown.numpy()


def evaluate(folder: str | Path, picture: Path | None) -> None:
    """Print the evaluation of one model, and draw frames of some videos if asked to."""
    pipeline = load(folder)

    clips, shown = autoencoded(pipeline, held_out(16))
    errors = ((clips - shown) ** 2).mean(axis=(1, 2, 3, 4))
    print(f"VAE on 16 held-out clips: {-10 * np.log10(errors.mean()):.1f} dB, worst {-10 * np.log10(errors.max()):.1f}")

    scenes = held_out(16)
    made = videos(pipeline, scenes.images())
    right = assess(made, scenes)
    print(f"PSNR of frame 0: median {right.psnr_first_db.median():.1f} dB, worst {right.psnr_first_db.min():.1f}")
    print(f"shape present in the last frame: {right.present_last.mean():.0%} of 16")

    few = scenes[:8]
    speeds = {bucket: assess(videos(pipeline, few.images(), motion_bucket_id=bucket), few) for bucket in BUCKETS}
    table = pd.concat(speeds, names=["bucket"]).reset_index()
    correlation = spearmanr(table.bucket, table.speed, nan_policy="omit").statistic
    print(
        f"speed against bucket, 5 × 8 videos: Spearman {correlation:.2f}; shape present {table.present_last.mean():.0%}"
    )
    print(table.groupby("bucket").speed.median().round(4).to_string())

    spoilt = videos(with_scheduler(pipeline, **FORGOTTEN), scenes.images())
    wrong = assess(spoilt, scenes)
    print("right and wrong scheduler settings, mean ± standard deviation over 16 images:")
    for name in right.columns:
        print(f"  {name:18}" + "".join(f"{t[name].mean():10.2f} ± {t[name].std():.2f}" for t in (right, wrong)))
    if picture:
        rows = [pair for i in range(4) for pair in ((f"image {i}", made[i]), (f"{i}, wrong", spoilt[i]))]
        title = "Without SVD's scheduler settings the videos of held-out images are noise"
        strips(rows, title, "25 steps, guidance 1 to 3, bucket 127").savefig(picture, dpi=80)


@torch.no_grad()
def held_out_losses(
    pipeline: StableVideoDiffusionPipeline, name: str, batches: int = 8, clips: int = 64
) -> pd.DataFrame:
    """Denoising loss of held-out clips in the range of one of EXPERTS, with the weights of the training, conditioned.

    Clips, noise and sigmas are the same for every model.

    Returns:
        A column `name` with a row for each sigma, BATCH of them for each of `batches`: the mean of BATCH clips, since
        the denoiser is called with one sigma at a time, as in sampling.
    """
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        scenes, pool = held_out(clips), Pool.empty(clips)
        for index in range(clips):
            pool.put(index, pipeline, scenes[index])
        sigmas = torch.cat([draw_sigmas(*EXPERTS[name]) for _ in range(batches)]).sort().values
        factor, kept = torch.tensor(pipeline.vae.config.scaling_factor), torch.ones(BATCH)
        losses = [
            denoising_losses(pipeline.unet, pool, torch.randint(clips, (BATCH,)), sigma, factor, kept).mean().item()
            for sigma in sigmas
        ]
    return pd.DataFrame({name: losses}, pd.Index(sigmas.tolist(), name="sigma"))


def figures(frames: Mapping[int, list[Frames]], scenes: Scenes) -> pd.DataFrame:
    """Figures of one model's videos of the same images at several buckets.

    Args:
        frames: bucket -> a video for each of the scenes.

    Returns:
        A row for each image, with the means of `assess` over the buckets, the mean distance of the speed to that of
        the training clips, and the rank correlation of speed and bucket.
    """
    table = pd.concat({bucket: assess(videos, scenes) for bucket, videos in frames.items()}, names=["bucket", "image"])
    buckets = table.index.get_level_values("bucket")
    table["speed_error"] = (table.speed - buckets / 255 * FASTEST).abs()
    of_images = table.groupby("image")
    means = of_images[["psnr_first_db", "present_last", "speed_error", "background_error", "jerkiness"]].mean()
    return means.assign(
        speed_correlation=of_images.apply(
            lambda rows: spearmanr(rows.index.get_level_values("bucket"), rows.speed, nan_policy="omit").statistic
        )
    )


def summary(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Compare models by the columns of their tables, whose rows belong together.

    Returns:
        A row for each column: every model's mean, and for each model after the first the mean of the differences to the
        model before it, ± their standard error.
    """
    means = pd.DataFrame({name: table.mean() for name, table in tables.items()}).map("{:.4g}".format)
    for (before, left), (name, right) in pairwise(tables.items()):
        difference = right - left
        spread = difference.std() / np.sqrt(len(difference))
        means[f"{name} - {before}"] = [f"{d:+.2g} ± {s:.1g}" for d, s in zip(difference.mean(), spread, strict=True)]
    return means


@dataclass(frozen=True)
class Measured:
    """What a model did with held-out clips.

    Attributes:
        losses: `held_out_losses` in both ranges.
        frames: bucket -> a video for each of the scenes.
    """

    losses: dict[str, pd.DataFrame]
    frames: dict[int, list[Frames]]

    @classmethod
    def of(cls, folder: str | Path, scenes: Scenes) -> Measured:
        """Measure the model in a folder."""
        pipeline, images = load(folder), scenes.images()
        return cls(
            {name: held_out_losses(pipeline, name) for name in EXPERTS},
            {bucket: videos(pipeline, images, motion_bucket_id=bucket) for bucket in BUCKETS},
        )


def compare(models: Mapping[str, Measured], scenes: Scenes, picture: Path | None) -> None:
    """Print how models with the same VAE differ on the same clips and seeds; draw some videos if asked to."""
    print("denoising loss of 64 held-out clips, 64 sigmas of each expert's range:")
    for name in EXPERTS:
        print(summary({model: measured.losses[name] for model, measured in models.items()}).to_string())
    images = len(scenes.shapes)
    print(f"videos of {images} held-out images at {len(BUCKETS)} buckets, means of images:")
    print(summary({model: figures(measured.frames, scenes) for model, measured in models.items()}).to_string())
    if picture:
        means = pd.DataFrame({model: pd.concat(measured.losses.values()).mean() for model, measured in models.items()})
        gains = means.iloc[:, -1] / means.iloc[:, -2] - 1
        title = f"Held-out loss of the {means.columns[-1]} against the {means.columns[-2]}: " + (
            f"{gains['high_noise']:+.1%} at high noise, {gains['low_noise']:+.1%} at low noise"
        )
        chosen = [
            (f"image {i}, bucket {bucket}", {name: measured.frames[bucket][i] for name, measured in models.items()})
            for i, bucket in enumerate(BUCKETS[1:])
        ]
        contact_sheet(chosen, title, "the same held-out images and seeds, 25 steps, guidance 1 to 3").savefig(picture)


def main() -> None:
    """Evaluate one model, or compare the experts with the single model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="a model; with --experts a folder that holds some")
    parser.add_argument("--experts", action="store_true", help="compare single model, control and experts")
    parser.add_argument("--picture", type=Path, help="file for frames of some of the videos")
    arguments = parser.parse_args()
    if not arguments.experts:
        return evaluate(arguments.folder or str(MODELS["tiny"]), arguments.picture)
    folders = {name: (arguments.folder or ASSETS) / name for name in ("control", "experts")}
    existing = {"single": Path(str(MODELS["tiny"]))} | {name: path for name, path in folders.items() if path.exists()}
    scenes = held_out(8)
    compare({name: Measured.of(path, scenes) for name, path in existing.items()}, scenes, arguments.picture)


if __name__ == "__main__":
    main()
