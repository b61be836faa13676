"""The files of a report: a page for each notebook, its figures and tables, a list of its runs, and the index."""

from __future__ import annotations

import copy
import json
import re
import time
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
from nbconvert import HTMLExporter
from nbconvert.preprocessors import ExtractOutputPreprocessor
from traitlets.config import Config

from vdpp_core.config.errors import ConfigError
from vdpp_core.runs import machine
from vdpp_core.runs.files import write_atomically
from vdpp_core.runs.run import Run

FIGURE, SVG, TABLE = "image/png", "image/svg+xml", "text/csv"
WIDGET = "application/vnd.jupyter.widget-view+json"
SHOWN = ["text/html", "text/markdown", FIGURE, "text/plain"]  # the richest first; the SVG is a file beside the page
STYLE = """body{font:15px/1.5 sans-serif;max-width:1000px;margin:2em auto;padding:0 1em}
td,th{padding:.2em 1em .2em 0;text-align:left;vertical-align:top}img{max-width:100%;border:1px solid #ddd}
figure{margin:1em 0}.runs{font-size:12px;overflow-x:auto}"""


@dataclass
class Done:
    """An executed notebook, and the paths of its figures (each a PNG and usually an SVG) and tables in the report."""

    path: Path
    title: str
    settings: dict[str, Any]
    seconds: float
    error: str | None
    failed_cell: str | None  # its id
    figures: list[list[str]] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)


def title_of(book: Any, path: Path) -> str:
    """The first heading of a notebook, or its file name."""
    lines = (line for cell in book.cells if cell.cell_type == "markdown" for line in cell.source.splitlines())
    return next((line.lstrip("# ") for line in lines if line.startswith("# ")), path.stem)


def render(book: Any, title: str) -> str:
    """HTML that needs neither a network nor scripts.

    Widgets are left out: the static figure after each one shows the same. nbconvert's own way of leaving out scripts,
    an empty URL for each, still writes their tags.
    """
    book = copy.deepcopy(book)
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if WIDGET not in out.get("data", {})]
    book.metadata.pop("widgets", None)
    shown = Config({"NbConvertBase": {"display_data_priority": SHOWN}})
    exporter = HTMLExporter(config=shown, embed_images=True, exclude_input_prompt=True, exclude_output_prompt=True)
    page, _ = exporter.from_notebook_node(book, resources={"metadata": {"name": title}})
    return re.sub(r"<script\b.*?</script>", "", page, flags=re.DOTALL)


def code_cells(book: Any) -> list[Any]:
    """The code cells of the notebook's file, without the injected one: the first is cell 1."""
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    return [cell for cell in code if "injected-parameters" not in cell.metadata.get("tags", [])]


def tagged_figures(book: Any) -> list[str]:
    """NAME of each tag `figure:NAME`, in order."""
    return [name for cell in code_cells(book) for name in _figure_names(cell)]


def _figure_names(cell: Any) -> list[str]:
    return [tag.partition(":")[2] for tag in cell.metadata.get("tags", []) if tag.startswith("figure:")]


def save_outputs(book: Any, stem: str, folder: Path) -> tuple[list[list[str]], list[str]]:
    """Write each figure as figures/NAME.png and .svg, and each table as tables/NAME.csv.

    A figure is named by its cell's tag `figure:NAME`; without a tag of its own, and for tables, NAME is the notebook
    and the number of the cell.

    Returns:
        The figures' paths in the folder, one list for each figure, and the tables' paths.
    """
    book = copy.deepcopy(book)
    figures: list[list[str]] = []
    tables: list[str] = []
    for number, cell in enumerate(code_cells(book), start=1):
        shown = [out for out in cell.get("outputs", []) if "data" in out]
        tags = _figure_names(cell)
        for index, out in enumerate([out for out in shown if FIGURE in out.data]):
            name = tags[index] if index < len(tags) else _name(stem, number, index)
            if [f"figures/{name}.png"] in [files[:1] for files in figures]:
                name = _name(stem, number, index)
            figures.append([f"figures/{name}.png", *([f"figures/{name}.svg"] if SVG in out.data else [])])
            out.metadata["filename"] = name
        for index, out in enumerate([out for out in shown if TABLE in out.data]):
            out.metadata["filename"] = _name(stem, number, index)
            tables.append(f"tables/{out.metadata['filename']}.csv")
    extract = ExtractOutputPreprocessor(extract_output_types={FIGURE, SVG, TABLE})
    _, resources = extract.preprocess(book, {"outputs": {}})
    for path in [*(path for files in figures for path in files), *tables]:
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(resources["outputs"][Path(path).name])
    return figures, tables


def _name(stem: str, cell: int, index: int) -> str:
    return f"{stem}-cell-{cell:02d}" + (f"-{index + 1}" if index else "")


