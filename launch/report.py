"""Executes the notebooks in order and renders them: python -m launch report.

figures/reports/<notebook>.html and index.html can be read without a network; the PNG of a cell tagged `figure:NAME`
goes to figures/NAME.png. A notebook that fails is named with its cell, and the others are still made.
"""

from __future__ import annotations

import base64
import html
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter

PROJECT = Path(__file__).resolve().parent.parent
WIDGET = "application/vnd.jupyter.widget-view+json"
CELL_TIMEOUT_S = 900
UNKNOWN_S = 60.0  # for a notebook that does not say in its metadata how long it took on two cores


@dataclass
class Done:
    """One executed notebook."""

    path: Path
    title: str
    seconds: float
    error: str | None


class Clock:
    """What is left, from the seconds that each notebook took where it was written and the pace so far here."""

    def __init__(self, expected: list[float]) -> None:
        self.expected, self.began = expected, time.monotonic()

    def left(self, notebook: int, cells_done: float) -> float:
        """Seconds left when a share of the cells of notebook number `notebook` is done."""
        done = sum(self.expected[:notebook]) + self.expected[notebook] * cells_done
        rest = sum(self.expected) - done
        pace = (time.monotonic() - self.began) / done if done > 0.1 * sum(self.expected) else 1.0
        return rest * pace


def report(notebooks: Path = PROJECT / "notebooks", figures: Path = PROJECT / "figures") -> list[Done]:
    """Execute all notebooks of a folder and write pages and figures; prints what it is at and how long it has left."""
    paths = sorted(notebooks.glob("*.ipynb"))
    books = [nbformat.read(path, as_version=4) for path in paths]
    clock = Clock([float(book.metadata.get("lab", {}).get("seconds", UNKNOWN_S)) for book in books])
    pages = figures / "reports"
    pages.mkdir(parents=True, exist_ok=True)
    done = []
    for number, (path, book) in enumerate(zip(paths, books, strict=True)):
        began = time.monotonic()
        error = _execute(book, path, f"[{number + 1}/{len(books)}] {path.stem}", number, clock)
        done.append(Done(path, _title(book, path), time.monotonic() - began, error))
        (pages / f"{path.stem}.html").write_text(render(book, done[-1].title), encoding="utf-8")
        save_figures(book, figures)
        print(f"    {error or 'ok'}, {done[-1].seconds:.0f} s", flush=True)
    (pages / "index.html").write_text(_index(done, figures), encoding="utf-8")
    print(f"report: {(pages / 'index.html').as_uri()}")
    return done


def _execute(book: Any, path: Path, name: str, number: int, clock: Clock) -> str | None:
    """Run a notebook in place; what went wrong, if something did."""
    code = [index for index, cell in enumerate(book.cells) if cell.cell_type == "code"]

    def say(cell: Any, cell_index: int) -> None:
        at = code.index(cell_index)
        left = clock.left(number, at / len(code))
        print(f"{name}: cell {at + 1} of {len(code)}, about {_minutes(left)} left", flush=True)

    client = NotebookClient(
        book,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_execute=say,
    )
    try:
        client.execute(stderr=subprocess.DEVNULL)  # the kernel's own words; a cell's are in the notebook
    except CellExecutionError as error:
        failed = next(i for i in code if any(out.output_type == "error" for out in book.cells[i].get("outputs", [])))
        return f"failed in cell {code.index(failed) + 1}: {error.ename}: {error.evalue}"
    return None


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def _title(book: Any, path: Path) -> str:
    lines = (line for cell in book.cells if cell.cell_type == "markdown" for line in cell.source.splitlines())
    return next((line.lstrip("# ") for line in lines if line.startswith("# ")), path.stem)


def render(book: Any, title: str) -> str:
    """HTML that needs no network: widget views are left out, the static figure after each shows the same."""
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if WIDGET not in out.get("data", {})]
    book.metadata.pop("widgets", None)
    exporter = HTMLExporter(embed_images=True, exclude_input_prompt=True, exclude_output_prompt=True)
    for library in ("mathjax_url", "require_js_url", "jquery_url", "mermaid_js_url"):
        setattr(exporter, library, "")
    page, _ = exporter.from_notebook_node(book, resources={"metadata": {"name": title}})
    return page


def save_figures(book: Any, folder: Path) -> list[Path]:
    """The PNG outputs of cells tagged `figure:NAME`, as NAME.png."""
    saved = []
    for cell in book.cells:
        names = [tag.partition(":")[2] for tag in cell.metadata.get("tags", []) if tag.startswith("figure:")]
        pictures = [out.data["image/png"] for out in cell.get("outputs", []) if "image/png" in out.get("data", {})]
        for name, picture in zip(names, pictures, strict=False):
            saved.append(folder / f"{name}.png")
            saved[-1].write_bytes(base64.b64decode(picture))
    return saved


def _picture(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    image = f'<img src="data:image/png;base64,{data}" alt="{html.escape(path.stem)}">'
    return f"<figure>{image}<figcaption>{html.escape(path.name)}</figcaption></figure>"


def _index(done: list[Done], figures: Path) -> str:
    rows = []
    for book in done:
        mark = f"<b>{html.escape(book.error)}</b>" if book.error else "ok"
        link = f'<a href="{html.escape(book.path.stem)}.html">{html.escape(book.title)}</a>'
        rows.append(f"<tr><td>{link}</td><td>{mark}</td><td>{book.seconds:.0f} s</td></tr>")
    shown = "".join(_picture(path) for path in sorted(figures.glob("*.png")))
    date = time.strftime("%Y-%m-%d %H:%M")
    return f"""<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>Video diffusion lab: report of {date}</title>
<style>body{{font:15px/1.5 sans-serif;max-width:1000px;margin:2em auto;padding:0 1em}}td{{padding:.3em 1em .3em 0}}
img{{max-width:100%;margin:1em 0;border:1px solid #ddd}}</style>
<h1>Video diffusion lab</h1><p>Report of {date}.</p><table>{"".join(rows)}</table>{shown}</html>
"""
