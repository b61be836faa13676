"""Images in; MP4, GIF and contact sheet out."""

from __future__ import annotations

import secrets
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from vdpp_core.config import ConfigError

Frames = NDArray[np.uint8]  # (frames, height, width, 3)
MP4_QUALITY = 8  # of imageio's 0 to 10
SHEET_FRAMES, SHEET_ROWS, SHEET_GAP = 8, 32, 4
LARGE = 16_000_000  # pixels, from which on an image is made smaller while it is read
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # the Exif tag, and its values that swap width and height
_REDUCIBLE = ("L", "LA", "RGB", "RGBA", "CMYK")
_UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, RuntimeError, struct.error, Image.DecompressionBombError)


def read_image(path: Path, size: tuple[int, int]) -> Image.Image:
    """An image as RGB, upright, transparency over white, the first frame of several, cropped around its centre to the
    proportions of `size` (width, height). The official pipeline then resizes it, as it would any other.

    Raises:
        ConfigError: the file is missing, not an image that Pillow reads, cut off, or too large.
    """
    with _opened(path) as image:
        upright = ImageOps.exif_transpose(_decoded(image, 2 * max(size)))
    if upright.has_transparency_data:
        upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright.convert("RGBA"))
    return _cropped(upright.convert("RGB"), size)


def _decoded(image: Image.Image, enough: int) -> Image.Image:
    """8 bits a channel; a large image no larger than needed for `enough` pixels a side."""
    if image.mode.startswith("I"):  # 16 bits a pixel, which convert() would clip
        return image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if image.width * image.height > LARGE:
        image.draft(None, (enough, enough))  # a JPEG is decoded small at once
        factor = min(image.size) // enough
        if factor > 1 and image.mode in _REDUCIBLE:
            return image.reduce(factor)
    return image.convert("RGBA" if image.has_transparency_data else "RGB")


def _cropped(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    scale = max(size[0] / image.width, size[1] / image.height)
    width, height = max(1, round(size[0] / scale)), max(1, round(size[1] / scale))
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def how_it_fits(path: Path, size: tuple[int, int]) -> str:
    """What becomes of an image, in words."""
    with _opened(path) as image:
        width, height = image.size
        if image.getexif().get(_ORIENTATION) in _TURNED:
            width, height = height, width
    kept = _cropped(Image.new("1", (width, height)), size).size
    words = [f"{path.name}, {width} × {height} pixels"]
    if kept != (width, height):
        words.append(f"cropped to its centre, {kept[0]} × {kept[1]}")
    if kept != size:
        words.append(f"resized to {size[0]} × {size[1]}")
    return ", ".join(words)


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """An image file; whatever is wrong with it is one ConfigError. Pillow refuses more than 178 million pixels."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # from half of that on
            with Image.open(path) as image:
                yield image
    except _UNREADABLE as error:
        raise ConfigError("image", path, f"must be a readable image file ({type(error).__name__}: {error})") from None


def save_video(folder: Path, name: str, frames: Frames, image: Image.Image, fps: int) -> None:
    """`name`.mp4 (H.264), `name`.gif and `name`.png, a row of frames after the image; each whole or not at all."""
    from diffusers.utils import export_to_gif, export_to_video

    folder.mkdir(exist_ok=True)
    pictures = [Image.fromarray(frame) for frame in frames]
    write_whole(
        folder / f"{name}.mp4",
        lambda draft: export_to_video(pictures, str(draft), fps=fps, quality=MP4_QUALITY, macro_block_size=8),
    )
    write_whole(folder / f"{name}.gif", lambda draft: export_to_gif(pictures, str(draft), fps=min(fps, 100)))
    write_whole(folder / f"{name}.png", lambda draft: row(frames, image).save(draft))


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` write a draft beside `path`, which takes its place when it is complete."""
    draft = path.with_name(f".{path.stem}.{secrets.token_hex(4)}{path.suffix}")
    try:
        write(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def row(frames: Frames, image: Image.Image) -> Image.Image:
    """The image, then up to eight of the frames, evenly spaced, the last among them."""
    chosen = np.linspace(0, len(frames) - 1, min(SHEET_FRAMES, len(frames))).round().astype(int)
    pictures = [image, *(Image.fromarray(frames[index]) for index in chosen)]
    width = image.width + SHEET_GAP
    strip = Image.new("RGB", (width * len(pictures), image.height), "white")
    for position, picture in enumerate(pictures):
        strip.paste(picture, (position * width + SHEET_GAP * (position > 0), 0))
    return strip


def contact_sheet(rows: Sequence[Image.Image]) -> Image.Image:
    """Rows of frames, one below the other."""
    heights = [picture.height + SHEET_GAP for picture in rows]
    sheet = Image.new("RGB", (max(picture.width for picture in rows), sum(heights) - SHEET_GAP), "white")
    for position, picture in enumerate(rows):
        sheet.paste(picture, (0, sum(heights[:position])))
    return sheet


def read_video(path: Path) -> tuple[Frames, float]:
    """Frames of an MP4 and how many are shown in a second."""
    import imageio.v3 as imageio

    return imageio.imread(path, plugin="FFMPEG"), imageio.immeta(path, plugin="FFMPEG")["fps"]
