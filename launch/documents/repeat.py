"""Does the experiments' runs one after another, and writes page and CSV after each."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from launch import signals
from launch.documents import official_video, output
from launch.documents.book import Book, Part
from launch.documents.experiments import VIDEO, Experiment
from launch.documents.measured import Measured
from launch.sweep import Sweep, sweep
from vdpp_core.cli import progress_bar
from vdpp_core.cli.progress_bar import Far
from vdpp_core.config import RunConfig
from vdpp_core.config.errors import in_one_line

Ended = dict[RunConfig, Measured]


def repeat(book: Book, chosen: Sequence[Experiment], root: Path | None = None) -> None:
    """Do all runs; a section or run that fails becomes a row, and the others go on.

    Whatever interrupts this ends the run that is under way. The page then has the rows of those that are done.

    Args:
        root: for the runs; default runs/.
    """
    book.folder.mkdir(parents=True)
    every = {config for experiment in chosen for config in experiment.runs.values()}
    book.num_runs, ended = len(every), Ended()
    output.write(book)
    with progress_bar.following(partial(_far, book)):
        for experiment in chosen:
            part = Part(experiment)
            book.parts.append(part)
            try:
                _do(part, book, ended, root)
            except Exception as error:
                part.failed["the section"] = f"{type(error).__name__}: {in_one_line(str(error))}"
            output.write(book)
            progress_bar.say(output.of_part(part))
        if book.claims:
            progress_bar.say(output.of_claims(book.claims))
    book.ended = True
    output.write(book)


def _far(book: Book) -> Far:
    """The run that is under way, for the bar."""
    if book.current is None:
        return Far("starting")
    name, job = book.current
    words, share = "", 0.0
    if job.outcome() is None:
        far = job.progress()
        words, share = progress_bar.in_words(far).doing, far["share"]
    which = f"run {min(book.runs_done + 1, book.num_runs)} of {book.num_runs}"
    return Far(which, (book.runs_done + share) / book.num_runs, ", ".join(filter(None, (name, words))))


def _do(part: Part, book: Book, ended: Ended, root: Path | None) -> None:
    """Do the runs of a section that no section before has done."""
    names = part.experiment.runs
    for name, config in names.items():
        if config in ended:
            _note(part, name, ended[config])
    todo = list(dict.fromkeys(config for config in names.values() if config not in ended))
    if todo:
        _run(part, todo, book, ended, root)
    if VIDEO in part.done:
        official_video.make(part.done)


def _run(part: Part, todo: Sequence[RunConfig], book: Book, ended: Ended, root: Path | None) -> None:
    """Do runs in the background, and add what each of them left. They end with this function, however that ends."""
    started: Sweep | None = None
    try:
        with signals.held_back(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of ranks beyond cores, and of memory: the table says both
            started = sweep(todo, root=root)
        for job, config in zip(started.jobs, todo, strict=True):
            shared = [name for name, each in part.experiment.runs.items() if each == config]
            book.current = f"section {part.experiment.section}, {shared[0]}", job
            result = job.wait()
            ended[config] = Measured(job.run, job.run.config, result)
            book.runs_done += 1
            for name in shared:
                _note(part, name, ended[config])
            output.write(book)
        started.wait()
    except BaseException:
        if started is not None:
            with signals.held_back():
                started.stop()
        raise


def _note(part: Part, name: str, run: Measured) -> None:
    """Add what a run left to its section. Running out of memory is what two rows of section 12 are about."""
    if run.outcome == "ok" or (run.outcome == "oom" and part.experiment.may_be_full):
        part.done[name] = run
    else:
        part.failed[name] = f"{run.outcome}, {run.failure}"
    for line in run.result.get("disturbed") or []:
        part.disturbed.setdefault(line, []).append(name)
