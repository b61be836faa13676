"""Seconds from costs: what a rank computes per second, what a link carries, and which measurement says so."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from pydantic import Field

from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.execution import resolve
from vdpp_core.config.layout import Parallel
from vdpp_core.config.steps import split
from vdpp_core.models import checkpoint
from vdpp_core.predict import costs, messages, schedule
from vdpp_core.predict.checked_arguments import checked_dataclass
from vdpp_core.predict.costs import Cost
from vdpp_core.predict.schedule import Schedule, Seconds
from vdpp_core.runs import event_types as kinds
from vdpp_core.runs import files, machine, other_runs, results, runfolder
from vdpp_core.runs.event_types import Event
from vdpp_core.runs.metrics import Array, Span
from vdpp_core.runs.run import Run

HICCUP = 3  # times the median of a rank's steps
VISIBLE = 0.5  # difference in the number of busy ranks from which on their effect can be measured


@checked_dataclass
class Link:
    """The link from one rank to another.

    Attributes:
        bytes_per_s: bandwidth.
        latency_s: seconds that every message takes besides.
        source: where these are from, in words.
        on: the published row they are calibrated on.

    Raises:
        ConfigError: it carries nothing, or takes less than no time.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    source: str = "given"
    on: int | None = None

    def __post_init__(self) -> None:
        if not self.bytes_per_s >= 1:
            allowed = "must be at least 1e-9, or hand-offs would never arrive"
            raise ConfigError("link_gb_per_s", self.bytes_per_s / 1e9, allowed)
        if not 0 <= self.latency_s <= 1e3:
            raise ConfigError("link_us", self.latency_s * 1e6, "must be from 0 to 1e9 microseconds")

    def seconds(self, size: float, messages: int = 1) -> float:
        """Seconds for `size` bytes in so many messages."""
        return messages * self.latency_s + size / self.bytes_per_s


@checked_dataclass
class Loading:
    """How an expert gets onto a rank's device.

    Attributes:
        bytes_per_s: of its parameters.
        source: where this is from, in words.

    Raises:
        ConfigError: nothing is loaded in a second.
    """

    bytes_per_s: float
    source: str = "given"

    def __post_init__(self) -> None:
        if not self.bytes_per_s >= 1:
            raise ConfigError("swap_gb_per_s", self.bytes_per_s / 1e9, "must be at least 1e-9")

    def __str__(self) -> str:
        return f"{self.bytes_per_s / 1e9:.3g} GB/s, {self.source}"


ASSUMED_LOADING = {  # where an expert is loaded from -> how fast, where nothing was measured or given
    "host": Loading(25e9, "assumed: PCIe 4.0 × 16"),
    "disk": Loading(3e9, "assumed: an NVMe drive"),
}


@checked_dataclass
class Rates:
    """What a rank computes per second, and its link to other ranks.

    Attributes:
        flops_per_s: floating-point operations per second of a rank that is alone.
        swap: where from ("host", "disk") -> bytes per second of an expert's parameters that a rank loads.
        source: where the rate is from, in words.
        on: the published row or the run it is calibrated on.
        setting: model, hardware, type and threads of that run.
        cores: what all ranks of this machine share, in threads of a rank; None where each rank has its own device.
        slowdown: by which share each other busy rank lengthens a step (CPU cores share caches and clock).
        decode_s: seconds to decode one value of the latents and write its video; 0 where they are not known.
        error: least and greatest relative error of predictions made from this, where measurements exist.

    Raises:
        ConfigError: nothing is computed in a second, or more than any machine could.
    """

    flops_per_s: float
    link: Link
    source: str = "given"
    on: int | str | None = None
    setting: str = ""
    cores: Annotated[float, Field(gt=0)] | None = None
    slowdown: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    decode_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    swap: Mapping[str, Loading] = field(default_factory=lambda: dict(ASSUMED_LOADING))
    error: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not 1e3 <= self.flops_per_s <= 1e21:
            raise ConfigError("tflops", self.flops_per_s / 1e12, "must be from 1e-9 to 1e9")

    def __str__(self) -> str:
        known = "not checked against a measurement"
        if self.error is not None:
            known = f"other runs predicted from it are {self.error[0]:+.1%} to {self.error[1]:+.1%} off"
        return f"{self.flops_per_s / 1e12:.4g} TFLOP/s ({self.source}; {known}); link: {self.link.source}"

    def checked(self, table: pd.DataFrame) -> Rates:
        """The same rates with the errors of a table of `vdpp_core.predict.accuracy`."""
        errors = table.loc[~table["calibrated on"], "error"].dropna()
        return replace(self, error=(float(errors.min()), float(errors.max())) if len(errors) else None)


