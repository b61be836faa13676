"""Manifests: files with a row for each video of a run. Row m, counted from 0, is sample m."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vdpp_core.config.errors import MOST_SHOWN, ConfigError, in_one_line

Row = dict[str, Any]  # column -> value; text in a CSV file
OF_ANY = ("image", "prompt", "negative_prompt", "seed")
OF_SVD = (
    *("image", "seed", "guidance_scale", "min_guidance_scale"),
    *("motion_bucket_id", "fps", "noise_aug_strength"),
)
SHARED = (
    *("total_steps", "num_inference_steps", "num_frames", "height", "width", "latent_shape"),
    *("num_videos_per_prompt", "num_images_per_prompt"),
)
MOST_ROWS = 100_000
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # one letter is a drive


def is_address(image: Any) -> bool:
    """Whether this is a URL. A path made of one has lost a slash."""
    return bool(_ADDRESS.match(str(image)))


def read(path: Path) -> tuple[Row, ...]:
    """Read the rows of a CSV or JSON Lines file. Empty cells and nulls are left out; images become absolute paths.

    Raises:
        ConfigError: the file cannot be read, or is no table with at least one row.
    """
    readers = {".csv": _csv_rows, ".jsonl": _json_rows}
    if path.suffix.lower() not in readers:
        raise ConfigError("manifest", path, "must be a .csv or .jsonl file")
    try:
        rows = [_with_place(row, path) for row in readers[path.suffix.lower()](path.read_text(encoding="utf-8-sig"))]
    except ConfigError as error:
        raise ConfigError("manifest", path, error.allowed) from None
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        words = getattr(error, "strerror", None) or error
        raise ConfigError("manifest", path, f"must be a readable file in UTF-8 ({words})") from None
    if not 1 <= len(rows) <= MOST_ROWS:
        allowed = f"has {len(rows) or 'no'} rows: must have from 1 to {MOST_ROWS:,}, each of which becomes a video"
        raise ConfigError("manifest", path, allowed)
    return tuple(rows)


def name_of_row(number: int) -> str:
    """How messages name a row, which is counted from 0."""
    return f"row {number + 1} (sample {number})"


@contextmanager
def errors_of_row(path: Path | None, number: int) -> Iterator[None]:
    """Have errors about the values of a row name the manifest, the row and the column."""
    try:
        yield
    except ConfigError as error:
        at = {"call": f", column {error.value}", "model_id": ""}  # an argument of the call; the pipeline itself
        value = f", column {error.argument}, {str(error.value)[:MOST_SHOWN]}"
        words = f"{name_of_row(number)}{at.get(error.argument, value)}: {error.allowed}"
        raise ConfigError("manifest", path, in_one_line(words)) from None


def _csv_rows(text: str) -> Iterable[Row]:
    lines = [cells for cells in csv.reader(io.StringIO(text, newline=""), strict=True) if cells]
    header = [name.strip() for name in lines[0]] if lines else []
    for name in header:
        if not name.isidentifier() or header.count(name) > 1:
            raise ConfigError("manifest", "", f"column {name!r} in the first line: must be a name, and there only once")
    for number, cells in enumerate(lines[1:]):
        if len(cells) != len(header):
            allowed = f"{name_of_row(number)} has {len(cells)} cells: must have {len(header)}, as the first line"
            raise ConfigError("manifest", "", allowed)
        yield {name: cell for name, cell in zip(header, cells, strict=True) if cell.strip()}


def _json_rows(text: str) -> Iterable[Row]:
    for number, line in enumerate(line for line in text.split("\n") if line.strip()):
        try:
            row = json.loads(line, parse_constant=_no_number, parse_float=_finite)
        except ValueError as error:
            raise ConfigError("manifest", "", f"{name_of_row(number)} is not JSON ({error})") from None
        if not isinstance(row, dict):
            raise ConfigError("manifest", "", f"{name_of_row(number)} must be a JSON object, from column to value")
        for name, value in row.items():
            if not name.isidentifier():
                raise ConfigError("manifest", "", f"{name_of_row(number)}, column {name!r}: must be a name")
            if isinstance(value, bool) and name in (*OF_ANY, *OF_SVD):
                words = f"{name_of_row(number)}, column {name}, {json.dumps(value)}: must be a number or a text"
                raise ConfigError("manifest", "", words)
        yield {name: value for name, value in row.items() if value is not None}


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is too large a number")
    return number


def _with_place(row: Row, path: Path) -> Row:
    if "image" not in row or is_address(row["image"]):
        return row
    return row | {"image": str((path.parent / str(row["image"]).strip()).absolute())}
