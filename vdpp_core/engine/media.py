"""Videos as files: MP4, GIF and rows of frames."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from vdpp_core.models.images import Frames
from vdpp_core.runs.files import write_whole

MP4_QUALITY = 8  # of imageio's 0 to 10
GIF_FPS = 50  # at most: browsers slow down frames shorter than 20 ms
SHEET_FRAMES, SHEET_ROWS, SHEET_GAP = 8, 32, 4


def save_video(folder: Path, name: str, frames: Frames, image: Image.Image | None, fps: int) -> None:
    """Write `name`.mp4 (H.264), `name`.gif and `name`.png (the image and a row of frames), each atomically.

    Raises:
        OSError: the encoder did not finish, or the disk is full.
    """
    from diffusers.utils import export_to_gif

    folder.mkdir(exist_ok=True)
    pictures = [Image.fromarray(frame) for frame in frames]
    write_whole(folder / f"{name}.mp4", lambda draft: _write_mp4(pictures, draft, fps))
    write_whole(folder / f"{name}.gif", lambda draft: export_to_gif(pictures, str(draft), fps=min(fps, GIF_FPS)))
    write_whole(folder / f"{name}.png", lambda draft: row(frames, image).save(draft))


def _write_mp4(pictures: list[Image.Image], path: Path, fps: int) -> None:
    from diffusers.utils import export_to_video

    export_to_video(pictures, str(path), fps=fps, quality=MP4_QUALITY, macro_block_size=8)
    if b"moov" not in path.read_bytes():  # ffmpeg writes it last; imageio does not check that it did
        raise OSError(f"{path.name}: the encoder did not reach its end")


def row(frames: Frames, image: Image.Image | None) -> Image.Image:
    """Place the image, if there is one, and up to eight frames, evenly spaced up to the last, side by side."""
    chosen = np.linspace(0, len(frames) - 1, min(SHEET_FRAMES, len(frames))).round().astype(int)
    pictures = [Image.fromarray(frames[index]) for index in chosen]
    if image is not None:
        pictures.insert(0, image)
    width = pictures[0].width + SHEET_GAP
    strip = Image.new("RGB", (width * len(pictures), pictures[0].height), "white")
    for position, picture in enumerate(pictures):
        strip.paste(picture, (position * width + SHEET_GAP * (position > 0), 0))
    return strip


def contact_sheet(rows: Sequence[Image.Image]) -> Image.Image:
    """Stack rows of frames below one another."""
    heights = [picture.height + SHEET_GAP for picture in rows]
    sheet = Image.new("RGB", (max(picture.width for picture in rows), sum(heights) - SHEET_GAP), "white")
    for position, picture in enumerate(rows):
        sheet.paste(picture, (0, sum(heights[:position])))
    return sheet


def read_video(path: Path) -> tuple[Frames, float]:
    """Read the frames of an MP4, and its frames per second."""
    import imageio.v3 as imageio

    return imageio.imread(path, plugin="FFMPEG"), imageio.immeta(path, plugin="FFMPEG")["fps"]
