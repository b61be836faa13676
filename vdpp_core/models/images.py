"""Reading images: cropped to the video's proportions, upright, RGB."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from vdpp_core.config.errors import ConfigError
from vdpp_core.config.run_config import by_text

Frames = NDArray[np.uint8]  # (frames, height, width, 3)
LEAST_SIDE = 2  # pixels: the official pipeline mirrors the image at its edges before resizing it
LARGE = 16_000_000  # pixels; larger images are reduced while they are read
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # the Exif tag, and its values that swap width and height
_REDUCIBLE = ("L", "LA", "RGB", "RGBA", "CMYK")
_UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, RuntimeError, struct.error, Image.DecompressionBombError)


def read_image(path: Path, size: tuple[int, int]) -> Image.Image:
    """Read an image as RGB, cropped around its centre to the proportions of `size` (width, height).

    It is turned upright, transparency is put over white, and the first of several frames is taken. The official
    pipeline then resizes it, as it would any other image.

    Raises:
        ConfigError: the file is missing, truncated, not readable by Pillow, too large or too small.
    """
    with _opened(path) as image:
        given, upright = image.size, ImageOps.exif_transpose(_decoded(image, size))
    if min(upright.size) < LEAST_SIDE:
        what, kept = f"{by_text(*given)} pixels", by_text(*upright.size)
        allowed = f"has {what}, of which {kept} have the proportions of the video: {LEAST_SIDE} × {LEAST_SIDE} at least"
        raise ConfigError("image", path, allowed)
    if upright.has_transparency_data:
        upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright.convert("RGBA"))
    return upright.convert("RGB")


def whole_image(path: Path) -> Image.Image:
    """Read an image as diffusers' users do, for pipelines that crop or resize it themselves.

    Raises:
        ConfigError: the file is missing, not readable by Pillow or too small.
    """
    from diffusers.utils import load_image

    with _opened(path) as image:
        if min(image.size) < LEAST_SIDE:
            words = f"has {by_text(*image.size)} pixels: {LEAST_SIDE} × {LEAST_SIDE} at least"
            raise ConfigError("image", path, words)
        return load_image(str(path))


def _decoded(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The cropped part with 8 bits a channel, not yet upright; of a large image at most about twice `size`."""
    enough = 2 * max(size)
    large = image.width * image.height > LARGE
    if large:
        image.draft(None, (enough, enough))  # a JPEG is decoded small at once
    image.load()
    if image.mode == "F" or (image.mode == "I" and image.format != "PNG"):
        raise ValueError("it has 32 bits a channel, for which black and white are not defined")
    turned = image.getexif().get(_ORIENTATION) in _TURNED
    part = image.crop(_centre(image.size, size[::-1] if turned else size))
    factor = min(part.size) // enough
    if large and factor > 1:
        smaller = part.width // factor, part.height // factor
        part = part.reduce(factor) if part.mode in _REDUCIBLE else part.resize(smaller, Image.Resampling.NEAREST)
    if part.mode.startswith("I"):
        return _eight_bits(part)
    return part.convert("RGBA" if part.has_transparency_data else "RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """16-bit grey, which convert() would clip, with the value that may mark transparency."""
    values = np.asarray(image.convert("I"))
    clear = image.info.get("transparency", -1)
    return Image.merge(
        "LA", [Image.fromarray(layer.astype(np.uint8)) for layer in (values >> 8, (values != clear) * 255)]
    )


def _centre(given: tuple[int, int], size: tuple[int, int]) -> tuple[int, int, int, int]:
    """The box around the centre of an image of `given` width and height that has the proportions of `size`."""
    scale = max(size[0] / given[0], size[1] / given[1])
    width, height = max(1, round(size[0] / scale)), max(1, round(size[1] / scale))
    left, top = (given[0] - width) // 2, (given[1] - height) // 2
    return left, top, left + width, top + height


def how_it_fits(path: Path, size: tuple[int, int]) -> str:
    """Describe how an image is cropped and resized."""
    with _opened(path) as image:
        given = image.size
        if image.getexif().get(_ORIENTATION) in _TURNED:
            given = given[::-1]
    left, top, right, bottom = _centre(given, size)
    kept = right - left, bottom - top
    words = [f"{path.name}, {by_text(*given)} pixels"]
    if kept != given:
        words.append(f"cropped to its centre, {by_text(*kept)}")
    if kept != size:
        words.append(f"resized to {by_text(*size)}")
    return ", ".join(words)


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """Open an image file; any problem becomes a ConfigError. Pillow refuses more than 178 million pixels."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # for half as many
            with Image.open(path) as image:
                yield image
    except FileNotFoundError:
        raise ConfigError("image", path, "No such file") from None
    except _UNREADABLE as error:
        raise ConfigError("image", path, f"must be a readable image file ({type(error).__name__}: {error})") from None