def seconds(cost: Cost, rates: Rates) -> float:
    """Seconds of a step of the slowest rank: the lockstep group's exchanges, and the longer of computing and gathering.

    Pessimistic where exchanges overlap with computing, optimistic where ranks wait for each other.
    """
    computing, gathering = cost.flops / rates.flops_per_s, rates.link.seconds(cost.gathered, cost.gathers)
    return rates.link.seconds(sum(cost.sent.values()), cost.exchanges) + max(computing, gathering)


def step_s(config: RunConfig, rates: Rates) -> float:
    """Seconds of a step of a run."""
    return seconds(costs.cost(config), shared(config, rates))


def shared(config: RunConfig, rates: Rates) -> Rates:
    """The rates left to each rank where more ranks are busy at once than there are cores."""
    if rates.cores is None:
        return rates
    layout = config.parallel or Parallel()
    at_once = layout.lockstep * min(layout.dp * layout.groups, config.num_samples)
    if config.fsdp_same_sample:
        at_once = layout.world_size
    return replace(rates, flops_per_s=rates.flops_per_s * min(1.0, rates.cores / at_once))


def hop_s(config: RunConfig, rates: Rates) -> float:
    """Seconds of the largest hand-off of a sample from one stage to the next."""
    return rates.link.seconds(messages.largest(config))


def swap_s(config: RunConfig, rates: Rates) -> float:
    """Seconds for an expert to take the place of another on a rank; 0 where none does."""
    if config.swap is None:
        return 0.0
    limit = math.inf if config.swap_gb_per_s is None else config.swap_gb_per_s * 1e9
    return costs.held(config) / min(rates.swap[config.swap].bytes_per_s, limit)


def decode_s(config: RunConfig, rates: Rates) -> float:
    """Seconds to decode a sample: in proportion to the size of its latents. 0 where that is not known, or not done."""
    return rates.decode_s * math.prod(config.shape) if config.command == "generate" else 0.0


def balanced(config: RunConfig, cost: Sequence[Cost], rates: Rates) -> RunConfig:
    """The run with fewer steps on a last stage that decodes between its samples, so that the busiest stage, which sets
    the interval, is as short as possible. Given stage weights are kept."""
    layout, last_busy = config.layout, decode_s(config, rates) / seconds(cost[-1], shared(config, rates))
    even = layout.pp > 1 and layout.stage_ranks is None and config.experts is None
    if config.decode != "as-ready" or not even or config.stage_weights is not None:
        return config
    sizes = [len(steps) for steps in split(config.total_steps, layout.pp, last_busy=last_busy)]
    return config if sizes == [len(steps) for steps in config.stages()] else config.replace(stage_weights=sizes)


def predict(config: RunConfig, rates: Rates, arrivals: ArrayLike = 0.0) -> Schedule:
    """Predict the schedule of a run on ranks that are all alike; a run without a layout is on one rank."""
    config = config.replace(parallel=config.parallel or Parallel())
    return predict_schedule(config, costs.per_stage(config), rates, arrivals)


def predict_schedule(config: RunConfig, cost: Sequence[Cost], rates: Rates, arrivals: ArrayLike = 0.0) -> Schedule:
    """Predict the schedule of a run whose cost of a step is known, as of `costs.per_stage`.

    Args:
        arrivals: when each sample arrives, in seconds, as of `schedule.make`.
    """
    step = Seconds(
        _per_stage(config, cost, rates),
        hop=hop_s(config, rates),
        decode=decode_s(config, rates),
        as_ready=config.decode == "as-ready",
        swap=swap_s(config, rates),
    )
    planned = schedule.predict(config, step, arrivals)
    if rates.slowdown and rates.cores and config.layout.world_size > 1:
        spans = planned.spans()
        busy = np.array([span.busy for span in spans])
        others = min(float((others_busy(spans) * busy).sum() / busy.sum()), rates.cores - 1)
        slower = replace(rates, flops_per_s=rates.flops_per_s / (1 + rates.slowdown * others))
        step = replace(step, step=_per_stage(config, cost, slower))
        planned = schedule.predict(config, step, arrivals)
    return planned


