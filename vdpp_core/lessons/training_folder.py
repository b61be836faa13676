"""The folder of a training job, and who writes its files.

experiments.json  the experiments in their order, by whoever starts the job
launcher.json     the process that watches over the ranks, by whoever starts the job
events/           rank-N.jsonl, by each rank: start, step (experiment, step), and last end, error or terminated
results/          NNN.json, by rank 0 as experiment NNN ends
launcher.log      what launcher and ranks printed
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vdpp_core.lessons.experiments import Experiment
from vdpp_core.runs import runfolder
from vdpp_core.runs.files import read_object, write_atomically

LAUNCHER = "launcher.json"


def root() -> Path:
    """The folder of all training jobs."""
    return runfolder.runs_root() / "training"


def create(experiments: Sequence[Experiment]) -> Path:
    """Make the folder of a new job."""
    folder = root() / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    for part in ("events", "results"):
        (folder / part).mkdir(parents=True)
    listed = json.dumps([asdict(experiment) for experiment in experiments], indent=2)
    write_atomically(folder / "experiments.json", listed + "\n")
    return folder


def experiments(folder: Path) -> list[Experiment]:
    """The experiments of a job."""
    return [Experiment(**one) for one in json.loads((folder / "experiments.json").read_text())]


def write_result(folder: Path, number: int, result: dict[str, Any]) -> None:
    """Write what experiment `number` found."""
    write_atomically(folder / "results" / f"{number:03d}.json", json.dumps(result, indent=2) + "\n")


def results(folder: Path) -> list[dict[str, Any]]:
    """What the experiments that have ended found, in their order."""
    found = (read_object(path) for path in sorted((folder / "results").glob("[0-9]*.json")))
    return [result for result in found if result is not None]


def events(folder: Path) -> list[dict[str, Any]]:
    """The events of all ranks so far, sorted by time. A line without its end is still being written."""
    lines = [
        line
        for path in (folder / "events").glob("rank-*.jsonl")
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
        if line.endswith("\n")
    ]
    return sorted(map(json.loads, lines), key=lambda event: event["t"])
