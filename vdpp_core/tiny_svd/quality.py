"""Quality of a video, in numbers that need no network and no other model.

Frames are bytes (F, height, width, 3). Where the scene is known (drawn by tiny_svd/clips.py), its shape is tracked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from skimage.measure import label
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from vdpp_core.models.images import Frames
from vdpp_core.tiny_svd.clips import Scenes

LIKELY_AREA = (0.4, 2.5)  # times the area in the image; other regions are not the shape
MARGIN = 3  # pixels around the shape that count as neither shape nor background


def psnr(frame: NDArray[np.uint8], truth: NDArray[np.uint8]) -> float:
    """Peak signal-to-noise ratio in dB; infinite where they are equal."""
    return float("inf") if np.array_equal(frame, truth) else float(peak_signal_noise_ratio(truth, frame))


def ssim(frame: NDArray[np.uint8], truth: NDArray[np.uint8]) -> float:
    """Structural similarity, at most 1; needs at least 7 × 7 pixels."""
    return float(structural_similarity(truth, frame, channel_axis=-1))


def change(frames: Frames) -> float:
    """Root mean square change from frame to frame, 0 to 255; 0 for a still picture or a single frame."""
    return _rms(np.diff(frames.astype(float), axis=0))


def jerkiness(frames: Frames) -> float:
    """Root mean square second difference over the frames: low for smooth motion, high for flicker and jumps."""
    return _rms(np.diff(frames.astype(float), n=2, axis=0))


def track(frames: Frames, scene: Scenes) -> dict[str, NDArray[Any]]:
    """Track the shape of one scene through the frames.

    A pixel belongs to the shape where its colour is nearer to the shape's than to the background's at that place.

    Returns:
        Arrays (F,): `present`, whether the largest connected region has a likely area; `area` of that region relative
        to the area in the image; `x` and `y`, its centre in image widths, NaN where the shape is absent.
    """
    height, width = frames.shape[1:3]
    pictures = frames.astype(float) / 255
    background, colour = _background(scene, height, width), scene.colours[0].numpy()
    shape = np.linalg.norm(pictures - colour, axis=-1) < np.linalg.norm(pictures - background, axis=-1)
    expected = float(scene.masks(1, height).sum())
    areas, centres = np.zeros(len(frames)), np.full((len(frames), 2), np.nan)
    for index, mask in enumerate(shape):
        regions = label(mask, connectivity=1)
        sizes = np.bincount(regions.ravel())[1:]
        if len(sizes):
            areas[index] = sizes.max() / expected
            rows, columns = np.nonzero(regions == 1 + sizes.argmax())
            centres[index] = (columns.mean() + 0.5) / width, (rows.mean() + 0.5) / height
    present = (areas >= LIKELY_AREA[0]) & (areas <= LIKELY_AREA[1])
    centres[~present] = np.nan
    return {"present": present, "area": areas, "x": centres[:, 0], "y": centres[:, 1]}


def speed(tracked: dict[str, NDArray[Any]]) -> float:
    """Mean distance that the shape moves per frame, in image widths, over pairs of frames that show it; else NaN."""
    ways = np.hypot(np.diff(tracked["x"]), np.diff(tracked["y"]))
    return float(np.nanmean(ways)) if np.isfinite(ways).any() else float("nan")


def background_error(frames: Frames, scene: Scenes) -> float:
    """Root mean square error of the background over all frames, 0 to 255, without MARGIN pixels around the shape."""
    height, width = frames.shape[1:3]
    background, colour = 255 * _background(scene, height, width), 255 * scene.colours[0].numpy()
    errors = frames.astype(float) - background
    shape = np.linalg.norm(frames - colour, axis=-1) < np.linalg.norm(errors, axis=-1)
    near = torch.nn.functional.max_pool2d(torch.from_numpy(shape).float(), 2 * MARGIN + 1, 1, MARGIN).bool().numpy()
    return _rms(errors[~near])


def assess(frames: Frames, image: NDArray[np.uint8], scene: Scenes | None = None) -> dict[str, float]:
    """All numbers of a video; those of shape and background only where the scene is known."""
    numbers = {
        "psnr_first_db": psnr(frames[0], image),
        "ssim_first": ssim(frames[0], image),
        "change": change(frames),
        "jerkiness": jerkiness(frames),
    }
    if scene is not None:
        tracked = track(frames, scene)
        numbers |= {
            "present_last": float(tracked["present"][-1]),
            "present_share": float(tracked["present"].mean()),
            "speed": speed(tracked),
            "background_error": background_error(frames, scene),
        }
    return numbers


def _background(scene: Scenes, height: int, width: int) -> NDArray[Any]:
    """(height, width, 3), 0 to 1."""
    if height != width:
        raise ValueError(f"frames of {width} × {height} pixels: a scene must be square")
    return scene.backgrounds(height)[0].permute(1, 2, 0).numpy()


def _rms(values: NDArray[Any]) -> float:
    return float(np.sqrt(np.mean(values**2))) if values.size else 0.0
