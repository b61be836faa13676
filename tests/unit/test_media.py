"""Images as people have them come in; videos that play go out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import official_pipeline
from vdpp_core.config.errors import ConfigError
from vdpp_core.engine import media
from vdpp_core.engine.media import read_video, save_video
from vdpp_core.models.images import LEAST_SIDE, how_it_fits, read_image

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


@pytest.mark.parametrize(
    ("orientation", "corner"), zip(range(1, 9), ["TL", "TR", "BR", "BL", "TL", "TR", "BR", "BL"], strict=True)
)
def test_a_photo_of_a_telephone_comes_upright(saved, orientation, corner):
    """All eight ways of holding it; a red corner in the upper left of what the sensor saw."""
    photo = Image.new("RGB", (80, 40), "white")
    photo.paste("red", (0, 0, 40, 20))
    exif = Image.Exif()
    exif[0x0112] = orientation
    width, height = upright = (80, 40) if orientation < 5 else (40, 80)
    image = read_image(saved(photo, "photo.jpg", exif=exif, quality=95), upright)
    assert image.size == upright
    corners = {"TL": (5, 5), "TR": (width - 6, 5), "BL": (5, height - 6), "BR": (width - 6, height - 6)}
    assert [name for name, place in corners.items() if image.getpixel(place)[1] < 100] == [corner]


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
    for value, shown in ((0, 0), (0xFFFF, 255)):
        assert colour(saved(Image.fromarray(np.full((9, 9), value, dtype=np.uint16)))) == (shown, shown, shown)
    assert colour(saved(Image.new("LA", (9, 9), (100, 255)))) == (100, 100, 100)
    assert colour(saved(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "print.jpg")) == pytest.approx(
        (255, 0, 0), abs=3
    )


def test_deep_grey_with_a_value_that_stands_for_transparency(saved):
    deep = Image.fromarray(np.full((9, 9), 0x7FFF, dtype=np.uint16))
    assert colour(saved(deep, transparency=0x7FFF)) == (255, 255, 255)
    assert colour(saved(deep, transparency=3)) == pytest.approx((127, 127, 127), abs=1)


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_32_bits_a_channel_are_refused(saved, kind):
    path = saved(Image.fromarray(np.ones((9, 9), dtype=kind)), "deep.tiff")
    with pytest.raises(ConfigError, match=r"^image .*deep.tiff: must be .* it has 32 bits"):
        read_image(path, SIZE)


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
        ((500, 2), (64, 64), (2, 2)),
        ((2, 500), (64, 64), (2, 2)),
        ((2, 500), (72, 128), (2, 4)),
        ((4, 4), (128, 72), (4, 2)),
    ],
)
def test_cropped_to_the_centre(saved, given, wanted, kept):
    path = saved(Image.new("RGB", given))
    assert read_image(path, wanted).size == kept
    words = how_it_fits(path, wanted)
    assert words.startswith(f"image.png, {given[0]} × {given[1]} pixels")
    assert (f"cropped to its centre, {kept[0]} × {kept[1]}" in words) == (kept != given)
    assert (f"resized to {wanted[0]} × {wanted[1]}" in words) == (kept != wanted)


@pytest.mark.parametrize(
    ("given", "wanted", "kept"),
    [
        ((1, 1), (64, 64), "1 × 1"),
        ((3000, 1), (64, 64), "1 × 1"),
        ((1, 500), (72, 128), "1 × 2"),
        ((9, 2), (64, 128), "1 × 2"),
        ((2, 2), (128, 64), "2 × 1"),
    ],
)
def test_what_is_too_small_for_the_official_pipeline_is_refused(saved, given, wanted, kept):
    path = saved(Image.new("RGB", given))
    with pytest.raises(ConfigError) as caught:
        read_image(path, wanted)
    assert str(caught.value) == (
        f"image {path}: has {given[0]} × {given[1]} pixels, of which {kept} have the proportions of the video: "
        "2 × 2 at least"
    )


@pytest.mark.parametrize("size", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_that_size_is_what_the_official_pipeline_can_take(size):
    pipeline = official_pipeline(torch.float32)

    def encode():
        return pipeline._encode_image(Image.new("RGB", size), torch.device("cpu"), 1, False)

    if min(size) >= LEAST_SIDE:
        assert encode().isfinite().all()
    else:
        with pytest.raises(RuntimeError, match="Padding size"):
            encode()


def test_it_is_the_centre_that_is_kept(saved):
    image = Image.new("RGB", (90, 30), "red")
    image.paste("blue", (30, 0, 60, 30))
    assert set(read_image(saved(image), SIZE).get_flattened_data()) == {(0, 0, 255)}
    assert set(read_image(saved(image.transpose(Image.Transpose.ROTATE_90)), SIZE).get_flattened_data()) == {
        (0, 0, 255)
    }


@pytest.mark.parametrize(
    ("given", "wanted", "box"),
    [
        ((60, 40), (32, 64), (20, 0, 40, 40)),  # landscape into portrait
        ((40, 60), (64, 32), (0, 20, 40, 40)),
        ((60, 60), (128, 64), (0, 15, 60, 45)),
    ],
)
def test_the_pixels_that_are_kept(saved, given, wanted, box):
    noise = np.random.default_rng(0).integers(0, 256, (given[1], given[0], 3), dtype=np.uint8)
    left, top, right, bottom = box
    kept = np.asarray(read_image(saved(Image.fromarray(noise)), wanted))
    assert np.array_equal(kept, noise[top:bottom, left:right])


# On Linux a child's ru_maxrss starts from its parent's peak, so this process's own high-water mark is read there.
READ_AND_WEIGH = """
import pathlib, resource, sys
from vdpp_core.models.images import read_image

