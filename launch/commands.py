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
from typing import TYPE_CHECKING, Annotated, Any, Union

import pandas as pd
from tyro.conf import Positional, UseAppendAction

import launch
from launch.documents.command import Documents
from launch.job import Job, stop_what_is_left
from launch.machines.nodes import Nodes
from vdpp_core.cli import arguments
from vdpp_core.cli.arguments import RUN, N, RunCommand, Switch, shown, whole_number
from vdpp_core.config import RunConfig
from vdpp_core.config.axes import AXIS_NAMES
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.layout import Parallel

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
    command = parse(sys.argv[1:] if argv is None else list(argv))
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
        print(
            f"{job.run_id}: resumed, {far['samples_finished']} of {far['num_samples']} samples were finished",
            flush=True,
        )
        if self.wait:
            _wait(job)


def _wait(job: Job) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # scancel sends it
    try:
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
        print(f"sweep {running.run_id}: {len(running.runs)} runs", file=sys.stderr)
        try:
            for number, job in enumerate(running.jobs, start=1):
                result = job.wait()
                if not self.what.as_json:
                    seconds = result.get("makespan_s")
                    took = f", makespan {seconds:.2f} s" if seconds is not None else ""
                    print(f"{number}/{len(running.runs)} {job.run_id}: {result['outcome']}{took}", flush=True)
            table = running.wait()
        except KeyboardInterrupt:
            table = running.stop()
        _print_table(table.drop(columns=["run_id", *AXIS_NAMES, "fsdp"]), self.what.as_json)

    def _configs(self, ranks: Sequence[int]) -> list[RunConfig]:
        names = self.layouts.split(",")
        if not set(names) <= set(LAYOUTS):
            allowed = f"must be {', '.join(LAYOUTS)} or several of them, separated by commas"
            raise ConfigError("layouts", self.layouts, allowed)
        layouts = {_layout(name, number, alone=names == ["fsdp"]) for number in ranks for name in names}
        base = arguments.without_layout(self.what.flags)
        ordered = sorted(layouts, key=lambda layout: (layout.world_size, layout.fsdp, *layout.sizes.values()))
        return [base.replace(parallel=layout) for layout in ordered]


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
        _print_table(pd.DataFrame([_row(job) for job in chosen]), self.json)
        for job in () if self.run is None else chosen:
            if isinstance(job, Job):
                arguments.warn(f"disturbed: {line}" for line in job.disturbed())
                arguments.warn(f"damaged: {line}" for line in job.damaged())


def _row(job: Job | launch.Sweep) -> dict[str, Any]:
    known: dict[str, Any] = {"run": job.run_id}
    try:
        progress = job.progress()
    except (ConfigError, FileNotFoundError) as error:  # damaged, or just removed
        return known | {"status": str(error), "done": None, "seconds left": None, "at": None}
    known["status"] = progress["status"]
    if isinstance(job, launch.Sweep):
        done = f"{progress['runs_finished']} of {progress['num_runs']} runs"
        count = sum(bool(each.disturbed()) for each in job.jobs)
        disturbed = f"{count} of its runs" if count else None
        return known | {"done": done, "seconds left": None, "at": None, "disturbed": disturbed}
    left, running = progress["seconds_left"], progress["status"] == "running"
    at = [
        f"rank {r['rank']}: sample {r['sample']}, step {r['step']}" for r in progress["ranks"] if r["step"] is not None
    ]
    return known | {
        "done": f"{progress['samples_finished']} of {progress['num_samples']} samples ({progress['share']:.0%})",
        "seconds left": round(left, 1) if left is not None and running else None,
        "at": _failure(job) or progress["stalled"] or ("; ".join(at) if running else None),
        "disturbed": "; ".join(job.disturbed()) or None,
    }


def _failure(job: Job) -> str | None:
    """Where the first rank that failed was, and why."""
    failure = (job.run.result() or {}).get("failure")
    if not failure:
        return None
    where = [f"{name} {failure[name]}" for name in ("rank", "sample", "step") if failure[name] is not None]
    return f"{', '.join(where)}: {failure['cause']}" if where else str(failure["cause"])


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
    """Write what each rank of a run did and when, as a trace for Perfetto."""

    run: Positional[Annotated[str, RUN]]  # run id
    output: Annotated[str | None, shown("FILE")] = None  # file to write; default: trace.json in the run's folder

    def __call__(self) -> None:
        print(_run(self.run).trace(None if self.output is None else Path(self.output)))
        print("open it at https://ui.perfetto.dev, or without a network at chrome://tracing in Chrome", file=sys.stderr)


@dataclass(frozen=True)
class Report:
    """Execute notebooks and render them into a dated folder in figures/reports."""

    notebooks: Positional[Annotated[tuple[str, ...], shown("[NOTEBOOK ...]")]] = ()  # names, their beginnings, or paths
    set: Annotated[UseAppendAction[tuple[str, ...]], shown("NAME=VALUE")] = ()  # a parameter in notebooks that have it
    update_figures: Switch = False  # replace the pictures in figures/ as well

    def __call__(self) -> None:
        from launch.report.execute import report

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
            status = "stopped; its folder is gone"
        else:
            ended = job.stop()
            status = str(ended["outcome"]) if isinstance(ended, dict) else job.status()
        print(f"{self.run}: {status}")


def _run(run_id: str) -> Job:
    job = launch.attach(run_id)
    if isinstance(job, launch.Sweep):
        raise ConfigError("run", run_id, "must be a run, not a sweep")
    return job


def _print_table(table: pd.DataFrame, as_json: bool) -> None:
    """As JSON, or without the columns that are empty."""
    if as_json:
        print(table.to_json(orient="records", indent=2))
        return
    filled = table.dropna(axis="columns", how="all").astype(object).fillna("")
    with pd.option_context("display.max_columns", None, "display.width", 200, "display.max_colwidth", 80):
        print(filled.to_string(index=False, float_format="{:.4g}".format) if len(filled) else "no runs")


COMMANDS = [Start, Sweep, Status, Tail, Trace, Resume, Report, Documents, Stop]
parse = partial(arguments.parse, COMMANDS, prog=PROG, purpose=PURPOSE)
