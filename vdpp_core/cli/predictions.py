"""The commands that predict and start nothing: memory and plan."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from vdpp_core.cli import command_line
from vdpp_core.config import RunConfig
from vdpp_core.config.axes import AXIS_NAMES
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.execution import resolve
from vdpp_core.models import checkpoint
from vdpp_core.predict import accuracy, memory, planner, published, rates, schedule
from vdpp_core.predict.rates import Link, Rates
from vdpp_core.predict.replay import PARTS
from vdpp_core.runs import runfolder

MEMORY = "peak memory of a rank, predicted without a GPU, weights or a run"
PLAN = (
    "which layout to take: all that fit ranked, with predicted time, memory and a reason each, and why others fall out"
)
SHOWN = {
    "place": "",
    "layout": "layout",
    "guidance": "guidance",
    "latency_s": "latency (s)",
    "response_s": "from arrival (s)",
    "longest_interval_s": "longest wait (s)",
    "makespan_s": "makespan (s)",
    "utilisation": "utilisation",
    "needed_gib": "needed (GiB)",
}
FAR = 10  # times the operations of a step, or less: from there on a published row says little
RECENT = 20  # runs beside the one calibrated on that predictions are checked against


def add_memory(commands: Any) -> None:
    parser = commands.add_parser("memory", help=MEMORY, description=MEMORY)
    command_line.add_run_flags(parser)
    parser.add_argument("--world-size", metavar="N", help="ranks")
    parser.add_argument(
        "--capacity-gib", type=command_line.number("capacity_gib"), metavar="GIB", help="of a device; what would fit"
    )


def add_plan(commands: Any) -> None:
    parser = commands.add_parser("plan", help=PLAN, description=PLAN)
    command_line.add_run_flags(parser)
    parser.add_argument("--gpus", required=True, metavar="N", help=f"at most so many, 1 to {planner.MOST_GPUS}")
    _add_number(parser, "capacity-gib", "GIB", "of each; default: enough for everything")
    goals = "; ".join(f"{goal}: {wanted}" for goal, wanted in planner.WANTED.items())
    parser.add_argument("--goal", default="latency", metavar="|".join(planner.GOALS), help=goals)
    known = "a run here (its id or folder), or published: the A5000 row nearest in size (default)"
    parser.add_argument("--calibrate", default="published", metavar="RUN|published", help=known)
    parser.add_argument(
        "--tflops", type=command_line.number("tflops"), metavar="X", help="1e12 operations a second of a rank, instead"
    )
    parser.add_argument(
        "--link-gb-per-s",
        type=command_line.number("link_gb_per_s"),
        metavar="X",
        help="1e9 bytes a second between ranks, instead",
    )
    parser.add_argument(
        "--link-us",
        type=command_line.number("link_us"),
        metavar="X",
        help="latency of a message between ranks; with the above",
    )
    parser.add_argument(
        "--every-s",
        type=command_line.number("every_s"),
        metavar="S",
        help="videos arrive so far apart; default: all at once",
    )
    parser.add_argument("--poisson", action="store_true", help="and at random, with --seed")
    parser.add_argument("--top", default="10", metavar="N", help="layouts to print; --json has all")


def _add_number(parser: argparse.ArgumentParser, name: str, unit: str, purpose: str) -> None:
    parser.add_argument(f"--{name}", type=command_line.number(name), metavar=unit, help=purpose)


def config_of(arguments: argparse.Namespace, ranks: int, device: str = "cuda") -> RunConfig:
    """What is predicted: for a GPU, unless --device says otherwise, and a model whose weights need not be here."""
    if arguments.image is not None:
        raise ConfigError("image", arguments.image, "not in a prediction, which is the same for all images")
    arguments.device, arguments.command = device if arguments.device is None else arguments.device, None
    arguments.random_weights = None if arguments.model == "dummy" else True
    config = command_line.run_config(arguments, ranks)
    execution = resolve(config)
    checkpoint.check_guidance(config, execution)
    checkpoint.check_model(config, execution)
    return config


def show_memory(arguments: argparse.Namespace) -> None:
    config = config_of(arguments, command_line.whole_number("world_size", arguments.world_size, 1))
    command_line.quiet()
    facts = memory.report(config, memory.device_gib(config, arguments.capacity_gib))
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return
    mode = f"{'sequential' if config.sequential else 'batched'} guidance{', chunked feed-forward' * config.chunked}"
    print(f"{config.layout}, {_what(config)}, {mode}")
    for part in PARTS:
        print(f"  {part:14} {facts[f'{part}_gb']:9.3f} GB")
    print(f"  {'peak':14} {facts['peak_gb']:9.3f} GB a rank, in {facts['peak_layer']}")
    if number := facts["communicators"]:
        each = f"{facts['communicator_gib']:.3g} GiB each, {facts['communicator_source']}"
        print(f"  {'communicators':14} {facts['communicators_gb']:9.3f} GB beside it: {number} of NCCL's, {each}")
    if config.layout.shards > 1:
        print(f"  largest gathered group: {facts['largest_unit']}, {facts['largest_unit_gb']:.3f} GB")
    if facts["decoding_peak_gb"]:
        print(f"  decoding a sample, {config.decode_chunk_size} frames at a time: {facts['decoding_peak_gb']:.3f} GB")
    if "fits" in facts:
        _print_verdict(facts, config.decode_chunk_size)


def _what(config: RunConfig) -> str:
    batch, _, frames, rows, columns = config.shape
    latents = f"{batch} × " * (batch > 1) + f"{frames} × {rows} × {columns}"
    return f"latents {latents}, {resolve(config).dtype_name}"


def _print_verdict(facts: dict[str, Any], chunk: int) -> None:
    verdict = "fits in" if facts["fits"] else "does not fit in"
    print(
        f"  {verdict} {facts['capacity_gib']:g} GiB: the steps need {facts['needed_gib']:.2f} GiB, allowances counted"
    )
    for remedy in facts["remedies"]:
        print(f"  would fit: {remedy}")
    if not facts["fits"] and not facts["remedies"]:
        print("  no single change would make it fit")
    if facts["decoding_peak_gb"] and facts["decode_chunk_size_that_fits"] != chunk:
        smaller = facts["decode_chunk_size_that_fits"]
        print(
            f"  decoding does not fit, {f'with --decode-chunk-size {smaller} it would' if smaller else 'in any chunks'}"
        )


def show_plan(arguments: argparse.Namespace) -> None:
    for axis in (*AXIS_NAMES, "fsdp", "fsdp_same_sample"):
        if given := getattr(arguments, axis):
            raise ConfigError(axis, given, "not in a plan, which looks for the layout")
    gpus = command_line.whole_number("gpus", arguments.gpus, 1, most=planner.MOST_GPUS)
    top = command_line.whole_number("top", arguments.top, 1)
    folder = None if arguments.calibrate == "published" else _run_folder(arguments.calibrate)
    modes = (arguments.guidance_mode,) if arguments.guidance_mode else planner.MODES
    if folder is not None and arguments.tflops is not None:
        raise ConfigError("tflops", arguments.tflops, "not with calibrate, which measures it")
    measured = rates.finished(folder)[1] if folder is not None else None
    config = config_of(arguments, 1, str(measured["device"]).partition(":")[0] if measured else "cuda")
    if folder is None and arguments.tflops is None and resolve(config).device_type != "cuda":
        allowed = "needs --calibrate RUN or --tflops: what is published was measured on GPUs"
        raise ConfigError("device", config.device, allowed)
    arrivals = _arrivals(config, arguments.every_s, arguments.poisson)
    command_line.quiet()
    planner.check(config, gpus, arguments.goal, arguments.capacity_gib)
    known = _rates(arguments, config, folder)
    table = planner.advise(config, gpus, arguments.goal, known, arguments.capacity_gib, modes, arrivals=arrivals)
    if arguments.json:
        layouts = json.loads(table.to_json(orient="records", force_ascii=False))
        print(json.dumps({**table.attrs, "layouts": layouts}, indent=2, ensure_ascii=False))
        return
    count = f"{config.num_samples} sample{'s' * (config.num_samples > 1)} of {config.total_steps} steps"
    wanted = planner.WANTED[arguments.goal]
    if arguments.goal == "latency" and table.attrs["one_by_one"]:
        wanted = "the soonest from a video's arrival to its last step"
    print(f"{count}, {_what(config)}, on up to {gpus}; goal {arguments.goal}: {wanted}")
    print(f"predicted from {known}")
    _print_plan(table, top)


def _print_plan(table: pd.DataFrame, top: int) -> None:
    fitting, rest = table[table["place"].notna()], table[table["place"].isna()]
    if len(fitting):
        columns = [name for name in SHOWN if name != "response_s" or table.attrs["one_by_one"]]
        shown = fitting.head(top)[columns].rename(columns=SHOWN)
        lines = shown.to_string(index=False, na_rep="–", float_format="{:.4g}".format, line_width=400).splitlines()
        for line, reason in zip(lines, ["", *fitting.head(top)["reason"]], strict=True):
            print(f"{line}  {reason}".rstrip())
        if len(fitting) > top:
            print(f"and {len(fitting) - top} more that fit (--top)")
    else:
        print(f"no layout fits: the least that one needs are {rest['needed_gib'].min():.4g} GiB")
    for reason in rest["reason"].unique():
        print(f"falls out: {', '.join(rest['layout'][rest['reason'] == reason])}: {reason}")


def _rates(arguments: argparse.Namespace, config: RunConfig, folder: Path | None) -> Rates:
    """From a run, a published row, or as given."""
    link = None
    if arguments.link_gb_per_s is not None:
        link = Link(
            arguments.link_gb_per_s * 1e9, (arguments.link_us or 0.0) / 1e6, f"{arguments.link_gb_per_s:g} GB/s, given"
        )
    elif arguments.link_us is not None:
        raise ConfigError("link_us", arguments.link_us, "only with link_gb_per_s")
    if arguments.tflops is not None:
        return Rates(arguments.tflops * 1e12, link or published.link())
    if folder is None:
        row = published.nearest_row(config)
        if not 1 / FAR < (times := published.times_operations(config, row)) < FAR:
            command_line.warn(
                [f"a step has {times:.2g} × the operations of the published row: calibrate on a run of your own"]
            )
        known = published.rates(row, link)
        return known.checked(accuracy.against_published(known))
    known, ran = rates.from_run(folder, link), RunConfig.read(folder)
    planned, measured = resolve(config), resolve(ran)
    if (config.source or config.model, planned.device_type, planned.dtype) != (
        ran.source or ran.model,
        measured.device_type,
        measured.dtype,
    ):
        command_line.warn([f"{known.setting}: that is what was measured, and another model, device or type is planned"])
    beside = sorted(path.parent for path in folder.parent.glob("*/result.json"))[-RECENT:]
    return known.checked(accuracy.against_runs([folder, *beside], known))


def _run_folder(name: str) -> Path:
    for folder in (Path(name), runfolder.runs_root() / name):
        if runfolder.holds(folder, "config.json"):
            return folder.resolve()
    raise ConfigError("calibrate", name, "must be published, or a run's id or folder")


def _arrivals(config: RunConfig, every_s: float | None, poisson: bool) -> Any:
    if every_s is None:
        if poisson:
            raise ConfigError("poisson", True, "only with every_s")
        return np.zeros(config.num_samples)
    if poisson:
        return schedule.poisson(config.num_samples, every_s, config.seed)
    return schedule.periodic(config.num_samples, every_s)
