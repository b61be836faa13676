"""What has been obtained so far: a part for each section that was begun, and the claims."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from launch.documents import experiments
from launch.documents.experiments import Experiment
from launch.documents.machine import Machine
from launch.documents.measured import Measured
from launch.documents.rows import Row, place
from launch.job import Job
from vdpp_core.cli.words import counted
from vdpp_core.config.errors import in_one_line


@dataclass
class Part:
    """A section: what its runs left, and in words why others left nothing.

    Attributes:
        done: name of a run -> what it left.
        failed: name of a run, or "the section" -> why it failed.
        disturbed: how a run was -> names of the runs.
    """

    experiment: Experiment
    done: dict[str, Measured] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    disturbed: dict[str, list[str]] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        """The rows so far; a run that failed has one that says so."""
        section = self.experiment.section
        bad = [Row(section, name, None, "failed", why=why) for name, why in self.failed.items()]
        try:
            return self.experiment.rows(self.done) + bad
        except (OSError, ValueError) as error:  # the files of a run are damaged or gone
            return [*bad, Row(section, "the section", None, "failed", why=in_one_line(str(error)))]

    @property
    def notes(self) -> list[str]:
        """What makes times unrepresentative, in words."""
        return [f"disturbed ({'; '.join(names)}): {line}" for line, names in self.disturbed.items()]

    @property
    def videos(self) -> dict[str, Path]:
        """Caption -> file."""
        run = self.done.get(experiments.VIDEO)
        if run is None:
            return {}
        found = {"official pipeline": experiments.official_path(run), "this lab": run.run.video_paths(0)[0]}
        return {words: path for words, path in found.items() if path.exists()}


@dataclass
class Book:
    """All sections that were begun.

    Attributes:
        folder: of the page.
        num_runs: of all chosen sections; `runs_done`: of them.
        current: section and name of the run that is under way, and its job.
    """

    machine: Machine
    folder: Path
    claims: list[Row]
    parts: list[Part] = field(default_factory=list)
    num_runs: int = 0
    runs_done: int = 0
    current: tuple[str, Job] | None = None
    ended: bool = False
    began: float = field(default_factory=time.monotonic)

    @property
    def sections(self) -> list[Part]:
        """The parts in the order of the documents."""
        return sorted(self.parts, key=lambda part: place(part.experiment.section))

    @property
    def took(self) -> str:
        """Minutes and seconds since the beginning."""
        minutes, seconds = divmod(round(time.monotonic() - self.began), 60)
        return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"

    @property
    def failed(self) -> bool:
        """Whether a run or a section failed, or a verdict is not the published one."""
        verdicts = (row.here == "fail" for part in self.parts for row in part.rows)
        return any(part.failed for part in self.parts) or any(verdicts)

    @property
    def state(self) -> str:
        """How far it is, in words."""
        runs = f"{self.runs_done} of {counted(self.num_runs, 'run')}"
        if not self.ended:
            return f"incomplete: {runs} after {self.took}"
        bad = sum(len(part.failed) for part in self.parts)
        return f"complete: {runs} in {self.took}" + f", {bad} failed" * bool(bad)
