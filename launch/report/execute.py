"""Execute notebooks in order and render them: python -m launch report --set total_steps=14 01 04.

Each report is a dated folder in figures/reports/ that needs no network: index.html with the conclusions, a page for
each notebook, figures/ as PNG and SVG, tables/ as CSV, runs.csv. figures/reports/index.html leads to the latest one.
When a notebook fails, the index names the cell and the report goes on with the next notebook. A report writes nowhere
else, unless it is asked to update the pictures in figures/ that the README shows.
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

from launch.report import done, index, pages, parameters
from launch.report.done import Done
from launch.report.output_formats import KERNEL_ARGUMENTS, ForkedKernelManager
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
    titles = {path.stem: done.title_of(books[path.stem], path) for path in paths}
    made: list[Done] = []
    for number, path in enumerate(paths):
        book = parameters.inject(books[path.stem], changed[path.stem])
        made.append(_make(book, path, changed[path.stem], folder, titles, (number, clock)))
        index.write(folder, made)
        print(f"    {made[-1].error or 'ok'}, {made[-1].seconds:.0f} s", flush=True)
    index.write_entry(figures / "reports", folder)
    for picture in figures.glob("*.png") if update_figures else ():
        if (drawn := folder / "figures" / picture.name).exists():
            shutil.copy(drawn, picture)
    print(f"report: {(folder / 'index.html').as_uri()}")
    return made


def _make(
    book: Any, path: Path, changed: dict[str, Any], folder: Path, titles: dict[str, str], at: tuple[int, Clock]
) -> Done:
    """Execute a notebook and write its page, figures and tables."""
    root, began = runfolder.runs_root(path.parent), time.monotonic()
    before = done.run_folders(root)
    error, failed = _execute(book, path, *at)
    made = Done(path, titles[path.stem], changed, 0.0, error, failed)
    made.conclusion, made.cells = done.conclusion_of(book), done.times_of(book)
    made.figures = pages.save_outputs(book, path.stem, folder)
    made.runs = done.runs_of(book, root, before)
    write_atomically(folder / made.page, pages.render(book, made.title, path.parent, _links(path.stem, titles)))
    made.seconds = time.monotonic() - began
    return made


def _links(stem: str, titles: dict[str, str]) -> list[tuple[str, str, str]]:
    """The links of a page to the contents, and to the pages before and after it."""
    stems = list(titles)
    at = stems.index(stem)
    before = [("prev", f"{name}.html", f"← {titles[name]}") for name in stems[max(0, at - 1) : at]]
    after = [("next", f"{name}.html", f"{titles[name]} →") for name in stems[at + 1 : at + 2]]
    return [("contents", "index.html", "Contents"), *before, *after]


def _execute(book: Any, path: Path, number: int, clock: Clock) -> tuple[str | None, str | None]:
    """Run a notebook in place; returns the error and the id of the failed cell, or None twice."""
    code = done.code_cells(book)
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
