"""Several runs one after another in the background; repeats are interleaved, so that comparisons are paired."""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from launch.job import POLL_S, Job, launch, prepare, within
from launch.terminate import end, end_by_name, settle
from vdpp_core.compare import tables
from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.execution import resolve
from vdpp_core.config.layout import Parallel
from vdpp_core.engine import preflight
from vdpp_core.runs import files, runfolder


class Sweep:
    """A started sweep: a folder of run folders, and table.csv, which is rewritten after each run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_id = folder, folder.name

    def __repr__(self) -> str:
        return f"Sweep({self.run_id!r}, {self.status()})"

    @functools.cached_property
    def runs(self) -> list[dict[str, Any]]:
        """run_id, config (its number) and repeat of each run, in the order of execution.

        Raises:
            ConfigError: sweep.json is damaged, or names a run outside this sweep.
        """
        try:
            runs = json.loads((self.folder / "sweep.json").read_text(encoding="utf-8"))
            if runs and all(within(self.folder, run["run_id"]) for run in runs):
                return runs
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            pass
        raise ConfigError("folder", self.folder, "must be a sweep's folder with a valid sweep.json")

    @property
    def jobs(self) -> list[Job]:
        """The runs in the order of execution."""
        return [Job(self.folder / run["run_id"]) for run in self.runs]

    def status(self) -> str:
        """How many runs are done; once all are, "ok" or how many ended otherwise."""
        outcomes = [job.outcome() for job in self.jobs]
        if None in outcomes:
            return f"running, {len(outcomes) - outcomes.count(None)} of {len(outcomes)} done"
        bad = sorted({str(outcome) for outcome in outcomes} - {"ok"})
        return f"{len(outcomes) - outcomes.count('ok')} of {len(outcomes)} not ok: {', '.join(bad)}" if bad else "ok"

    def progress(self) -> dict[str, Any]:
        """status, runs_finished, num_runs, and run: the progress of the current run, or None."""
        unfinished = [job for job in self.jobs if job.outcome() is None]
        return {
            "status": self.status(),
            "runs_finished": len(self.runs) - len(unfinished),
            "num_runs": len(self.runs),
            "run": {"run_id": unfinished[0].run_id, **unfinished[0].progress()} if unfinished else None,
        }

    def wait(self, timeout: float | None = None) -> pd.DataFrame:
        """Wait until all runs have ended; returns the table.

        Raises:
            TimeoutError: runs are left after `timeout` seconds; they continue.
        """
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        for job in self.jobs:
            left = deadline - time.monotonic()
            job.wait(None if timeout is None else max(0.0, left))
        while self.jobs[-1].run.launcher_alive() and time.monotonic() < deadline:
            time.sleep(POLL_S)  # it still writes table.csv
        return self.table()

    def stop(self) -> pd.DataFrame:
        """Stop the current run and drop the waiting ones; returns the table."""
        launched = [job.folder for job in self.jobs if job.run.launcher()]
        if launched:
            end(launched[-1])  # one launcher runs them all
        else:
            end_by_name(self.folder)
        for job in self.jobs:
            with contextlib.suppress(ConfigError):  # its folder is gone or its config.json is damaged
                settle(job.run, reason="stopped")
        return self.table()

    def table(self) -> pd.DataFrame:
        """A row for each finished run: its configuration and repeat, the columns of `compare.tables.table`, and
        `compare.tables.scaling`."""
        labels = pd.DataFrame(self.runs)
        found = labels.merge(tables.table([job.folder for job in self.jobs]), on="run_id", how="inner")
        return found if found.empty else found.assign(scaling=tables.scaling(found))

    def write_table(self) -> None:
        """Write table.csv in the sweep's folder."""
        files.write_atomically(self.folder / "table.csv", self.table().to_csv(index=False))


def sweep(configs: Sequence[RunConfig], repeats: int = 1, root: Path | None = None) -> Sweep:
    """Start one run after another, each configuration `repeats` times in alternating order: A B C, C B A, A B C, …

    Every configuration is checked before the first run starts. Where `threads` is not set, the ranks of all runs get as
    many as the layout with the most ranks leaves each, so that the runs differ in their layout alone.

    Args:
        root: the folder that will hold the sweep's folder; by default runs/.

    Raises:
        ConfigError: a configuration is invalid; nothing was started.
    """
    if not configs:
        raise ConfigError("configs", "", "must hold at least one configuration")
    if repeats < 1:
        raise ConfigError("repeats", repeats, "must be at least 1")
    ready = [preflight.complete(config, (config.parallel or Parallel()).world_size) for config in configs]
    threads = min(resolve(config, config.layout.world_size).threads for config in ready)
    ready = [config if config.threads else config.replace(threads=threads) for config in ready]
    for config in ready:
        preflight.check(config, config.layout.world_size)
        if config.output_dir is not None:
            raise ConfigError(
                "output_dir", config.output_dir, "not allowed in a sweep, which makes a folder for each run"
            )
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-sweep-{secrets.token_hex(2)}"
    folder = (root or runfolder.runs_root()) / name
    runs: list[dict[str, Any]] = []
    folders: list[Path] = []
    for repeat in range(repeats):
        order = list(enumerate(ready))
        for number, config in order if repeat % 2 == 0 else reversed(order):
            run_id = f"{len(runs):03d}-{config.layout.slug}"
            folders.append(prepare(config.replace(output_dir=folder / run_id)))
            runs.append({"run_id": run_id, "config": number, "repeat": repeat})
    files.write_atomically(folder / "sweep.json", json.dumps(runs, indent=2) + "\n")
    launch(folders, log=folder / "launcher.log", sweep=folder)
    return Sweep(folder)
