"""Evaluates a tiny Stable Video Diffusion on scenes it was not trained on.

Run: python -m vdpp_core.tiny_svd.judge [FOLDER]      (a few minutes; default: the model in the package)
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from diffusers import EulerDiscreteScheduler, StableVideoDiffusionPipeline
from numpy.typing import NDArray
from PIL import Image
from scipy.stats import spearmanr

from vdpp_core.config.fields import MODELS
from vdpp_core.models.decoding import to_bytes
from vdpp_core.models.images import Frames
from vdpp_core.plots.video_quality import strips
from vdpp_core.tiny_svd import quality
from vdpp_core.tiny_svd.clips import SIZE, Scenes, held_out

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


def main() -> None:
    """Print the evaluation, and draw frames of some videos if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=MODELS["tiny"])
    parser.add_argument("--picture", type=Path, help="file for frames of some of the videos")
    arguments = parser.parse_args()
    pipeline = load(arguments.folder)

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
    if arguments.picture:
        rows = [pair for i in range(4) for pair in ((f"image {i}", made[i]), (f"{i}, wrong", spoilt[i]))]
        title = "Without SVD's scheduler settings the videos of held-out images are noise"
        strips(rows, title, "25 steps, guidance 1 to 3, bucket 127").savefig(arguments.picture, dpi=80)


if __name__ == "__main__":
    main()
