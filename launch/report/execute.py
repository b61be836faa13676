"""Execute notebooks in order and render them: python -m launch report --set total_steps=14 01 04.

Each report is a dated folder in figures/reports/ that needs no network: index.html with the conclusions, a page for
each notebook, figures/ as PNG and SVG, tables/ as CSV, runs.csv. figures/reports/index.html leads to the latest one.
When a notebook fails, the index names the cell and the report goes on with the next notebook. A report writes nowhere
else, unless it is asked to update the pictures in figures/ that the README shows.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError

from launch import signals, warm_start
from launch.report import done, index, pages, parameters
from launch.report.done import Done
from launch.report.output_formats import KERNEL_ARGUMENTS, ForkedKernelManager
from launch.terminate import end_started_by
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
    try:
        for number, path in enumerate(paths):
            book = parameters.inject(books[path.stem], changed[path.stem])
            _make(book, Done(path, titles[path.stem], changed[path.stem]), folder, titles, (number, clock), made)
    finally:
        index.write_entry(figures / "reports", folder)
        print(f"report: {(folder / 'index.html').as_uri()}")
    for picture in figures.glob("*.png") if update_figures else ():
        if (drawn := folder / "figures" / picture.name).exists():
            shutil.copy(drawn, picture)
    return made


def _make(book: Any, one: Done, folder: Path, titles: dict[str, str], at: tuple[int, Clock], made: list[Done]) -> None:
    """Execute a notebook, write its page, figures and tables, and add it to those that were made and to the index.

    Raises:
        KeyboardInterrupt: Ctrl-C came; this page, which is then the last one, is written all the same.
    """
    stem, root, began = one.path.stem, runfolder.runs_root(one.path.parent), time.monotonic()
    before = done.run_folders(root)
    stopped = _execute(book, one, *at)
    with signals.held_back() as came:
        came += [signal.SIGINT] * stopped
        one.conclusion, one.cells = done.conclusion_of(book), done.times_of(book)
        one.figures = pages.save_outputs(book, stem, folder)
        one.runs = done.runs_of(book, root, before)
        links = _links(stem, titles, last=bool(came))
        write_atomically(folder / one.page, pages.render(book, one.title, one.path.parent, links))
        one.seconds = time.monotonic() - began
        made.append(one)
        index.write(folder, made)
        print(f"    {one.error or 'ok'}, {one.seconds:.0f} s", flush=True)


def _links(stem: str, titles: dict[str, str], last: bool) -> list[tuple[str, str, str]]:
    """The links of a page to the contents, and to the pages before and after it."""
    stems = list(titles)
    at = stems.index(stem)
    before = [("prev", f"{name}.html", f"← {titles[name]}") for name in stems[max(0, at - 1) : at]]
    after = [("next", f"{name}.html", f"{titles[name]} →") for name in stems[at + 1 : at + 2] if not last]
    return [("contents", "index.html", "Contents"), *before, *after]


def _execute(book: Any, one: Done, number: int, clock: Clock) -> bool:
    """Run a notebook in place and end what it leaves running; returns whether Ctrl-C came."""
    code = done.code_cells(book)
    numbers = {id(cell): position for position, cell in enumerate(code, start=1)}
    name = f"[{number + 1}/{len(clock.expected)}] {one.path.stem}"
    at = 0  # the cell that was started last

    def report_progress(cell: Any, cell_index: int) -> None:
        nonlocal at
        if id(cell) in numbers:
            at = numbers[id(cell)]
            left = clock.left(number, (at - 1) / len(code))
            print(f"{name}: cell {at} of {len(code)}, about {_minutes(left)} left", flush=True)

    signals.all_as_ctrl_c()  # again: nbclient has taken it back
    client = _Client(
        book,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        kernel_manager_class=ForkedKernelManager,
        extra_arguments=KERNEL_ARGUMENTS,
        resources={"metadata": {"path": str(one.path.parent)}},
        on_cell_execute=report_progress,
    )
    mark = secrets.token_hex(8)
    try:
        client.execute(env={**os.environ, warm_start.STARTED_BY: mark})
    except (CellExecutionError, CellTimeoutError, RuntimeError) as error:  # RuntimeError: the kernel died
        words = f"{error.ename}: {error.evalue}" if isinstance(error, CellExecutionError) else str(error)
        one.error = f"failed in cell {at}: {' '.join(words.split())[:300]}"
        one.failed_cell = code[at - 1].get("id") if at else None
    finally:
        end_started_by(mark)
    if client.interrupted:
        one.error = f"stopped in cell {at}" if at else "stopped before its first cell"
    return client.interrupted


class _Client(NotebookClient):
    """Knows that Ctrl-C or SIGTERM came. nbclient ends the kernel then, and finds it dead, or itself without one."""

    @property
    def interrupted(self) -> bool:
        return hasattr(self, "_async_cleanup_kernel_future")

    async def _async_cleanup_kernel(self) -> None:
        if self.km is not None:
            await super()._async_cleanup_kernel()


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
