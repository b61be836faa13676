"""The first page of a report: what each notebook concludes, where the time went, which runs there are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import jinja2
import pandas as pd

from launch.report.done import Done
from vdpp_core.runs import machine
from vdpp_core.runs.files import write_atomically

PAGES = jinja2.Environment(loader=jinja2.PackageLoader("launch.report", "."), autoescape=True, trim_blocks=True)


def write(folder: Path, done: Sequence[Done]) -> Path:
    """Write a report's index.html and runs.csv; returns the path of the index."""
    rows = [{"notebook": book.path.stem, **row} for book in done for row in book.runs]
    runs = pd.DataFrame(rows, columns=None if rows else ["notebook", "run", "config"])
    runs.to_csv(folder / "runs.csv", index=False)
    page = PAGES.get_template("index.html.j2").render(
        date=time.strftime("%Y-%m-%d %H:%M"),
        hardware=machine.hardware_name(machine.hardware()),
        versions=", ".join(f"{name} {version}" for name, version in machine.versions().items()),
        commit=machine.git_commit() or "none",
        books=done,
        total=sum(book.seconds for book in done),
        runs=runs.drop(columns="config").round(3).to_html(index=False, border=0, na_rep="–"),
        count=len(runs),
    )
    write_atomically(folder / "index.html", page)
    return folder / "index.html"


def write_entry(reports: Path, latest: Path) -> None:
    """Write reports/index.html, which leads to the latest report."""
    target = f"{latest.name}/index.html"
    write_atomically(
        reports / "index.html",
        f'<!DOCTYPE html>\n<html lang="en"><meta charset="utf-8"><title>The latest report</title>\n'
        f'<meta http-equiv="refresh" content="0; url={target}"><p><a href="{target}">{latest.name}</a></p></html>\n',
    )
