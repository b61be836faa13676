"""The commands of `python -m launch`: start, sweep, status, tail, trace, resume, report, documents, stop."""

from __future__ import annotations

import json
import signal
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Union

import pandas as pd
from tyro.conf import Positional, UseAppendAction

import launch
from launch import signals, status
from launch.documents.command import Documents
from launch.job import Job, stop_what_is_left
from launch.machines.nodes import Nodes
from vdpp_core.cli import arguments, old_names, progress_bar
from vdpp_core.cli.arguments import RUN, N, RunCommand, Switch, shown, whole_number
from vdpp_core.cli.progress_bar import Far
from vdpp_core.cli.words import counted
from vdpp_core.compare import tables
from vdpp_core.config import RunConfig
from vdpp_core.config.axes import AXIS_NAMES
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.layout import Parallel
from vdpp_core.runs import profiles, runfolder
from vdpp_core.runs.progress import progress

PROG = "python -m launch"
PURPOSE = "Start runs in the background, watch them, end them and report on them."
LAYOUTS = (*AXIS_NAMES, "fsdp")
MOST_LINES = 1_000_000

if TYPE_CHECKING:
    AnyRun = RunCommand
else:
    AnyRun = Union[tuple(arguments.run_commands(RunCommand))]  # noqa: UP007 (made at run time)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command; exits with 2 after bad input, with 1 where a run did not end well, with 130 after Ctrl-C."""
    arguments.begin()
    with arguments.readers_may_leave():
        _run_command(sys.argv[1:] if argv is None else list(argv))


def _run_command(words: Sequence[str]) -> None:
    old_names.answer(words, PROG.split())
    command = parse(words)
    warnings.showwarning = lambda message, *_: arguments.warn([str(message)])
    try:
        command()
    except ConfigError as error:
        arguments.refuse(error)
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        raise SystemExit(arguments.INTERRUPTED) from None


@dataclass(frozen=True, kw_only=True)
class OnMachines:
    """The machines of a run: this one, or several that meet."""

    nproc: Annotated[str | None, N] = None  # ranks on this machine, 1 by default; resume: only on several machines
    nnodes: Annotated[str, N] = "1"  # machines; call the same command on each of them
    rdzv_endpoint: Annotated[str | None, shown("HOST:PORT")] = None  # where machines meet: one of them, a free port
    rdzv_id: Annotated[str | None, shown("ID")] = None  # what machines call the run; default: its folder's name
    wait: Switch = False  # wait until the run has ended; exit code 1 unless it ended well

    def ranks_here(self) -> int:
        """Ranks on this machine."""
        return 1 if self.nproc is None else whole_number("nproc", self.nproc)

    def nodes(self, name: str) -> Nodes | None:
        """The machines that were named; None where there is only this one.

        Raises:
            ConfigError: they cannot meet.
        """
        nnodes = whole_number("nnodes", self.nnodes)
        if self.rdzv_endpoint is None:
            if nnodes != 1:
                raise ConfigError("nnodes", nnodes, "needs --rdzv-endpoint HOST:PORT, the same on each machine")
            if self.rdzv_id is not None:
                raise ConfigError("rdzv_id", self.rdzv_id, "only with --rdzv-endpoint")
            return None
        nodes = Nodes(nnodes, self.ranks_here(), self.rdzv_endpoint, self.rdzv_id or name)
        nodes.check()
        return nodes


@dataclass(frozen=True)
class Start(OnMachines):
    """Start a run and return at once."""

    what: AnyRun

    def __call__(self) -> None:
        nproc = self.ranks_here()
        nodes = self.nodes(Path(self.what.run.get("output_dir") or "").name)
        ranks = nproc if nodes is None else nodes.world_size
        job = launch.start(arguments.run_config(self.what.flags, ranks, "nproc", self.nproc is not None), nproc, nodes)
        known = {"run_id": job.run_id, "folder": str(job.folder)}
        print(json.dumps(known) if self.what.as_json else job.run_id, flush=True)
        if self.wait:
            _wait(job)
        else:
            print(*_what_next(job), sep="\n", file=sys.stderr)


@dataclass(frozen=True)
class Resume(OnMachines):
    """Compute what is missing of a run that ended early."""

    run: Positional[Annotated[str, RUN]]  # run id

    def __call__(self) -> None:
        job = _run(self.run)
        nodes = self.nodes(job.run_id)
        if nodes is None and self.nproc is not None:
            raise ConfigError("nproc", self.nproc, "only with --rdzv-endpoint: the run keeps its number of ranks")
        job.resume(nodes)
        far = job.progress()
        before = f"{far['samples_finished']} of {counted(far['num_samples'], 'sample')}"
        print(f"{job.run_id}: resumed; finished before: {before}", flush=True)
        if self.wait:
            _wait(job)


