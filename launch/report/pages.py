"""What a report is made of: a page for each notebook, its figures and tables as files, its runs, and the index."""

from __future__ import annotations

import base64
import json
import re
import time
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
from nbconvert import HTMLExporter

from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.runs import machine, runfolder
from vdpp_core.runs.files import write_atomically

WIDGET = "application/vnd.jupyter.widget-view+json"
STYLE = """body{font:15px/1.5 sans-serif;max-width:1000px;margin:2em auto;padding:0 1em}
td,th{padding:.2em 1em .2em 0;text-align:left;vertical-align:top}img{max-width:100%;border:1px solid #ddd}
figure{margin:1em 0}.runs{font-size:12px}"""


@dataclass
class Done:
    """One executed notebook; of its figures, each a PNG and often an SVG, and of its tables the files."""

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
    lines = (line for cell in book.cells if cell.cell_type == "markdown" for line in cell.source.splitlines())
    return next((line.lstrip("# ") for line in lines if line.startswith("# ")), path.stem)


def render(book: Any, title: str) -> str:
    """HTML that needs no network and no script: widget views are left out, the static figure after each shows the
    same; of a figure the PNG is kept."""
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if WIDGET not in out.get("data", {})]
            for out in cell.outputs:
                if "image/png" in out.get("data", {}):
                    out.data.pop("image/svg+xml", None)
    book.metadata.pop("widgets", None)
    exporter = HTMLExporter(embed_images=True, exclude_input_prompt=True, exclude_output_prompt=True)
    page, _ = exporter.from_notebook_node(book, resources={"metadata": {"name": title}})
    return re.sub(r"<script\b.*?</script>", "", page, flags=re.DOTALL)


def code_cells(book: Any) -> list[Any]:
    """Those that the notebook's file has: the first one is cell 1."""
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    return [cell for cell in code if "injected-parameters" not in cell.metadata.get("tags", [])]


def tagged_figures(book: Any) -> list[str]:
    return [name for cell in code_cells(book) for name in _figure_names(cell)]


def _figure_names(cell: Any) -> list[str]:
    return [tag.partition(":")[2] for tag in cell.metadata.get("tags", []) if tag.startswith("figure:")]


def save_outputs(book: Any, stem: str, folder: Path) -> tuple[list[list[str]], list[str]]:
    """Write each figure as figures/NAME.png and .svg and each table as tables/NAME.csv: (figures, tables). A figure is
    called what its cell's tag `figure:NAME` says; without a tag, as tables are, by notebook and number of the cell."""
    figures, tables = [], []
    for kind in ("figures", "tables"):
        (folder / kind).mkdir(exist_ok=True)
    for number, cell in enumerate(code_cells(book), start=1):
        tags, shown = _figure_names(cell), [out.data for out in cell.get("outputs", []) if "data" in out]
        for index, data in enumerate([data for data in shown if "image/png" in data]):
            name = f"figures/{tags[index] if index < len(tags) else _name(stem, number, index)}"
            (folder / f"{name}.png").write_bytes(base64.b64decode(data["image/png"]))
            figures.append([f"{name}.png"])
            if "image/svg+xml" in data:
                write_atomically(folder / f"{name}.svg", data["image/svg+xml"])
                figures[-1].append(f"{name}.svg")
        for index, data in enumerate([data for data in shown if "text/csv" in data]):
            tables.append(f"tables/{_name(stem, number, index)}.csv")
            write_atomically(folder / tables[-1], data["text/csv"])
    return figures, tables


def _name(stem: str, cell: int, index: int) -> str:
    return f"{stem}-cell-{cell:02d}" + (f"-{index + 1}" if index else "")


def run_folders(root: Path) -> set[Path]:
    """All runs, also those of sweeps."""
    return {path.parent for depth in ("*", "*/*") for path in root.glob(f"{depth}/config.json")}


def runs_of(book: Any, root: Path, before: set[Path]) -> list[dict[str, Any]]:
    """The runs under `root` that a notebook made, which are those that were not there before, and those that it used:
    that it, or a figure's small print, names by their id or their sweep's."""
    shown = json.dumps([cell.get("outputs", []) for cell in book.cells])
    rows = []
    for folder in sorted(run_folders(root)):
        name = folder.relative_to(root)
        made = folder not in before
        if not made and not re.search(rf"\b{re.escape(name.parts[0])}\b", shown):
            continue
        try:
            config, result = RunConfig.read(folder), runfolder.read_result(folder) or {}
        except (ConfigError, ValueError):
            continue  # damaged
        rows.append(
            {
                "run": name.as_posix(),
                "by this notebook": "made" if made else "used",
                "outcome": result.get("outcome", "no result"),
                "command": config.command,
                "model": config.model_id or config.model,
                "layout": str(config.parallel or "as many stages as ranks"),
                "total_steps": config.total_steps,
                "num_samples": config.num_samples,
                "makespan_s": result.get("makespan_s", float("nan")),
                "config": json.dumps(config.model_dump(mode="json")),
            }
        )
    return rows


def write_index(folder: Path, done: list[Done]) -> Path:
    """index.html and runs.csv of a report's folder."""
    rows = [{"notebook": book.path.stem, **row} for book in done for row in book.runs]
    runs = pd.DataFrame(rows, columns=None if rows else ["notebook", "run", "config"])
    runs.to_csv(folder / "runs.csv", index=False)
    date = time.strftime("%Y-%m-%d %H:%M")
    about = {
        "date": date,
        "hardware": machine.hardware_name(machine.hardware()),
        "versions": ", ".join(f"{name} {version}" for name, version in machine.versions().items()),
        "git commit": machine.git_commit() or "none",
        "runs": f"{len(runs)}, see below",
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
<h2>Notebooks</h2><table><tr><th>page</th><th>outcome</th><th>took</th><th>set</th></tr>{books}</table>
{parts}<h2>Runs</h2><p><a href="runs.csv">runs.csv</a> has their whole configurations.</p>
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
    """index.html beside all reports leads to the latest one."""
    target = f"{latest.name}/index.html"
    write_atomically(
        reports / "index.html",
        f'<!DOCTYPE html>\n<html lang="en"><meta charset="utf-8"><title>The latest report</title>\n'
        f'<meta http-equiv="refresh" content="0; url={target}"><p><a href="{target}">{latest.name}</a></p></html>\n',
    )
