"""Execute notebooks in order and render them: python -m launch report --set total_steps=14 01 04.

Each report is a dated folder in figures/reports/ that needs no network: index.html, a page for each notebook, figures/
as PNG and SVG, tables/ as CSV, runs.csv. figures/reports/index.html leads to the latest one. When a notebook fails, the
index names the cell and the report goes on with the next notebook. A report writes nowhere else, unless it is asked to
update the pictures in figures/ that the README shows.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError

from launch.report import pages, parameters
from launch.report.output_formats import KERNEL_ARGUMENTS, ForkedKernelManager
from launch.report.pages import Done
from vdpp_core.runs import runfolder
from vdpp_core.runs.files import write_atomically

PROJECT = Path(__file__).resolve().parents[2]
CELL_TIMEOUT_S = 900
UNKNOWN_S = 60.0  # for a notebook whose metadata does not record its time on two cores


class Clock:
    """Estimates the time left, from the seconds recorded in each notebook's metadata and the pace so far.

    Args:
        expected: seconds of each notebook.
    """

    def __init__(self, expected: list[float]) -> None:
        self.expected, self.began = expected, time.monotonic()

    def left(self, notebook: int, cells_done: float) -> float:
        """Seconds left once `cells_done`, a share from 0 to 1, of the cells of notebook number `notebook` are done."""
        done = sum(self.expected[:notebook]) + self.expected[notebook] * cells_done
        rest = sum(self.expected) - done
        pace = (time.monotonic() - self.began) / done if done > 0.1 * sum(self.expected) else 1.0
        return rest * pace


def report(
    names: Sequence[str] = (),
    settings: Sequence[str] = (),
    notebooks: Path = PROJECT / "notebooks",
    figures: Path = PROJECT / "figures",
    update_figures: bool = False,
) -> list[Done]:
    """Execute notebooks and write a report; prints the current cell and the time left.

    Args:
        names: beginnings of notebook names, or paths; all notebooks of the folder if empty.
        settings: NAME=VALUE of parameters, set in each notebook that has the parameter.
        notebooks: the folder of the notebooks.
        figures: the folder that holds reports/.
        update_figures: also replace each picture in `figures` that the report draws anew.

    Raises:
        ConfigError: a name or a setting is invalid; nothing was executed.
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
    pages.write_entry(figures / "reports", folder)
    for picture in figures.glob("*.png") if update_figures else ():
        if (drawn := folder / "figures" / picture.name).exists():
            shutil.copy(drawn, picture)
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
    """Run a notebook in place; returns the error and the id of the failed cell, or None twice."""
    code = pages.code_cells(book)
    numbers = {id(cell): position for position, cell in enumerate(code, start=1)}
    name = f"[{number + 1}/{len(clock.expected)}] {path.stem}"
    at = 0  # the cell that was started last

    def report_progress(cell: Any, cell_index: int) -> None:
        nonlocal at
        if id(cell) in numbers:
            at = numbers[id(cell)]
            left = clock.left(number, (at - 1) / len(code))
            print(f"{name}: cell {at} of {len(code)}, about {_minutes(left)} left", flush=True)

    client = NotebookClient(
        book,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        kernel_manager_class=ForkedKernelManager,
        extra_arguments=KERNEL_ARGUMENTS,
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_execute=report_progress,
    )
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, RuntimeError) as error:  # RuntimeError: the kernel died
        words = f"{error.ename}: {error.evalue}" if isinstance(error, CellExecutionError) else str(error)
        cell = code[at - 1] if at else {}
        return f"failed in cell {at}: {' '.join(words.split())[:300]}", cell.get("id")
    return None, None


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