def _what_next(job: Job) -> list[str]:
    """Commands for a run that goes on in the background."""
    root = runfolder.runs_root()
    if job.folder.parent != root:
        return [f"{job.folder} is not in {root}, where `{PROG}` looks for runs by their names"]
    verbs = {"status": "how far it is", "tail": "what its ranks print", "stop": "end it"}
    width = len(f"status {job.run_id}")
    return [f"  {PROG} {f'{verb} {job.run_id}':{width}}  # {purpose}" for verb, purpose in verbs.items()]


def _wait(job: Job) -> None:
    _stop_on_sigterm()
    try:
        with progress_bar.of_run(job.folder):
            result = job.wait()
    except KeyboardInterrupt:
        result = job.stop()
    if result["outcome"] != "ok":
        cause = result["failure"]["cause"] if "failure" in result else "by the user"
        arguments.warn([f"{job.run_id}: {result['outcome']}, {cause}"])
        raise SystemExit(1)


@dataclass(frozen=True)
class Sweep:
    """Run several numbers of ranks and layouts one after another, and print a table."""

    what: AnyRun
    ranks: Annotated[str, shown("N,N,…")]  # numbers of ranks
    layouts: Annotated[str, shown(",".join(LAYOUTS))] = "pp,dp"  # ways to use the ranks; cfg: frames 2 and more, too
    repeats: Annotated[str, N] = "1"  # runs of each, interleaved

    def __call__(self) -> None:
        for name in (*LAYOUTS, "stage_ranks"):
            if given := self.what.run.get(name):
                instead = "--ranks and --layouts" + f" {name}" * (name in LAYOUTS)
                raise ConfigError(name, given, f"not in a sweep, which takes {instead}")
        configs = self._configs(_whole_numbers("ranks", self.ranks))
        running = launch.sweep(configs, whole_number("repeats", self.repeats))
        print(f"sweep {running.run_id}: {counted(len(running.runs), 'run')}", file=sys.stderr)
        _stop_on_sigterm()
        try:
            with progress_bar.following(partial(_far, running)):
                for number, job in enumerate(running.jobs, start=1):
                    result = job.wait()
                    if not self.what.as_json:
                        seconds = result.get("makespan_s")
                        took = f", makespan {seconds:.2f} s" if seconds is not None else ""
                        progress_bar.say(f"{number}/{len(running.runs)} {job.run_id}: {result['outcome']}{took}")
                table = running.wait()
        except KeyboardInterrupt:
            table = running.stop()
        if self.what.as_json:
            print(table.drop(columns=["run_id", *AXIS_NAMES, "fsdp"]).to_json(orient="records", indent=2))
        else:
            print(*tables.by_layout_in_words(table), sep="\n")

    def _configs(self, ranks: Sequence[int]) -> list[RunConfig]:
        names = self.layouts.split(",")
        if not set(names) <= set(LAYOUTS):
            allowed = f"must be {', '.join(LAYOUTS)} or several of them, separated by commas"
            raise ConfigError("layouts", self.layouts, allowed)
        layouts = {_layout(name, number, alone=names == ["fsdp"]) for number in ranks for name in names}
        base = arguments.without_layout(self.what.flags)
        ordered = sorted(layouts, key=lambda layout: (layout.world_size, layout.fsdp, *layout.sizes.values()))
        return [base.replace(parallel=layout) for layout in ordered]


def _far(sweep: launch.Sweep) -> Far:
    """The current run of a sweep, for the bar."""
    jobs = sweep.jobs
    waiting = [job for job in jobs if not (job.folder / "result.json").exists()]
    if not waiting:
        return Far("writing the table")
    now = progress(waiting[0].run)
    words, done = progress_bar.in_words(now), len(jobs) - len(waiting)
    more = ", ".join(filter(None, (waiting[0].run_id, words.doing, words.more)))
    return Far(f"run {done + 1} of {len(jobs)}", (done + now["share"]) / len(jobs), more)


def _whole_numbers(name: str, text: str) -> list[int]:
    try:
        return [whole_number(name, part) for part in text.split(",")]
    except ConfigError as error:
        raise ConfigError(name, text, error.allowed.replace("a whole number", "whole numbers, each")) from None


