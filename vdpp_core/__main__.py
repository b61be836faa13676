"""The commands, alone or under torchrun: python -m vdpp_core simulate | benchmark | generate | memory | plan | …"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from vdpp_core.cli import command_line, predictions
from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError, redacted
from vdpp_core.config.layout import Parallel
from vdpp_core.engine import checks
from vdpp_core.engine.limits import OutOfMemoryError
from vdpp_core.engine.measure import keep_freed_memory
from vdpp_core.models.images import how_it_fits
from vdpp_core.parallel.rendezvous import Ranks, agree
from vdpp_core.predict import memory
from vdpp_core.predict.schedule import run_times
from vdpp_core.runs import events, machine, processes, runfolder

PREDICTING = {"memory": predictions.show_memory, "plan": predictions.show_plan}
PEERS = "diffusers, accelerate, torch's pipelining and ours, side by side on the same samples; two a rank by default"


def main(argv: list[str] | None = None) -> None:
    command_line.speak_anywhere()
    argv = sys.argv[1:] if argv is None else argv
    arguments, ranks = _parser().parse_args(argv), Ranks.from_environment()
    try:
        if show := PREDICTING.get(arguments.command):
            show(arguments)
            return
        if arguments.command == "run":
            _each_once(arguments.folder)
            work = [partial(_execute, _prepared(folder, ranks), ranks) for folder in arguments.folder]
        elif arguments.command == "peers":
            folder, *work = _new_comparison(arguments, argv, ranks)
        else:
            folder = _new_run(arguments, argv, ranks)
            work = [partial(_execute, folder, ranks)]
    except ConfigError as error:
        if ranks.local_rank == 0:
            command_line.fail(error.as_flag())
        raise SystemExit(2) from None
    command_line.quiet()
    try:
        for part in work:
            part()
    except OutOfMemoryError as error:
        print(f"rank {ranks.rank}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    except BaseException:
        print(redacted(traceback.format_exc()), file=sys.stderr, flush=True)
        os._exit(1)  # a communicator that lost its peer may never let the interpreter end
    if ranks.rank == 0 and arguments.command != "run":
        (_show_comparison if arguments.command == "peers" else _show)(folder, as_json=arguments.json)


def _parser() -> argparse.ArgumentParser:
    parser = command_line.OneLineParser(prog="python -m vdpp_core", description=__doc__)
    commands = command_line.add_run_commands(parser)
    for name in command_line.COMMANDS:
        commands.choices[name].add_argument("--world-size", metavar="N", help="without torchrun: start so many ranks")
    predictions.add_memory(commands)
    predictions.add_plan(commands)
    comparing = commands.add_parser("peers", help=PEERS, description=PEERS)
    command_line.add_run_flags(comparing)
    comparing.add_argument("--world-size", metavar="N", help="ranks; default 2, or torchrun's")
    comparing.add_argument("--repeats", metavar="N", help="of every variant, in alternating order; default 3")
    run = commands.add_parser("run", help="execute prepared run folders one after another, under torchrun")
    run.add_argument("folder", nargs="+", type=Path)
    return parser


def _new_run(arguments: argparse.Namespace, argv: list[str], ranks: Ranks) -> Path:
    """Check everything, then make the run folder; all ranks know its place."""
    wanted, local_ranks = _wanted(arguments, ranks, alone=1)
    config = command_line.run_config(arguments, wanted)
    execution = checks.check(config, local_ranks)
    if not ranks.under_torchrun:
        runfolder.check_place(config)
    if ranks.rank == 0 and (ranks.under_torchrun or wanted == 1):  # said once, by who goes on to run
        command_line.warn([*checks.before_start(config, execution), *memory.before_start(config, execution)])
    if wanted != ranks.world_size:
        _become_torchrun(wanted, argv)
    return Path(agree(ranks, lambda: str(_created(config))))


def _created(config: RunConfig) -> Path:
    folder = runfolder.create(config)
    memory.record(folder)
    return folder


def _new_comparison(arguments: argparse.Namespace, argv: list[str], ranks: Ranks) -> tuple[Path, partial[None]]:
    """Check everything, then make the folder; and the work in it, for all ranks to do."""
    from vdpp_core.compare import peers_report  # the other commands do not need what it imports

    wanted, local_ranks = _wanted(arguments, ranks, alone=2)
    repeats = command_line.whole_number("repeats", arguments.repeats, 3)
    config = peers_report.configuration(vars(arguments), wanted, local_ranks)
    checks.check(config.for_ranks(wanted), local_ranks)
    if not ranks.under_torchrun:
        peers_report.place(config)
        _become_torchrun(wanted, argv)
    runs = peers_report.plan(peers_report.variants(config, wanted), repeats)
    folder = Path(agree(ranks, lambda: str(peers_report.prepare(config, runs))))
    return folder, partial(_compare, config.replace(output_dir=folder), runs, ranks)


def _compare(*arguments: Any) -> None:
    from vdpp_core.compare.peers import measure  # after the arguments were checked: it takes seconds to import

    measure(*arguments)


def _show_comparison(folder: Path, as_json: bool) -> None:
    from vdpp_core.compare.peers_report import shown

    print(shown(folder, as_json))


def _wanted(arguments: argparse.Namespace, ranks: Ranks, alone: int) -> tuple[int, int]:
    """How many ranks in all and on this machine; `alone`: where neither torchrun nor --world-size says so."""
    wanted = command_line.whole_number(
        "world_size", arguments.world_size, ranks.world_size if ranks.under_torchrun else alone
    )
    if ranks.under_torchrun and wanted != ranks.world_size:
        raise ConfigError("world_size", wanted, f"must be torchrun's number of ranks, {ranks.world_size}")
    return wanted, ranks.local_world_size if ranks.under_torchrun else wanted


def _each_once(folders: list[Path]) -> None:
    for folder in folders:
        if not runfolder.holds(folder, "config.json"):
            raise ConfigError("folder", folder, "must be a run folder, it has no config.json")
    names = [folder.resolve().name for folder in folders]  # by which machines with folders of their own know a run
    for name in names:
        if names.count(name) > 1:
            raise ConfigError("folder", name, "is named twice; a run folder is run once")


def _prepared(folder: Path, ranks: Ranks) -> Path:
    """A run folder that was made for so many ranks and was not run before."""
    needed = (RunConfig.read(folder).parallel or Parallel()).world_size
    if needed != ranks.world_size:
        raise ConfigError("folder", folder, f"was made for {needed} ranks, not {ranks.world_size}")
    agree(ranks, lambda: _not_run_before(folder), folder.name)
    return folder


def _not_run_before(folder: Path) -> str:
    if events.events_paths(folder) or runfolder.read_result(folder):
        raise ConfigError("folder", folder, "was run before; a run folder is run once")
    return ""


def _become_torchrun(ranks: int, argv: list[str]) -> None:
    torchrun = ["-m", "vdpp_core.parallel.loopback", f"--nproc_per_node={ranks}"]
    os.execv(sys.executable, [sys.executable, *torchrun, "-m", "vdpp_core", *argv])


def _execute(folder: Path, ranks: Ranks) -> None:
    from vdpp_core.engine import worker  # after the arguments were checked: it takes seconds to import
    from vdpp_core.runs.results import settle

    keep_freed_memory(RunConfig.read(folder).memory_limit_gib is None)
    try:
        worker.execute(folder, ranks, predict_times=run_times)
    except BaseException:
        if not processes.launcher_alive(folder):
            settle(folder, again=True, predict_times=run_times)
        raise


def _show(folder: Path, as_json: bool) -> None:
    result, config = runfolder.read_result(folder) or {}, RunConfig.read(folder)
    if as_json:
        print(json.dumps(result, indent=2))
        return
    print(f"{config.layout}, {machine.hardware_name(result['hardware'])}, {result['dtype']}, {result['backend']}")
    if config.command == "simulate":
        for line in _assignment(config):
            print(line)
    for name, value in (_summary(result) | _videos(result, config)).items():
        print(f"  {name:34} {value}")
    print(f"run folder: {folder}")
    command_line.warn(f"disturbed: {line}" for line in result.get("disturbed") or [])


def _assignment(config: RunConfig) -> list[str]:
    """The steps of each rank, in the order of execution, and counted down as the user's documents do."""
    lines = []
    layout = config.layout
    for rank in range(layout.world_size):
        replica, stage, member = layout.place(rank)
        steps, last = config.stages()[stage], config.total_steps - 1
        goal = f"to rank {layout.rank(replica, stage + 1, member)}" if stage + 1 < layout.pp else "final result"
        countdown = ", ".join(str(last - step) for step in steps)
        lines.append(f"rank {rank}, replica {replica}: steps {steps[0]}–{steps[-1]} ({countdown} to go) → {goal}")
    return lines


