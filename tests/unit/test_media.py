"""Images as people have them come in; videos that play go out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vdpp_core import media
from vdpp_core.config import ConfigError
from vdpp_core.media import how_it_fits, read_image, read_video, save_video

SIZE = (64, 64)
ORANGE = (240, 140, 50)


@pytest.fixture
def saved(tmp_path):
    """saved(image, name, **options): the path of the image in a file."""

    def save(image, name="image.png", **options):
        image.save(tmp_path / name, **options)
        return tmp_path / name

    return save


def colour(path, size=SIZE):
    """The colour of the middle of an image as it is read."""
    image = read_image(path, size)
    assert image.mode == "RGB"
    return image.getpixel((image.width // 2, image.height // 2))


def halves(size=(30, 20)):
    """Red on the left, blue on the right."""
    image = Image.new("RGB", size, "red")
    image.paste("blue", (size[0] // 2, 0, *size))
    return image


@pytest.mark.parametrize(
    ("orientation", "top_left", "bottom_right"),
    [(1, "red", "blue"), (3, "blue", "red"), (6, "red", "blue"), (8, "blue", "red")],
)
def test_a_turned_photo_comes_upright(saved, orientation, top_left, bottom_right):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = saved(halves(), exif=exif)
    upright = (30, 20) if orientation < 5 else (20, 30)
    image = read_image(path, upright)
    assert image.size == upright
    assert image.getpixel((0, 0)) == Image.new("RGB", (1, 1), top_left).getpixel((0, 0))
    assert image.getpixel((image.width - 1, image.height - 1)) == Image.new("RGB", (1, 1), bottom_right).getpixel(
        (0, 0)
    )
    assert f"{upright[0]} × {upright[1]} pixels" in how_it_fits(path, SIZE)


def test_transparency_lies_over_white(saved):
    assert colour(saved(Image.new("RGBA", (9, 9), (*ORANGE, 0)))) == (255, 255, 255)
    assert colour(saved(Image.new("RGBA", (9, 9), (*ORANGE, 255)))) == ORANGE
    assert colour(saved(Image.new("LA", (9, 9), (0, 0)))) == (255, 255, 255)
    half = colour(saved(Image.new("RGBA", (9, 9), (0, 0, 0, 128))))
    assert half == pytest.approx((127, 127, 127), abs=1)
    palette = Image.new("P", (9, 9), 1)
    palette.putpalette([0, 0, 0, *ORANGE])
    assert colour(saved(palette)) == ORANGE
    assert colour(saved(palette, transparency=1)) == (255, 255, 255)


def test_grey_deep_and_printers_images(saved):
    assert colour(saved(Image.new("L", (9, 9), 100))) == (100, 100, 100)
    assert colour(saved(Image.new("1", (9, 9), 1))) == (255, 255, 255)
    deep = Image.fromarray(np.full((9, 9), 0x7FFF, dtype=np.uint16))
    assert colour(saved(deep)) == pytest.approx((127, 127, 127), abs=1)
    assert colour(saved(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "print.jpg")) == pytest.approx(
        (255, 0, 0), abs=3
    )


def test_the_first_frame_of_an_animation(saved):
    frames = [Image.new("RGB", (9, 9), name) for name in ("red", "blue")]
    assert colour(saved(frames[0], "moving.gif", save_all=True, append_images=frames[1:])) == (255, 0, 0)


@pytest.mark.parametrize(
    ("given", "wanted", "kept"),
    [
        ((90, 30), (64, 64), (30, 30)),
        ((30, 90), (64, 64), (30, 30)),
        ((64, 64), (64, 64), (64, 64)),
        ((1000, 1000), (1024, 576), (1000, 562)),
        ((500, 1), (64, 64), (1, 1)),
        ((1, 1), (128, 72), (1, 1)),
    ],
)
def test_cropped_to_the_centre(saved, given, wanted, kept):
    path = saved(Image.new("RGB", given))
    assert read_image(path, wanted).size == kept
    words = how_it_fits(path, wanted)
    assert words.startswith(f"image.png, {given[0]} × {given[1]} pixels")
    assert (f"cropped to its centre, {kept[0]} × {kept[1]}" in words) == (kept != given)
    assert (f"resized to {wanted[0]} × {wanted[1]}" in words) == (kept != wanted)


def test_it_is_the_centre_that_is_kept(saved):
    image = Image.new("RGB", (90, 30), "red")
    image.paste("blue", (30, 0, 60, 30))
    assert set(read_image(saved(image), SIZE).get_flattened_data()) == {(0, 0, 255)}


@pytest.mark.parametrize("name", ["huge.png", "huge.jpg"])
def test_a_huge_image_takes_bounded_memory(saved, name):
    path = saved(Image.new("RGB", (12_000, 8_000), ORANGE), name)
    program = (
        "import resource, sys; from pathlib import Path; from vdpp_core.media import read_image\n"
        "image = read_image(Path(sys.argv[1]), (64, 64))\n"
        "print(image.size, image.getpixel((0, 0)), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *picture, kilobytes = done.stdout.replace("(", " ").replace(")", " ").replace(",", " ").split()
    width, height, *shown = map(int, picture)
    assert width == height <= 1000
    assert shown == pytest.approx(ORANGE, abs=3)
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(kilobytes) * unit < 1.2e9


def test_more_pixels_than_pillow_reads(saved):
    path = saved(Image.new("1", (15_000, 12_000)))
    with pytest.raises(ConfigError, match=r"^image .*: must be a readable image file \(DecompressionBombError: "):
        read_image(path, SIZE)


def still(count, width, height):
    """Frames that differ, smooth enough for a codec."""
    levels = np.linspace(40, 200, count).astype(np.uint8)
    return np.broadcast_to(levels[:, None, None, None], (count, height, width, 3)).copy()


@pytest.mark.parametrize(("width", "height", "count", "fps"), [(64, 64, 14, 7), (24, 40, 3, 30), (8, 8, 1, 1)])
def test_a_video_reads_back(tmp_path, width, height, count, fps):
    frames = still(count, width, height)
    save_video(tmp_path / "videos", "sample-000", frames, Image.new("RGB", (width, height)), fps)
    assert sorted(path.name for path in (tmp_path / "videos").iterdir()) == [
        f"sample-000.{kind}" for kind in ("gif", "mp4", "png")
    ]
    back, rate = read_video(tmp_path / "videos" / "sample-000.mp4")
    assert (back.shape, rate) == (frames.shape, fps)
    assert np.abs(back.astype(int) - frames).max() <= 8
    with Image.open(tmp_path / "videos" / "sample-000.gif") as moving:
        assert moving.n_frames == count
        assert moving.info.get("duration", 1000 // fps) == pytest.approx(1000 / fps, abs=10)


def test_a_video_that_plays_in_a_browser(tmp_path):
    """H.264 in 4:2:0 is what all of them decode."""
    save_video(tmp_path, "a", still(3, 64, 64), Image.new("RGB", SIZE), 7)
    import imageio.v3 as imageio

    facts = imageio.immeta(tmp_path / "a.mp4", plugin="FFMPEG")
    assert facts["codec"] == "h264"
    assert facts["pix_fmt"].startswith("yuv420p")


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    def fail(draft: Path):
        draft.write_text("half")
        raise OSError("disk full")

    (tmp_path / "a.png").write_text("before")
    with pytest.raises(OSError, match="disk full"):
        media.write_whole(tmp_path / "a.png", fail)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.png", "before")]


def test_rows_and_sheets():
    image = Image.new("RGB", (10, 6), "red")
    row = media.row(still(14, 10, 6), image)
    assert row.size == (9 * (10 + media.SHEET_GAP), 6)
    assert row.getpixel((0, 0)) == (255, 0, 0)
    assert row.getpixel((row.width - 1, 0)) == (200, 200, 200)  # the last frame
    assert media.row(still(2, 10, 6), image).width < row.width
    assert media.contact_sheet([row, row, row]).size == (row.width, 3 * 6 + 2 * media.SHEET_GAP)