image = read_image(pathlib.Path(sys.argv[1]), (64, 64))
status = pathlib.Path("/proc/self/status")
if status.exists():
    peak = next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
else:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(image.size, image.getpixel((0, 0)), peak)
"""


@pytest.mark.parametrize("name", ["huge.png", "huge.jpg", "palette.png", "long.png"])
def test_a_huge_image_takes_bounded_memory(saved, name):
    size = (170_000, 1_000) if name == "long.png" else (12_000, 8_000)
    image = Image.new("RGB", size, ORANGE)
    if name == "palette.png":
        image = Image.new("P", size)
        image.putpalette([*ORANGE, 0, 0, 0])
    path = saved(image, name, **({"transparency": 1} if name == "palette.png" else {}))
    done = subprocess.run([sys.executable, "-c", READ_AND_WEIGH, path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *picture, peak = done.stdout.replace("(", " ").replace(")", " ").replace(",", " ").split()
    width, height, *shown = map(int, picture)
    assert width == height <= 1000
    assert shown == pytest.approx(ORANGE, abs=3)
    assert int(peak) < 1.2e9


@pytest.fixture
def spoilt(saved, tmp_path):
    """A folder of files that are no images, or not whole ones."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    for kind in ("jpg", "png", "gif", "webp", "tif"):
        path = saved(noise, f"cut.{kind}")
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "empty.png").touch()
    (tmp_path / "folder.png").mkdir()
    return tmp_path


NO_IMAGES = ["missing.png", "text.png", "empty.png", "folder.png"]


@pytest.mark.parametrize("name", [*NO_IMAGES, "cut.jpg", "cut.png", "cut.gif", "cut.webp", "cut.tif"])
def test_what_is_not_a_whole_image_is_one_line(name, spoilt):
    for read in (read_image, how_it_fits) if name in NO_IMAGES else (read_image,):
        with pytest.raises(ConfigError) as caught:
            read(spoilt / name, SIZE)
        assert caught.value.argument == "image"
        line = caught.value.as_flag()
        said = "No such file" if name == "missing.png" else "must be a readable image file ("
        assert line.startswith(f"--image {spoilt / name}: {said}")
        assert "\n" not in line


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, about what it reads all the same
@pytest.mark.parametrize("kind", ["jpg", "png", "gif", "webp", "tif"])
def test_a_damaged_image_is_read_or_refused(kind, saved):
    """Cut off anywhere, or with other bytes in its head: never an error of another kind."""
    random = np.random.default_rng(0)
    exif = Image.Exif()
    exif[0x0112] = 6
    noise = Image.fromarray(random.integers(0, 256, (24, 32, 3), dtype=np.uint8))
    path = saved(noise, f"damaged.{kind}", **({} if kind == "gif" else {"exif": exif}))
    whole, refused = path.read_bytes(), 0
    for attempt in range(300):
        damaged = bytearray(whole[: random.integers(len(whole))] if attempt % 3 == 0 else whole)
        for place in random.integers(min(len(whole), 300), size=0 if attempt % 3 == 0 else random.integers(1, 9)):
            damaged[place] = random.integers(256)
        path.write_bytes(damaged)
        for read in (read_image, how_it_fits):
            try:
                read(path, SIZE)
            except ConfigError:
                refused += 1
    assert refused > 50


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


