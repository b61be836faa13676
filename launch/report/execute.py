"""Executes notebooks in order and renders them: python -m launch report --set total_steps=14 01 04.

Each report is a dated folder in figures/reports/ that can be read without a network: index.html, a page a notebook,
figures/ as PNG and SVG, tables/ as CSV, runs.csv. figures/reports/index.html leads to the latest one. A notebook that
fails is named with its cell, and the others are still made. figures/NAME.png, which the README shows, are renewed by a
report of all notebooks with their own parameters, and by no other.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError

from launch.report import pages, parameters
from launch.report.kernel import KERNEL_ARGUMENTS
from launch.report.pages import Done
from vdpp_core.runs import runfolder
from vdpp_core.runs.files import write_atomically

PROJECT = Path(__file__).resolve().parents[2]
CELL_TIMEOUT_S = 900
UNKNOWN_S = 60.0  # for a notebook that does not say in its metadata how long it took on two cores


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


def report(
    names: Sequence[str] = (),
    settings: Sequence[str] = (),
    notebooks: Path = PROJECT / "notebooks",
    figures: Path = PROJECT / "figures",
) -> list[Done]:
    """Execute the notebooks of a folder that are named, or all, and write the report; prints what it is at and how long
    it has left.

    Args:
        names: what the notebooks' names begin with, or paths.
        settings: NAME=VALUE of parameters. A notebook that lacks one does without.

    Raises:
        ConfigError: one line on what cannot be; nothing was executed.
    """
    paths = parameters.choose(names, notebooks)
    books = {path.stem: parameters.read(path) for path in paths}
    changed = parameters.assign(parameters.parse(settings), books)
    clock = Clock([float(book.metadata.get("lab", {}).get("seconds", UNKNOWN_S)) for book in books.values()])
    folder = figures / "reports" / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    folder.mkdir(parents=True)
    done: list[Done] = []
    for number, path in enumerate(paths):
        book = parameters.inject(books[path.stem], changed[path.stem])
        done.append(_make(book, path, changed[path.stem], folder, (number, clock)))
        pages.write_index(folder, done)
        print(f"    {done[-1].error or 'ok'}, {done[-1].seconds:.0f} s", flush=True)
        if not names and not settings:
            for name in pages.tagged_figures(book):
                if (picture := folder / f"figures/{name}.png").exists():
                    shutil.copy(picture, figures)
    pages.write_entry(figures / "reports", folder)
    print(f"report: {(folder / 'index.html').as_uri()}")
    return done


def _make(book: Any, path: Path, changed: dict[str, Any], folder: Path, at: tuple[int, Clock]) -> Done:
    """Execute a notebook and write its page, figures and tables."""
    root, began = runfolder.runs_root(path.parent), time.monotonic()
    before = pages.run_folders(root)
    error, failed = _execute(book, path, *at)
    made = Done(path, pages.title_of(book, path), changed, time.monotonic() - began, error, failed)
    made.figures, made.tables = pages.save_outputs(book, path.stem, folder)
    made.runs = pages.runs_of(book, root, before)
    write_atomically(folder / f"{path.stem}.html", pages.render(book, made.title))
    return made


def _execute(book: Any, path: Path, number: int, clock: Clock) -> tuple[str | None, str | None]:
    """Run a notebook in place; what went wrong, if something did, and the id of the cell."""
    code = pages.code_cells(book)
    numbers = {id(cell): position for position, cell in enumerate(code, start=1)}
    name = f"[{number + 1}/{len(clock.expected)}] {path.stem}"
    at = 0  # the cell that was begun last

    def say(cell: Any, cell_index: int) -> None:
        nonlocal at
        if id(cell) in numbers:
            at = numbers[id(cell)]
            left = clock.left(number, (at - 1) / len(code))
            print(f"{name}: cell {at} of {len(code)}, about {_minutes(left)} left", flush=True)

    client = NotebookClient(
        book,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        extra_arguments=KERNEL_ARGUMENTS,
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_execute=say,
    )
    try:
        client.execute(stderr=subprocess.DEVNULL)  # the kernel's own words; a cell's are in the notebook
    except (CellExecutionError, CellTimeoutError, RuntimeError) as error:  # the last where the kernel dies
        words = f"{error.ename}: {error.evalue}" if isinstance(error, CellExecutionError) else str(error)
        cell = code[at - 1] if at else {}
        return f"failed in cell {at}: {' '.join(words.split())[:300]}", cell.get("id")
    return None, None


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