def _per_stage(config: RunConfig, cost: Sequence[Cost], rates: Rates) -> list[float]:
    left = shared(config, rates)
    return [seconds(each, left) for each in cost]


def from_run(folder: Path, link: Link | None = None, though_disturbed: bool = False) -> Rates:
    """Rates of the ranks of a finished run, including what happens between their steps, excluding hiccups.

    On a CPU, ranks that were alone for a while also show by how much others slow them down. Where ranks of other runs
    were busy on the machine, the source says so: that is its speed next to them.

    Args:
        link: by default the one measured on this machine.
        though_disturbed: use a disturbed run as well; the source says what disturbed it.

    Raises:
        ConfigError: the run did not finish or was disturbed, its ranks waited for each other within a step, or its
            model is gone.
    """
    config, result = finished(folder, though_disturbed)
    if not is_plain(config.layout):
        raise ConfigError("calibrate", folder, f"must be without cfg, frames and fsdp, not {config.layout}")
    if config.is_svd:
        checkpoint.check_model(config, resolve(config))
    on_cpu = result["device"] == "cpu"
    events = Run(folder).events()
    all_spans = results.measured_spans(events)
    spans = [span for span in all_spans if not span.beside]  # the first ones
    visits = config.layout.pp if config.swap is None else len(config.experts or ())
    if len(spans) != config.num_samples * visits:
        raise ConfigError("calibrate", folder, "must have the events of all of its samples")
    cores = result["hardware"]["cores"] / result["threads_per_rank"][0] if on_cpu else None
    steady = _without_hiccups(events, crowd=1.0 if cores is None else max(1.0, config.layout.world_size / cores))
    sizes = np.array([len(steps) for steps in steady.values()])
    each = np.array([fmean(steps or [0.0]) for steps in steady.values()])
    step, slowdown = _mean_step(each, sizes), 0.0
    if on_cpu:
        step, slowdown = _step_alone(others_busy(all_spans)[: len(spans)], each, sizes)
    others, reason = result.get("other_ranks_at_work"), unfit(result)
    company = f" beside {other_runs.ranks_of_other_runs(others)}" if others else ""
    return Rates(
        _mean_flops(config) / step,
        link or measured_link("cpu" if on_cpu else "cuda"),
        f"measured: run {folder.name}{company}" + (f", which was disturbed: {reason}" if reason else ""),
        on=folder.name,
        setting=setting_of(config, result),
        cores=cores,
        slowdown=slowdown,
        decode_s=median(result.get("decode_s") or [0.0]) / math.prod(config.shape),
        swap=ASSUMED_LOADING | _measured_loading(config, events, folder.name),
    )


def _mean_flops(config: RunConfig) -> float:
    """Operations of a step, the mean over all steps of a sample."""
    sizes = [len(steps) for steps in config.stages()]
    if config.swap is not None:
        sizes = [count for _, count in config.experts or ()]
    return float(np.average([cost.flops for cost in costs.per_stage(config)], weights=sizes))


def _measured_loading(config: RunConfig, events: Sequence[Event], name: str) -> dict[str, Loading]:
    """How fast a run that swapped its experts loaded them."""
    if config.swap is None:
        return {}
    each = [swap.size / swap.seconds for swap in kinds.of(events, kinds.Swapped)]
    return {config.swap: Loading(median(each), f"measured: run {name}")}


def _without_hiccups(events: Sequence[Event], crowd: float) -> dict[tuple[int, int, int], list[float]]:
    """(rank, sample, visit) -> seconds of its steps, from the end of one to the end of the next, without outliers.

    Steps far above the rank's median are left out. The mean of the rest predicts a run; a median alone was 20 % off
    where steps vary.

    Args:
        crowd: factor by which a step may be longer while all ranks are busy.
    """
    seconds = {
        place: [steps[0].seconds, *(after.t - before.t for before, after in itertools.pairwise(steps))]
        for place, steps in results.measured_steps(events).items()
    }
    most: dict[int, float] = {}
    for rank in {rank for rank, *_ in seconds}:
        own = itertools.chain.from_iterable(each for (other, *_), each in seconds.items() if other == rank)
        most[rank] = HICCUP * crowd * median(own)
    return {place: [each for each in own if each <= most[place[0]]] for place, own in seconds.items()}