@pytest.mark.parametrize("fps", [1, 7, 30])
@pytest.mark.parametrize("moving", [True, False])
def test_a_gif_lasts_as_long_as_its_video(tmp_path, fps, moving):
    """In hundredths of a second, a GIF's unit; pictures that are equal may be one, shown for longer."""
    frames = still(14, 16, 16) if moving else np.full((14, 16, 16, 3), 90, np.uint8)
    save_video(tmp_path, "a", frames, Image.new("RGB", (16, 16)), fps)
    durations = []
    with Image.open(tmp_path / "a.gif") as gif:
        for index in range(gif.n_frames):
            gif.seek(index)
            durations.append(gif.info["duration"])
        assert gif.info["loop"] == 0  # for ever
    if moving:
        assert durations == [1000 // fps // 10 * 10] * 14
    assert sum(durations) == pytest.approx(14_000 / fps, abs=14 * 10)


def test_a_video_that_plays_in_a_browser(tmp_path):
    """H.264 in 4:2:0 is what all of them decode."""
    save_video(tmp_path, "a", still(3, 64, 64), Image.new("RGB", SIZE), 7)
    import imageio.v3 as imageio

    facts = imageio.immeta(tmp_path / "a.mp4", plugin="FFMPEG")
    assert facts["codec"] == "h264"
    assert facts["pix_fmt"].startswith("yuv420p")


@pytest.mark.parametrize(("broken", "left"), [("export_to_video", []), ("export_to_gif", ["a.mp4"])])
def test_no_half_of_a_video_is_left(tmp_path, monkeypatch, broken, left):
    import diffusers.utils

    def fail(_, path, **__):
        Path(path).write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(diffusers.utils, broken, fail)
    with pytest.raises(OSError, match="disk full"):
        save_video(tmp_path, "a", still(3, 16, 16), Image.new("RGB", (16, 16)), 7)
    assert [path.name for path in tmp_path.iterdir()] == left


def test_rows_and_sheets():
    image = Image.new("RGB", (10, 6), "red")
    row = media.row(still(14, 10, 6), image)
    assert row.size == (9 * (10 + media.SHEET_GAP), 6)
    assert row.getpixel((0, 0)) == (255, 0, 0)
    assert row.getpixel((row.width - 1, 0)) == (200, 200, 200)  # the last frame
    assert media.row(still(2, 10, 6), image).width < row.width
    assert media.contact_sheet([row, row, row]).size == (row.width, 3 * 6 + 2 * media.SHEET_GAP)
    short = media.row(still(2, 10, 6), Image.new("RGB", (10, 6), "blue"))
    sheet = media.contact_sheet([row, short])
    assert sheet.size == (row.width, 2 * 6 + media.SHEET_GAP)
    assert [sheet.getpixel((0, y)) for y in (0, 6 + media.SHEET_GAP)] == [(255, 0, 0), (0, 0, 255)]
    assert sheet.getpixel((row.width - 1, sheet.height - 1)) == (255, 255, 255)


def test_a_row_shows_up_to_eight_frames_evenly_and_the_last():
    numbered = np.arange(14, dtype=np.uint8)[:, None, None, None] * np.ones((1, 6, 10, 3), np.uint8)
    for count, shown in ((1, [0]), (3, [0, 1, 2]), (14, [0, 2, 4, 6, 7, 9, 11, 13])):
        row = media.row(numbered[:count], Image.new("RGB", (10, 6)))
        places = [position * (10 + media.SHEET_GAP) + media.SHEET_GAP for position in range(1, len(shown) + 1)]
        assert [row.getpixel((place, 0))[0] for place in places] == shown
        assert row.width == places[-1] + 10
