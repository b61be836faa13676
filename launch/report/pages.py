"""The page of a notebook in a report, and the files of its figures and tables."""

from __future__ import annotations

import base64
import copy
import mimetypes
import re
from collections.abc import Sequence
from dataclasses import asdict
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from nbconvert import HTMLExporter
from traitlets.config import Config

from launch.report.done import Shown, code_cells
from launch.report.output_formats import WORDS

FIGURE, SVG, TABLE = "image/png", "image/svg+xml", "text/csv"
WIDGET = "application/vnd.jupyter.widget-view+json"
SHOWN = ["text/html", "text/markdown", FIGURE, "text/plain"]  # the richest first; the SVG is a file beside the page
TEMPLATE = Path(__file__).with_name("page.html.j2")
MAIN = "main figure"  # the tag of the cell whose figure stands for its notebook


def render(book: Any, title: str, place: Path = Path(), links: Sequence[tuple[str, str, str]] = ()) -> str:
    """HTML that needs neither a network nor scripts, after `save_outputs`.

    Widgets are left out: the static figure after each one shows the same.

    Args:
        place: the folder of the notebook, where the pictures of its texts lie.
        links: to other pages: relation (prev, contents, next), address, words.
    """
    book = copy.deepcopy(book)
    for number, cell in enumerate(code_cells(book), start=1):
        cell.metadata["number"] = number
        cell.outputs = [out for out in cell.outputs if WIDGET not in out.get("data", {})]
    exporter = HTMLExporter(
        config=Config(NbConvertBase={"display_data_priority": SHOWN}, CSSHTMLHeaderPreprocessor={"style": "default"}),
        template_file=str(TEMPLATE),
        exclude_output_prompt=True,
        exclude_anchor_links=True,
    )
    about = {"name": title, "links": list(links)}
    page = exporter.from_notebook_node(book, resources={"metadata": about})[0]
    return re.sub(r'(?<=\bsrc=")([^":]+)(?=")', lambda found: _embedded(found[1], place), page)


def _embedded(address: str, place: Path) -> str:
    """The address of a picture below `place` or above it as one that holds it; nbconvert embeds none from above."""
    picture = place / unquote(unescape(address))
    kind = mimetypes.guess_type(picture.name)[0] or ""
    if not (kind.startswith("image/") and picture.is_file()):
        return address
    return f"data:{kind};base64,{base64.b64encode(picture.read_bytes()).decode()}"


def tagged_figures(book: Any) -> list[str]:
    """NAME of each tag `figure:NAME`, in order."""
    return [name for cell in code_cells(book) for name in _figure_names(cell)]


def _figure_names(cell: Any) -> list[str]:
    return [tag.partition(":")[2] for tag in cell.metadata.get("tags", []) if tag.startswith("figure:")]


def save_outputs(book: Any, stem: str, folder: Path) -> list[Shown]:
    """Write each figure as figures/NAME.png and .svg, and each table as tables/NAME.csv; note the files in the outputs.

    A figure is named by its cell's tag `figure:NAME`; without a tag of its own, and for tables, NAME is the notebook
    and the number of the cell.

    Returns:
        The figures, in order.
    """
    figures: list[Shown] = []
    for number, cell in enumerate(code_cells(book), start=1):
        shown = [out for out in cell.get("outputs", []) if "data" in out and WIDGET not in out.data]
        tags = _figure_names(cell)
        for index, out in enumerate([out for out in shown if FIGURE in out.data]):
            name = tags[index] if index < len(tags) else _name(stem, number, index)
            if name in [figure.name for figure in figures]:
                name = _name(stem, number, index)
            files = [_save(out.data, mime, folder, f"figures/{name}") for mime in (FIGURE, SVG) if mime in out.data]
            main = MAIN in cell.metadata.get("tags", []) and not index
            figures.append(Shown(name, files, out.data.get(WORDS, {}), main))
            alternative = figures[-1].alternative
            out.metadata["figure"] = asdict(figures[-1]) | {"number": len(figures), "alternative": alternative}
        for index, out in enumerate([out for out in shown if TABLE in out.data]):
            out.metadata["table"] = _save(out.data, TABLE, folder, f"tables/{_name(stem, number, index)}")
    return figures


def _save(data: Any, mime: str, folder: Path, name: str) -> str:
    """Write what an output has in a format; returns the path in the folder."""
    suffix = {FIGURE: "png", SVG: "svg", TABLE: "csv"}[mime]
    path = folder / f"{name}.{suffix}"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(base64.b64decode(data[mime]) if mime == FIGURE else data[mime].encode())
    return f"{name}.{suffix}"


def _name(stem: str, cell: int, index: int) -> str:
    return f"{stem}-cell-{cell:02d}" + (f"-{index + 1}" if index else "")