def _summary(result: dict[str, Any]) -> dict[str, str]:
    def seconds(name: str) -> str:
        return ", ".join(f"{value:.3f}" for value in result[name][:8]) + (" …" if len(result[name]) > 8 else "")

    rate = result["steady_state_samples_per_s"]
    return {
        "samples finished": str(result["samples_finished"]),
        "first sample after (s)": f"{result['first_sample_time_s']:.3f}",
        "latency of each sample (s)": seconds("latency_s"),
        "interval between samples (s)": seconds("interval_s") or "one sample only",
        "makespan (s)": f"{result['makespan_s']:.3f}",
        "samples per s, fill included": f"{result['samples_per_s']:.4f}",
        "samples per s, steady state": "needs two samples" if rate is None else f"{rate:.4f}",
        "utilisation per rank": ", ".join(f"{share:.0%}" for share in result["utilisation_per_rank"]),
        "peak memory per rank (GB)": ", ".join(f"{peak:.3f}" for peak in result["peak_memory_gb_per_rank"]),
        "the same, predicted (GB)": f"{(result['predicted'] or {}).get('max_peak_memory_gb', math.nan):.3f}",
    }


def _videos(result: dict[str, Any], config: RunConfig) -> dict[str, str]:
    if config.command != "generate" or config.image_path is None:
        return {}
    lines = {
        "image": how_it_fits(config.image_path, config.image_size),
        "videos": f"{result['videos_written']} × {config.shape[2]} frames, {config.fps} a second, in videos/",
        "decoding of each sample (s)": ", ".join(f"{seconds:.2f}" for seconds in result["decode_s"][:8]),
    }
    if official := result["official"]:
        note = "; diffusers decodes in fp16, this in fp32" if result["dtype"] == "float16" else ""
        lines["equal to the official pipeline"] = (
            f"latents {official['equal_latents']} of {official['samples']}, "
            f"frames {official['equal_frames']} of {official['samples']}; "
            f"largest difference {official['max_latent_difference']:.2g}, {official['max_frame_difference']} of 255"
            f"{note}"
        )
        if official["max_batch_difference"] is not None:
            lines["of a batch"] = (
                "each video is decoded alone, here and for this comparison; the official pipeline's own chunks run on "
                f"from one video into the next, which changes frames by up to {official['max_batch_difference']} of 255"
            )
    return lines


if __name__ == "__main__":
    main()
