"""Images in."""

from pathlib import Path

from PIL import Image, ImageOps

from vdpp_core.config import ConfigError


def read_image(path: Path) -> Image.Image:
    """An RGB image, upright.

    Raises:
        ConfigError: the file is missing, or not an image that Pillow reads.
    """
    try:
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image)
            if upright.mode.startswith("I"):  # 16 bits a pixel, which convert() would clip
                upright = upright.convert("I").point(lambda value: value * (1 / 256)).convert("L")
            return upright.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ConfigError("image", path, f"must be a readable image file ({type(error).__name__}: {error})") from None
