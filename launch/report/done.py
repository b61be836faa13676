"""What is known of an executed notebook: how it ended, what it concludes, where its time went, which runs it has."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from vdpp_core.config.errors import ConfigError
from vdpp_core.runs.run import Run

CONCLUSION = "conclusion"  # the tag of the cell that prints a notebook's conclusion
RUN_S = "seconds"  # of a run, from the first event of its first rank to the last of all; loading included


@dataclass(frozen=True)
class Shown:
    """A figure of a notebook: its files in the report (a PNG and usually an SVG), and its words (`words_of`)."""

    name: str
    files: list[str]
    words: dict[str, str]
    main: bool  # whether it stands for the notebook

    @property
    def alternative(self) -> str:
        """What the figure says, for those who do not see it."""
        panels = self.words.get("panels")
        return (self.words.get("title") or self.name) + (f". It shows {panels}" if panels else "")


@dataclass(frozen=True)
class CellTime:
    """How long a cell of code took; cells are counted from 1."""

    number: int
    anchor: str
    heading: str  # above the cell
    seconds: float


@dataclass
class Done:
    """An executed notebook."""

    path: Path
    title: str
    settings: dict[str, Any]
    seconds: float = 0.0  # its kernel's start and the writing of its page included
    error: str | None = None
    failed_cell: str | None = None  # its id
    conclusion: str = ""
    figures: list[Shown] = field(default_factory=list)
    cells: list[CellTime] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def page(self) -> str:
        """The path of its page in the report."""
        return f"{self.path.stem}.html"

    @property
    def main_figure(self) -> Shown | None:
        """The figure that stands for it: the tagged one, or else the first."""
        return next((figure for figure in self.figures if figure.main), next(iter(self.figures), None))

    @property
    def slowest(self) -> list[CellTime]:
        """Its three slowest cells, if they took a second."""
        return [cell for cell in sorted(self.cells, key=lambda cell: -cell.seconds)[:3] if cell.seconds >= 1]

    @property
    def run_seconds(self) -> float:
        """The seconds of the runs that it made."""
        return sum(row[RUN_S] for row in self.runs if row["by this notebook"] == "made")


def title_of(book: Any, path: Path) -> str:
    """The first heading of a notebook, or its file name."""
    lines = (line for cell in book.cells if cell.cell_type == "markdown" for line in cell.source.splitlines())
    return next((line.lstrip("# ") for line in lines if line.startswith("# ")), path.stem)


def code_cells(book: Any) -> list[Any]:
    """The code cells of the notebook's file, without the injected one: the first is cell 1."""
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    return [cell for cell in code if "injected-parameters" not in cell.metadata.get("tags", [])]


def conclusion_of(book: Any) -> str:
    """What the cells tagged `conclusion` print, in one line."""
    tagged = [cell for cell in code_cells(book) if CONCLUSION in cell.metadata.get("tags", [])]
    return " ".join(" ".join(out.get("text", "") for cell in tagged for out in cell.outputs).split())


def times_of(book: Any) -> list[CellTime]:
    """The seconds of each cell of code that has ended."""
    times, heading, numbers = [], "", {id(cell): number for number, cell in enumerate(code_cells(book), start=1)}
    for cell in book.cells:
        if cell.cell_type == "markdown":
            headings = [line.lstrip("# ") for line in cell.source.splitlines() if re.match("#+ ", line)]
            heading = headings[-1] if headings else heading
        at = cell.metadata.get("execution", {})
        if id(cell) in numbers and {"iopub.execute_input", "shell.execute_reply"} <= set(at):
            began, ended = (datetime.fromisoformat(at[name]) for name in ("iopub.execute_input", "shell.execute_reply"))
            anchor, seconds = f"cell-id={cell.get('id', '')}", (ended - began).total_seconds()
            times.append(CellTime(numbers[id(cell)], anchor, heading, seconds))
    return times


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
            config, result, times = run.config, run.result() or {}, [event.t for event in run.events()]
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
                RUN_S: times[-1] - times[0] if times else 0.0,
                "makespan_s": result.get("makespan_s", float("nan")),
                "config": json.dumps(config.model_dump(mode="json")),
            }
        )
    return rows
