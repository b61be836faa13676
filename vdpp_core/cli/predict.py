"""memory and plan: predictions, which start nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd

from vdpp_core.cli import arguments, progress_bar
from vdpp_core.cli.arguments import N, RunFlags, Switch, X, number, shown
from vdpp_core.cli.words import counted, wrapped
from vdpp_core.config import RunConfig
from vdpp_core.config.axes import AXIS_NAMES
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.execution import resolve
from vdpp_core.config.family import OF_OTHERS, SVD, pipeline_class
from vdpp_core.config.fields import CONFIGURATIONS
from vdpp_core.config.run_config import COMMAND_DEFAULTS
from vdpp_core.engine import preflight
from vdpp_core.models import checkpoint
from vdpp_core.parallel.devices import GIB
from vdpp_core.predict import accuracy, memory, messages, planner, published, rates, schedule
from vdpp_core.predict.rates import Link, Loading, Rates
from vdpp_core.predict.replay import PARTS
from vdpp_core.runs import runfolder
from vdpp_core.runs.run import Run

COLUMNS = {
    "place": "",
    "layout": "layout",
    "guidance": "guidance",
    "latency_s": "latency (s)",
    "response_s": "from arrival (s)",
    "longest_interval_s": "longest wait (s)",
    "makespan_s": "makespan (s)",
    "time_to_first_video_s": "first video (s)",
    "utilisation": "utilisation",
    "needed_gib": "needed (GiB)",
}
OF_LAYOUTS = ("stage_ranks", "stage_weights", "fsdp", "fsdp_same_sample", "swap", "swap_batch", "swap_gb_per_s")
FAR = 10  # a step with this many times more or fewer operations is too far from a published row
RECENT = 20  # runs beside the calibrated one that predictions are checked against
PUBLISHED = "published"
GOALS = "; ".join(f"{goal}: {wanted}" for goal, wanted in planner.WANTED.items())
LINK_NOT_MEASURED = (
    "the link between ranks was not measured, so exchanges and hand-offs count as free: "
    "run notebook 00_setup or launch.probe(), or give --link-gb-per-s"
)


@dataclass(frozen=True)
class Memory:
    """Predict the peak memory of a rank, without a GPU, weights or a run."""

    run: RunFlags
    world_size: Annotated[str, N] = "1"  # number of ranks
    capacity_gib: Annotated[str | None, X] = None  # memory of a device in GiB: does the run fit, and if not, what would

    def __call__(self, *_: Any) -> None:
        config = _predicted(self.run, arguments.whole_number("world_size", self.world_size))
        capacity_gib = number("capacity_gib", self.capacity_gib)
        arguments.quiet()
        with progress_bar.working("counting what a step allocates"):
            whole = memory.left_whole(config)
            facts = memory.report(config, memory.device_gib(config, capacity_gib))
            handed = messages.of(config)
        facts |= {"solver": handed.solver, "handoff_latents_bytes": handed.latents}
        facts["handoff_bytes"] = messages.largest(config)
        if self.run.get("json"):
            print(json.dumps(facts, indent=2))
            return
        for line in [*_parts(facts, config), *(f"  {line}" for line in whole)]:
            print(line)
        if "fits" in facts:
            for line in _verdict(facts, config):
                print(*wrapped(line, indent=4, first=2), sep="\n")


def _parts(facts: dict[str, Any], config: RunConfig) -> list[str]:
    """The parts of the peak; all in GB."""
    chunked = ", chunked feed-forward" * config.chunked
    mode = f", {'sequential' if config.sequential else 'batched'} guidance{chunked}" if config.is_svd else ""
    lines = [f"{config.layout}, {_what(config)}{mode}"]
    lines += [f"  {part:14} {facts[f'{part}_gb']:9.3f} GB" for part in PARTS]
    as_ready = config.decode == "as-ready" and config.is_svd
    whose = "on the last stage" if as_ready else "per rank"
    lines.append(f"  {'peak':14} {facts['peak_gb']:9.3f} GB {whose}")
    lines.append(f"  {'peak in':14} {facts['peak_layer']}")
    if count := facts["communicators"]:
        each = f"{facts['communicator_gib'] * GIB / 1e9:.3g} GB each, {facts['communicator_source']}"
        lines.append(f"  {'communicators':14} {facts['communicators_gb']:9.3f} GB in addition: {count} of NCCL, {each}")
    if config.layout.shards > 1:
        lines.append(f"  largest gathered group: {facts['largest_unit']}, {facts['largest_unit_gb']:.3f} GB")
    at_once = f"{counted(config.decode_chunk_size, 'frame')} at a time"
    if as_ready:
        lines.append(f"  it decodes between its samples, {at_once}, beside the UNet")
        lines.append(f"  other stages, which decode nothing: {facts['other_stages_peak_gb']:.3f} GB")
    elif decoding := facts["decoding_peak_gb"]:
        lines.append(f"  decoding a sample, {at_once}: {decoding:.3f} GB")
    elif not config.is_svd:
        lines.append(f"  decoding is not predicted for {config.pipeline_class}")
    if config.experts is not None and config.layout.pp > 1:
        for stage, (steps, peak) in enumerate(zip(config.stages(), facts["peak_gb_per_stage"], strict=True)):
            names = " and ".join(config.experts_of(stage) or ())
            lines.append(f"  stage {stage}, {counted(len(steps), 'step')} of {names}: {peak:.3f} GB")
    if config.layout.pp > 1 or not config.is_svd:
        lines.append(f"  {_handoff(facts)}")
    return lines


def _handoff(facts: dict[str, Any]) -> str:
    latents, size = facts["handoff_latents_bytes"], facts["handoff_bytes"]
    more = f" and {(size - latents) / 1e6:.4g} MB that {facts['solver']} needs" if size > latents else ""
    return f"a hand-off between stages: {latents / 1e6:.4g} MB of latents{more}"


def _what(config: RunConfig) -> str:
    return f"latents {config.size_text}, {resolve(config).dtype_name}"


def _verdict(facts: dict[str, Any], config: RunConfig) -> list[str]:
    """Whether the steps and the decoding fit, in one line; then what would help. With --decode they are one run."""
    chunk, generates = config.decode_chunk_size, config.command == "generate"
    smaller = facts["decode_chunk_size_that_fits"] if facts["decoding_peak_gb"] else chunk
    subject, needs = "the steps", "need"
    if generates:
        subject, needs = "the last stage" if config.decode == "as-ready" else "a rank", "needs"
    device = f"{facts['capacity_gib'] * GIB / 1e9:.2f} GB ({facts['capacity_gib']:g} GiB)"
    decoding = f"decoding {counted(chunk, 'frame')} at a time"
    steps = f"{subject} {needs} {facts['needed_gib'] * GIB / 1e9:.2f} GB, allowances included"
    if generates or smaller == chunk:
        lines = [f"{'fits' if facts['fits'] else 'does not fit'} in {device}: {steps}"]
    elif facts["fits"] and smaller:
        lines = [f"fits in {device} with --decode-chunk-size {smaller}: {steps}; {decoding} needs more than there is"]
    elif facts["fits"]:
        lines = [f"does not fit in {device}: {steps}, but decoding even 1 frame at a time needs more than there is"]
    else:
        lines = [f"does not fit in {device}: {steps}, and {decoding} needs more than there is"]
    lines += [f"{subject} would fit with {remedy}" for remedy in facts["remedies"]]
    if not facts["fits"] and not facts["remedies"]:
        lines.append(f"no single change would make {subject} fit")
    if smaller != chunk and not facts["fits"]:
        lines.append(f"decoding would fit with --decode-chunk-size {smaller}" if smaller else "decoding would not fit")
    return lines


@dataclass(frozen=True)
class Plan:
    """Rank the layouts that fit, each with its predicted time and memory and a reason; say why others are excluded."""

    run: RunFlags
    gpus: Annotated[str, N]  # use at most this many GPUs
    capacity_gib: Annotated[str | None, X] = None  # memory of each GPU in GiB; default: enough for everything
    goal: Annotated[str, shown("|".join(planner.GOALS), GOALS, "latency")] = "latency"
    calibrate: Annotated[tuple[str, ...], shown("RUN [RUN ...]|published")] = (PUBLISHED,)  # speeds: runs, or an A5000
    tflops: Annotated[str | None, X] = None  # 1e12 operations per second of a rank, instead of --calibrate
    link_gb_per_s: Annotated[str | None, X] = None  # 1e9 bytes per second between ranks
    link_us: Annotated[str | None, X] = None  # microseconds per message between ranks; with --link-gb-per-s
    host_gb_per_s: Annotated[str | None, X] = None  # 1e9 bytes per second at which an expert comes from host memory
    disk_gb_per_s: Annotated[str | None, X] = None  # the same from disk
    every_s: Annotated[str | None, X] = None  # seconds between arrivals of samples; default: all arrive at the start
    poisson: Switch = False  # random arrivals with that mean; uses --seed
    top: Annotated[str, N] = "10"  # layouts to print; --json has all

    def __call__(self, *_: Any) -> None:
        for axis in (*AXIS_NAMES, *OF_LAYOUTS):
            if given := self.run.get(axis):
                raise ConfigError(axis, given, "not in a plan, which looks for the layout")
        if (split := self.run.get("split")) not in (None, "even"):
            raise ConfigError("split", split, "must be even; without it, a plan splits at the boundary between experts")
        gpus = arguments.whole_number("gpus", self.gpus, most=planner.MOST_GPUS)
        top = arguments.whole_number("top", self.top)
        capacity_gib = number("capacity_gib", self.capacity_gib)
        loading = self._loading()
        folders = [] if self.calibrate == (PUBLISHED,) else [_run_folder(name) for name in self.calibrate]
        config = self._config(folders)
        if loading and config.experts is None:
            name = f"{next(iter(loading))}_gb_per_s"
            raise ConfigError(name, getattr(self, name), "only for a model with experts, which can be swapped")
        arrivals = self._arrivals(config)
        arguments.quiet()
        with progress_bar.working("counting what a step computes"):
            planner.check(config, gpus, self.goal, capacity_gib)
            known = self._rates(config, folders)
        known = replace(known, swap={**known.swap, **loading})
        modes = (self.run["guidance_mode"],) if "guidance_mode" in self.run else planner.MODES
        table = planner.advise(config, gpus, self.goal, known, capacity_gib, modes, arrivals=arrivals)
        if self.run.get("json"):
            layouts = json.loads(table.to_json(orient="records", force_ascii=False))
            print(json.dumps({**table.attrs, "layouts": layouts}, indent=2, ensure_ascii=False))
            return
        if gpus > 1 and math.isinf(known.link.bytes_per_s):
            arguments.warn([LINK_NOT_MEASURED])
        count = f"{counted(config.num_samples, 'sample')} of {counted(config.total_steps, 'step')}"
        wanted = planner.WANTED[self.goal]
        if self.goal == "latency" and table.attrs["one_by_one"]:
            wanted = "the shortest time from a video's arrival to its last step"
        gpu_count = f"up to {gpus} GPUs" if gpus > 1 else "1 GPU"
        head = f"{count}, {_what(config)}, on {gpu_count}; goal {self.goal}: {wanted}"
        for line in (head, f"predicted from {known}"):
            print(*wrapped(line, first=0), sep="\n")
        print(table.attrs["decoding"] + " (--decode includes it)" * ("decode" not in self.run))
        _print_plan(table, top)
        if "experts" in table.attrs:
            _print_rivals(planner.rivals(table), self.goal, table.attrs["experts"])

    def _config(self, folders: Sequence[Path]) -> RunConfig:
        """What is planned, by default for the device that rates are known of."""
        if not folders:
            config = _predicted(self.run, 1)
            if self.tflops is None and resolve(config).device_type != "cuda":
                allowed = "needs --calibrate RUN or --tflops: the published speeds are those of GPUs"
                raise ConfigError("device", config.device, allowed)
            return config
        if self.tflops is not None:
            raise ConfigError("tflops", self.tflops, "not with --calibrate, which measures it")
        return _predicted(self.run, 1, str(rates.finished(folders[0])[1]["device"]).partition(":")[0])

    def _rates(self, config: RunConfig, folders: Sequence[Path]) -> Rates:
        """Speeds as given, of runs, or of a published row."""
        tflops, link = number("tflops", self.tflops), self._link()
        if tflops is not None:
            return Rates(tflops * 1e12, link or published.link())
        if not folders:
            row = published.nearest_row(config)
            if not 1 / FAR < (times := published.times_operations(config, row)) < FAR:
                more = f"a step has {times:.2g} times the operations of the published row"
                arguments.warn([f"{more}: calibrate on a run of your own (--calibrate RUN)"])
            known = published.rates(row, link)
            return known.checked(accuracy.against_published(known))
        known, ran = rates.from_run(folders, link), Run(folders[0]).config
        planned = (config.source or config.model, resolve(config).device_type, resolve(config).dtype)
        if planned != (ran.source or ran.model, resolve(ran).device_type, resolve(ran).dtype):
            arguments.warn([f"measured with {known.setting}, but another model, device or dtype is planned"])
        beside = sorted(path.parent for path in folders[0].parent.glob("*/result.json"))[-RECENT:]
        return known.checked(accuracy.against_runs(beside, known))

    def _loading(self) -> dict[str, Loading]:
        """How fast experts are loaded, where that is given."""
        loading = {}
        for swap in planner.SWAPS:
            name = f"{swap}_gb_per_s"
            if (value := number(name, getattr(self, name))) is None:
                continue
            if value < 1e-9:
                raise ConfigError(name, value, "must be at least 1e-9")
            loading[swap] = Loading(value * 1e9)
        return loading

    def _link(self) -> Link | None:
        gb_per_s, link_us = number("link_gb_per_s", self.link_gb_per_s), number("link_us", self.link_us)
        if gb_per_s is not None:
            return Link(gb_per_s * 1e9, (link_us or 0.0) / 1e6, f"{gb_per_s:g} GB/s, given")
        if link_us is not None:
            raise ConfigError("link_us", link_us, "only with --link-gb-per-s")
        return None

    def _arrivals(self, config: RunConfig) -> Any:
        every_s = number("every_s", self.every_s)
        if every_s is None:
            if self.poisson:
                raise ConfigError("poisson", True, "only with --every-s")
            return np.zeros(config.num_samples)
        if self.poisson:
            return schedule.poisson(config.num_samples, every_s, config.seed)
        return schedule.periodic(config.num_samples, every_s)


def _predicted(flags: RunFlags, ranks: int, device: str = "cuda") -> RunConfig:
    """What is predicted: on a GPU unless --device says otherwise, with a model whose weights need not be here."""
    packaged = None if "model_id" in flags else CONFIGURATIONS.get(flags.get("model", ""))
    is_svd = pipeline_class(packaged or flags.get("model_id"), bool(flags.keys() & set(OF_OTHERS))) == SVD
    if "image" in flags and is_svd:
        raise ConfigError("image", flags["image"], "not in a prediction, which is the same for all images")
    weights = {"random_weights": True} if packaged or (is_svd and flags.get("model") != "dummy") else {}
    given = {name: value for name, value in flags.items() if name not in ("random_weights", "decode")}
    if "decode" in flags:
        given = COMMAND_DEFAULTS["generate"] | given
    config = arguments.run_config({"device": device, **given, **weights}, ranks, "world_size", ranks > 1)
    if is_svd:
        execution = resolve(config)
        checkpoint.check_guidance(config, execution)
        checkpoint.check_model(config, execution)
    else:
        from vdpp_core.models import pipelines  # takes seconds to import

        config = pipelines.prompted(config)
    arguments.quiet()
    config = preflight.complete(config, ranks)
    if "decode" not in flags:
        return config
    return config.replace(command="generate", decode=flags["decode"], random_weights=bool(packaged))


def _run_folder(name: str) -> Path:
    for folder in (Path(name), runfolder.runs_root() / name):
        if runfolder.holds(folder, "config.json"):
            return folder.resolve()
    raise ConfigError("calibrate", name, "must be published, or a run's id or folder")


def _print_plan(table: pd.DataFrame, top: int) -> None:
    fitting, rest = table[table["place"].notna()], table[table["place"].isna()]
    if len(fitting):
        known = {"response_s": table.attrs["one_by_one"]}
        known["time_to_first_video_s"] = fitting["time_to_first_video_s"].notna().any()
        columns = [name for name in COLUMNS if known.get(name, True)]
        shown = fitting.head(top)[columns].rename(columns=COLUMNS)
        lines = shown.to_string(index=False, na_rep="–", float_format="{:.4g}".format, line_width=400).splitlines()
        for line, reason in zip(lines, ["", *fitting.head(top)["reason"]], strict=True):
            print(line, *wrapped(reason), sep="\n")
        if (more := len(fitting) - top) > 0:
            print(f"and {more} more that fit{'s' * (more == 1)} (--top)")
    else:
        print(f"no layout fits; the smallest needs {rest['needed_gib'].min():.4g} GiB per GPU")
    for reason in rest["reason"].unique():
        layouts = ", ".join(rest["layout"][rest["reason"] == reason])
        print(*wrapped(f"excluded: {layouts}: {reason}", first=0), sep="\n")


def _print_rivals(rivals: pd.DataFrame, goal: str, experts: dict[str, int]) -> None:
    """The best of each way to hold a model's experts, against the best of all."""
    column = planner.GOALS[goal][0]
    value, unit = COLUMNS[column].partition(" (")[0], "GiB" if column.endswith("_gib") else "s"
    steps = ", ".join(f"{counted(count, 'step')} of {name}" for name, count in experts.items())
    print(f"the model has experts ({steps}); the best of each way to hold them:")
    for row in rivals.to_dict("records"):
        if math.isnan(row["needed_gib"]):
            print(*wrapped(f"{row['way']}: excluded: {row['reason']}", first=2), sep="\n")
            continue
        if math.isnan(row["value"]):
            smallest = f"fits nowhere; the smallest, {row['layout']}, {row['reason']}"
            print(*wrapped(f"{row['way']}: {smallest}", first=2), sep="\n")
            continue
        best = "the best" if row["times_best"] == 1 else f"{row['times_best']:.3f} times the best"
        found = f"{row['layout']}, {value} {row['value']:.4g} {unit}, {best}: {row['reason']}"
        print(*wrapped(f"{row['way']}: {found}", first=2), sep="\n")
        if row["break_even_s"] > row["swap_s"]:
            print(
                f"    the step pipeline would be faster if loading an expert took more than {row['break_even_s']:.3g} s"
            )