def finished(folder: Path, though_disturbed: bool = False) -> tuple[RunConfig, dict[str, Any]]:
    """Configuration and result of a run that finished.

    Raises:
        ConfigError: it did not finish, was disturbed, or its files are damaged.
    """
    if not isinstance(folder, Path):
        raise ConfigError("calibrate", folder, "must be the Path of a run folder")
    try:
        run = Run(folder)
        config, result = run.config, run.result()
        if result is None or result["outcome"] != "ok":
            raise ConfigError("calibrate", folder, "must be a run that finished")
        if result.get("resumed"):
            raise ConfigError("calibrate", folder, "was resumed: its times are only those of its last attempt")
        if (reason := unfit(result)) and not though_disturbed:
            raise ConfigError("calibrate", folder, f"was disturbed: {reason}; take another run, or run it again")
        recorded = Parallel(**result["parallel"]), result["num_samples"], result["total_steps"]
        whole = recorded == (config.layout, config.num_samples, config.total_steps)
        if not whole or result["hardware"]["cores"] < 1 or min(result["threads_per_rank"]) < 1:
            raise ValueError("its files contradict each other")
        setting_of(config, result)
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
        words = error.allowed if isinstance(error, ConfigError) else f"must be a whole run folder ({error!r})"
        raise ConfigError("calibrate", folder, words) from None
    return config, result


def unfit(result: Mapping[str, Any]) -> str | None:
    """Why the times of a result cannot be used to predict other runs; None where they can.

    Ranks of other runs are not a reason: steps beside them take longer, and keep doing so while those are running.
    """
    lines = result.get("disturbed") or []
    return lines[0] if len(lines) > bool(result.get("other_ranks_at_work")) else None


def others_busy(spans: Sequence[Span]) -> Array:
    """(spans,) how many other ranks were busy during each span, on average. A rank has one span at a time."""
    start, end = (np.array([getattr(span, name) for span in spans]) for name in ("start", "end"))
    times = np.concatenate([start, end])
    order = np.argsort(times)
    busy = np.cumsum(np.repeat([1.0, -1.0], len(spans))[order])
    done = np.append(0.0, np.cumsum(busy[:-1] * np.diff(times[order])))  # seconds of work of all ranks until then
    until = np.empty_like(done)
    until[order] = done
    return (until[len(spans) :] - until[: len(spans)]) / (end - start) - 1


def _mean_step(each: Array, sizes: Array) -> float:
    return float(np.average(each, weights=sizes))


def _step_alone(others: Array, each: Array, sizes: Array) -> tuple[float, float]:
    """Seconds of a step of a rank that is alone, and the share by which each other busy rank lengthens it.

    A straight line fitted to the spans. Where all spans had equally many others, their mean, and a share of 0.

    Args:
        others: (spans,) other busy ranks during each span.
        each: (spans,) mean seconds of a step.
        sizes: (spans,) number of steps.
    """
    if np.ptp(others) < VISIBLE:
        return _mean_step(each, sizes), 0.0
    slope, alone = np.polyfit(others, each, 1, w=np.sqrt(sizes))
    return (float(alone), float(slope / alone)) if slope > 0 else (_mean_step(each, sizes), 0.0)


def link_path(device_type: str) -> Path:
    """The file in which `launch.probe` stores its measurement between two ranks of this machine."""
    return runfolder.runs_root() / f"link-{device_type}.json"


def measured_link(device_type: str) -> Link:
    """The link measured last on this machine; a free one where none was measured."""
    facts = files.read_object(link_path(device_type), "rows", "date")
    if facts is None:
        free = "not measured, so hand-offs and exchanges count as free (notebook 00_setup measures it)"
        return Link(math.inf, 0.0, free)
    best, least = max(row["gb_per_s"] for row in facts["rows"]), min(row["seconds"] for row in facts["rows"])
    known = f"measured between two ranks ({device_type}, {facts['date']})"
    return Link(best * 1e9, least, f"{best:.3g} GB/s, {least * 1e6:.0f} µs per message, {known}")


def is_plain(layout: Parallel) -> bool:
    """Whether every rank computes its steps alone: no cfg, frames or FSDP."""
    return layout.lockstep == 1 and not layout.fsdp


def setting_of(config: RunConfig, result: dict[str, Any]) -> str:
    """Model, hardware, type and threads in words: equal for runs that can be predicted from each other."""
    device = str(result["device"]).partition(":")[0]
    threads = machine.threads_text(result["threads_per_rank"])
    weights = f"{config.model_id or config.model}{', shortcuts' * config.shortcuts}"
    return f"{weights} on {machine.hardware_name(result['hardware'])}, {device}, {result['dtype']}, {threads}"
