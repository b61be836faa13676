"""Runs in the background, from a terminal: python -m launch start | status | stop | resume | sweep | report | …"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from launch import Job, Sweep, attach, jobs, start, sweep
from launch.job import stop_what_is_left
from launch.machines.nodes import Nodes
from vdpp_core.cli import command_line
from vdpp_core.config import RunConfig
from vdpp_core.config.axes import AXIS_NAMES
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.layout import Parallel
from vdpp_core.runs import runfolder

LAYOUTS = (*AXIS_NAMES, "fsdp")
MOST_LINES = 1_000_000


def main(argv: Sequence[str] | None = None) -> None:
    command_line.speak_anywhere()
    arguments = _parser().parse_args(argv)
    warnings.showwarning = lambda message, *_: command_line.warn([str(message)])
    try:
        arguments.act(arguments)
    except ConfigError as error:
        command_line.fail(error.as_flag())


def _parser() -> argparse.ArgumentParser:
    parser = command_line.OneLineParser(prog="python -m launch", description=__doc__)
    actions = parser.add_subparsers(required=True, metavar="ACTION", parser_class=command_line.OneLineParser)

    def action(name: str, act: Any, purpose: str) -> argparse.ArgumentParser:
        added = actions.add_parser(name, help=purpose, description=purpose)
        added.set_defaults(act=act)
        return added

    starting = action("start", _start, "start a run and return at once")
    _add_nodes(starting, nproc="default: 1", named="that of --output-dir")
    command_line.add_run_commands(starting)

    sweeping = action("sweep", _sweep, "run numbers of ranks and layouts one after another; print the table")
    sweeping.add_argument("--ranks", required=True, metavar="N,N,…", help="numbers of ranks")
    sweeping.add_argument(
        "--layouts",
        default="pp,dp",
        metavar=",".join(LAYOUTS),
        help="which of step pipeline, data parallel, guidance (times frames above 2 ranks), frames, sharded",
    )
    sweeping.add_argument("--repeats", metavar="N", help="times each, interleaved")
    command_line.add_run_commands(sweeping)

    showing = action("status", _status, "how far runs are")
    showing.add_argument("run", nargs="?", help="run id; default: all")
    showing.add_argument("--json", action="store_true", help="print JSON")
    tailing = action("tail", _tail, "the last lines that a rank wrote")
    tailing.add_argument("run")
    tailing.add_argument("--rank", metavar="N", help="default: 0")
    tailing.add_argument("--lines", metavar="N", help="default: 20")
    tracing = action("trace", _trace, "what each rank of a run did when, as a trace for Perfetto")
    tracing.add_argument("run")
    tracing.add_argument("--output", type=Path, metavar="FILE", help="default: trace.json in the run's folder")
    resuming = action("resume", _resume, "compute what is missing of a run that ended early")
    resuming.add_argument("run")
    _add_nodes(resuming, nproc="of several: default 1; the run has as many in all as before", named="that of the run")
    reporting = action("report", _report, "execute notebooks and render them into a dated folder in figures/reports")
    reporting.add_argument("notebooks", nargs="*", metavar="NOTEBOOK", help="names, their beginnings, or paths")
    reporting.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a parameter of those notebooks that have it"
    )
    reporting.add_argument("--update-figures", action="store_true", help="replace the pictures in figures/ as well")
    stopping = action("stop", _stop, "end a run or a sweep; finished samples stay")
    stopping.add_argument("run")
    return parser


def _add_nodes(parser: argparse.ArgumentParser, nproc: str, named: str) -> None:
    parser.add_argument("--nproc", metavar="N", help=f"ranks on this machine; {nproc}")
    parser.add_argument("--nnodes", metavar="N", help="machines; call the same on each of them")
    parser.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="where they meet: one of them, a free port")
    parser.add_argument("--rdzv-id", metavar="ID", help=f"their name for the run; default: {named}")
    parser.add_argument("--wait", action="store_true", help="until it has ended; exit code 1 unless it ended well")


def _start(arguments: argparse.Namespace) -> None:
    nproc = command_line.whole_number("nproc", arguments.nproc, 1)
    nodes = _nodes(arguments, nproc, Path(arguments.output_dir or "").name)
    job = start(command_line.run_config(arguments, nproc if nodes is None else nodes.world_size), nproc, nodes)
    print(json.dumps({"run_id": job.run_id, "folder": str(job.folder)}) if arguments.json else job.run_id, flush=True)
    if arguments.wait:
        _wait(job)


def _wait(job: Job) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as of scancel
    try:
        result = job.wait()
    except KeyboardInterrupt:
        result = job.stop()
    if result["outcome"] != "ok":
        cause = result["failure"]["cause"] if "failure" in result else "by somebody"
        command_line.warn([f"{job.run_id}: {result['outcome']}, {cause}"])
        raise SystemExit(1)


def _nodes(arguments: argparse.Namespace, nproc: int, name: str) -> Nodes | None:
    """The machines that were named, of the run of that name; None where there is this one alone."""
    nnodes = command_line.whole_number("nnodes", arguments.nnodes, 1)
    if arguments.rdzv_endpoint is None:
        if nnodes != 1:
            raise ConfigError("nnodes", nnodes, "needs --rdzv-endpoint host:port, the same on each machine")
        if arguments.rdzv_id is not None:
            raise ConfigError("rdzv_id", arguments.rdzv_id, "only with --rdzv-endpoint")
        return None
    nodes = Nodes(nnodes, nproc, arguments.rdzv_endpoint, arguments.rdzv_id or name)
    nodes.check()
    return nodes


def _sweep(arguments: argparse.Namespace) -> None:
    for axis in (*AXIS_NAMES, "fsdp"):
        if given := getattr(arguments, axis):
            raise ConfigError(axis, given, f"not in a sweep, which takes --ranks and --layouts {axis}")
    configs = _layouts(arguments, _whole_numbers("ranks", arguments.ranks))
    running = sweep(configs, command_line.whole_number("repeats", arguments.repeats, 1))
    print(f"sweep {running.run_id}: {len(running.runs)} runs", file=sys.stderr)
    try:
        for number, job in enumerate(running.jobs, start=1):
            result = job.wait()
            if not arguments.json:
                seconds = result.get("makespan_s")
                took = f", makespan {seconds:.2f} s" if seconds is not None else ""
                print(f"{number}/{len(running.runs)} {job.run_id}: {result['outcome']}{took}", flush=True)
        table = running.wait()
    except KeyboardInterrupt:
        table = running.stop()
    _print_table(table.drop(columns=["run_id", *AXIS_NAMES, "fsdp"]), arguments.json)


def _whole_numbers(name: str, text: str) -> list[int]:
    try:
        return [command_line.whole_number(name, part, 1) for part in text.split(",")]
    except ConfigError as error:
        raise ConfigError(name, text, error.allowed.replace("a whole number", "whole numbers, each")) from None


def _layouts(arguments: argparse.Namespace, ranks: Sequence[int]) -> list[RunConfig]:
    names = arguments.layouts.split(",")
    if not set(names) <= set(LAYOUTS):
        allowed = f"must be {', '.join(LAYOUTS)} or several of them, separated by commas"
        raise ConfigError("layouts", arguments.layouts, allowed)
    layouts = {_layout(name, number, alone=names == ["fsdp"]) for number in ranks for name in names}
    base = command_line.without_layout(arguments)
    ordered = sorted(layouts, key=lambda layout: (layout.world_size, layout.fsdp, *layout.sizes.values()))
    return [base.replace(parallel=layout) for layout in ordered]


def _layout(name: str, ranks: int, alone: bool) -> Parallel:
    """The layout of that name on so many ranks. On one rank all are the same, but for FSDP, if that is all there is."""
    if name == "cfg" and ranks > 1:
        if ranks % 2:
            raise ConfigError("layouts", name, f"needs even numbers of ranks, not {ranks}")
        return Parallel(cfg=2, frames=ranks // 2)
    if name == "fsdp":
        return Parallel(dp=ranks, fsdp=ranks > 1 or alone)
    return Parallel(**({name: ranks} if ranks > 1 else {}))


def _status(arguments: argparse.Namespace) -> None:
    chosen = [attach(arguments.run)] if arguments.run else jobs()
    _print_table(pd.DataFrame([_row(job) for job in chosen]), arguments.json)
    for job in chosen if arguments.run else ():
        if isinstance(job, Job):
            command_line.warn(
                [f"disturbed: {line}" for line in job.disturbed()] + [f"damaged: {line}" for line in job.damaged()]
            )


def _row(job: Job | Sweep) -> dict[str, Any]:
    try:
        progress = job.progress()
    except (ConfigError, FileNotFoundError) as error:  # damaged, or gone in the middle of it
        return {"run": job.run_id, "status": str(error), "done": None, "seconds left": None, "at": None}
    if isinstance(job, Sweep):
        done = f"{progress['runs_finished']} of {progress['num_runs']} runs"
        number = sum(bool(each.disturbed()) for each in job.jobs)
        known = {"run": job.run_id, "status": progress["status"], "done": done, "seconds left": None, "at": None}
        return known | {"disturbed": f"{number} of them" if number else None}
    left = progress["seconds_left"]
    at = [
        f"rank {r['rank']}: sample {r['sample']}, step {r['step']}" for r in progress["ranks"] if r["step"] is not None
    ]
    return {
        "run": job.run_id,
        "status": progress["status"],
        "done": f"{progress['samples_finished']} of {progress['num_samples']} samples, {progress['share']:.0%} of all",
        "seconds left": round(left, 1) if left is not None and progress["status"] == "running" else None,
        "at": _failure(job) or progress["stalled"] or ("; ".join(at) if progress["status"] == "running" else None),
        "disturbed": "; ".join(job.disturbed()) or None,
    }


def _failure(job: Job) -> str | None:
    """Why a run ended badly, and where its first rank that failed was."""
    failure = (runfolder.read_result(job.folder) or {}).get("failure")
    if not failure:
        return None
    where = [f"{name} {failure[name]}" for name in ("rank", "sample", "step") if failure[name] is not None]
    return f"{', '.join(where)}: {failure['cause']}" if where else str(failure["cause"])


def _tail(arguments: argparse.Namespace) -> None:
    job = _run(arguments.run)
    rank = command_line.whole_number(
        "rank", arguments.rank, 0, most=RunConfig.read(job.folder).layout.world_size - 1, least=0
    )
    print(job.tail(rank, command_line.whole_number("lines", arguments.lines, 20, most=MOST_LINES)))


def _stop(arguments: argparse.Namespace) -> None:
    try:
        job = attach(arguments.run)
    except ConfigError:
        stop_what_is_left(arguments.run)
        status = "stopped; its folder is gone"
    else:
        status = job.stop()["outcome"] if isinstance(job, Job) else _stopped(job)
    print(f"{arguments.run}: {status}")


def _stopped(sweep: Sweep) -> str:
    sweep.stop()
    return sweep.status()


def _resume(arguments: argparse.Namespace) -> None:
    job = _run(arguments.run)
    nodes = _nodes(arguments, command_line.whole_number("nproc", arguments.nproc, 1), job.run_id)
    if nodes is None and arguments.nproc is not None:
        raise ConfigError("nproc", arguments.nproc, "only with --rdzv-endpoint: the ranks are as many as before")
    job.resume(nodes)
    print(f"{job.run_id}: {job.progress()['samples_finished']} samples are there, the others follow", flush=True)
    if arguments.wait:
        _wait(job)


def _run(run_id: str) -> Job:
    job = attach(run_id)
    if isinstance(job, Sweep):
        raise ConfigError("run", run_id, "must be a run, not a sweep")
    return job


def _trace(arguments: argparse.Namespace) -> None:
    print(_run(arguments.run).trace(arguments.output))
    print("open it at https://ui.perfetto.dev; without a network at chrome://tracing, in Chrome", file=sys.stderr)


def _report(arguments: argparse.Namespace) -> None:
    from launch.report.execute import report

    done = report(arguments.notebooks, arguments.set, update_figures=arguments.update_figures)
    if any(book.error for book in done):
        raise SystemExit(1)


def _print_table(table: pd.DataFrame, as_json: bool) -> None:
    if as_json:
        print(table.to_json(orient="records", indent=2))
    else:
        with pd.option_context("display.max_columns", None, "display.width", 200, "display.max_colwidth", 80):
            print(table.to_string(index=False, na_rep="–", float_format="{:.4g}".format) if len(table) else "no runs")


if __name__ == "__main__":
    main()