def run_folders(root: Path) -> set[Path]:
    """The folders of all runs under `root`, those of sweeps included."""
    return {path.parent for depth in ("*", "*/*") for path in root.glob(f"{depth}/config.json")}


def runs_of(book: Any, root: Path, before: set[Path]) -> list[dict[str, Any]]:
    """The runs under `root` that a notebook made or used, a row for runs.csv each.

    It made those that are not in `before`. It used those whose id, or whose sweep's id, its outputs name.
    """
    shown = json.dumps([cell.get("outputs", []) for cell in book.cells])
    rows = []
    for folder in sorted(run_folders(root)):
        name = folder.relative_to(root)
        made = folder not in before
        if not made and not re.search(rf"\b{re.escape(name.parts[0])}\b", shown):
            continue
        try:
            run = Run(folder)
            config, result = run.config, run.result() or {}
        except (ConfigError, ValueError):
            continue  # damaged
        rows.append(
            {
                "run": name.as_posix(),
                "by this notebook": "made" if made else "used",
                "outcome": result.get("outcome", "no result"),
                "command": config.command,
                "model": config.model_id or config.model,
                "layout": str(config.parallel or "one stage per rank"),
                "total_steps": config.total_steps,
                "num_samples": config.num_samples,
                "makespan_s": result.get("makespan_s", float("nan")),
                "config": json.dumps(config.model_dump(mode="json")),
            }
        )
    return rows


def write_index(folder: Path, done: list[Done]) -> Path:
    """Write a report's index.html and runs.csv; returns the path of the index."""
    rows = [{"notebook": book.path.stem, **row} for book in done for row in book.runs]
    runs = pd.DataFrame(rows, columns=None if rows else ["notebook", "run", "config"])
    runs.to_csv(folder / "runs.csv", index=False)
    date = time.strftime("%Y-%m-%d %H:%M")
    about = {
        "date": date,
        "hardware": machine.hardware_name(machine.hardware()),
        "versions": ", ".join(f"{name} {version}" for name, version in machine.versions().items()),
        "git commit": machine.git_commit() or "none",
        "runs": f"{len(runs)}, listed below",
    }
    facts = "".join(f"<tr><th>{name}</th><td>{escape(fact)}</td></tr>" for name, fact in about.items())
    books = "".join(map(_row, done))
    parts = "".join(map(_section, done))
    index = folder / "index.html"
    write_atomically(
        index,
        f"""<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>Video diffusion lab: report of {date}</title>
<style>{STYLE}</style>
<h1>Video diffusion lab</h1><table>{facts}</table>
<h2>Notebooks</h2><table><tr><th>page</th><th>outcome</th><th>time</th><th>parameters set</th></tr>{books}</table>
{parts}<h2>Runs</h2><p><a href="runs.csv">runs.csv</a> holds the complete configurations.</p>
<div class="runs">{runs.drop(columns="config").to_html(index=False, border=0, na_rep="")}</div>
</html>
""",
    )
    return index


def _row(book: Done) -> str:
    page = f"{book.path.stem}.html"
    mark = "ok"
    if book.error:
        anchor = f"#cell-id={book.failed_cell}" if book.failed_cell else ""
        mark = f'<a href="{escape(page + anchor)}"><b>{escape(book.error)}</b></a>'
    settings = ", ".join(f"{name} = {value!r}" for name, value in book.settings.items()) or "–"
    link = f'<a href="{escape(page)}">{escape(book.title)}</a>'
    return f"<tr><td>{link}</td><td>{mark}</td><td>{book.seconds:.0f}&nbsp;s</td><td>{escape(settings)}</td></tr>"


def _section(book: Done) -> str:
    shown = "".join(map(_figure, book.figures))
    links = [f'<a href="{escape(table)}">{escape(Path(table).name)}</a>' for table in book.tables]
    tables = f"<p>Tables: {', '.join(links)}</p>" if links else ""
    return f"<h2>{escape(book.title)}</h2>{tables}{shown}" if shown or tables else ""


def _figure(files: list[str]) -> str:
    name = escape(Path(files[0]).stem)
    links = ", ".join(f'<a href="{escape(file)}">{Path(file).suffix[1:].upper()}</a>' for file in files)
    image = f'<img src="{escape(files[0])}" alt="{name}">'
    return f"<figure>{image}<figcaption>{name}: {links}</figcaption></figure>"


def write_entry(reports: Path, latest: Path) -> None:
    """Write reports/index.html, which leads to the latest report."""
    target = f"{latest.name}/index.html"
    write_atomically(
        reports / "index.html",
        f'<!DOCTYPE html>\n<html lang="en"><meta charset="utf-8"><title>The latest report</title>\n'
        f'<meta http-equiv="refresh" content="0; url={target}"><p><a href="{target}">{latest.name}</a></p></html>\n',
    )