def _layout(name: str, ranks: int, alone: bool) -> Parallel:
    """The layout of that name on that many ranks. On one rank all are the same, except FSDP where it is `alone`."""
    if name == "cfg" and ranks > 1:
        if ranks % 2:
            raise ConfigError("layouts", name, f"needs even numbers of ranks, not {ranks}")
        return Parallel(cfg=2, frames=ranks // 2)
    if name == "fsdp":
        return Parallel(dp=ranks, fsdp=ranks > 1 or alone)
    return Parallel(**({name: ranks} if ranks > 1 else {}))


@dataclass(frozen=True)
class Status:
    """Show how far runs are."""

    run: Positional[Annotated[str | None, RUN]] = None  # run id; default: all runs
    json: Switch = False  # print JSON

    def __call__(self) -> None:
        chosen = launch.jobs() if self.run is None else [launch.attach(self.run)]
        if self.json:
            print(pd.DataFrame([status.row(job) for job in chosen]).to_json(orient="records", indent=2))
            return
        print(*(status.table(chosen) if self.run is None else status.in_lines(chosen[0])), sep="\n")


@dataclass(frozen=True)
class Tail:
    """Print the last lines that a rank wrote."""

    run: Positional[Annotated[str, RUN]]  # run id
    rank: Annotated[str, N] = "0"  # which rank
    lines: Annotated[str, N] = "20"  # how many lines

    def __call__(self) -> None:
        job = _run(self.run)
        most = job.run.config.layout.world_size - 1
        rank = whole_number("rank", self.rank, most=most, least=0)
        written = job.tail(rank, whole_number("lines", self.lines, most=MOST_LINES))
        if written:
            print(written)
        else:
            print(f"rank {rank} of {job.run_id} has written nothing", file=sys.stderr)


@dataclass(frozen=True)
class Trace:
    """Write what each rank of a run did and when, as a trace for Perfetto; after --profile draw its layers, too."""

    run: Positional[Annotated[str, RUN]]  # run id
    output: Annotated[str | None, shown("FILE")] = None  # file to write; default: trace.json in the run's folder

    def __call__(self) -> None:
        job = _run(self.run)
        print(job.trace(None if self.output is None else Path(self.output)))
        print("open it at https://ui.perfetto.dev, or without a network at chrome://tracing in Chrome", file=sys.stderr)
        for rank in range(job.run.config.layout.world_size):
            path = profiles.path_of(job.folder, rank)
            if path.exists():
                from vdpp_core.plots import profile

                drawn = path.with_name(f"rank-{rank}.png")
                profile.draw(job.run, rank).savefig(drawn)
                print(f"{path}\n{drawn}")


@dataclass(frozen=True)
class Report:
    """Execute notebooks and render them into a dated folder in figures/reports."""

    notebooks: Positional[Annotated[tuple[str, ...], shown("[NOTEBOOK ...]")]] = ()  # names, their beginnings, or paths
    set: Annotated[UseAppendAction[tuple[str, ...]], shown("NAME=VALUE")] = ()  # a parameter in notebooks that have it
    update_figures: Switch = False  # replace the pictures in figures/ as well

    def __call__(self) -> None:
        from launch.report.execute import report

        signals.all_as_ctrl_c()
        done = report(list(self.notebooks), list(self.set), update_figures=self.update_figures)
        if any(book.error for book in done):
            raise SystemExit(1)


@dataclass(frozen=True)
class Stop:
    """End a run or a sweep; finished samples are kept."""

    run: Positional[Annotated[str, RUN]]  # run id

    def __call__(self) -> None:
        try:
            job = launch.attach(self.run)
        except ConfigError:
            stop_what_is_left(self.run)
            how = "stopped; its folder is gone"
        else:
            ended = job.stop()
            how = str(ended["outcome"]) if isinstance(ended, dict) else job.status()
        print(f"{self.run}: {how}")


def _stop_on_sigterm() -> None:
    """Have SIGTERM, as `scancel` and `timeout` send it, stop what this command waits for, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _run(run_id: str) -> Job:
    job = launch.attach(run_id)
    if isinstance(job, launch.Sweep):
        raise ConfigError("run", run_id, "must be a run, not a sweep")
    return job


COMMANDS = [Start, Sweep, Status, Tail, Trace, Resume, Report, Documents, Stop]
parse = partial(arguments.parse, COMMANDS, prog=PROG, purpose=PURPOSE)
