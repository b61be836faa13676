"""Seconds from costs: what ranks compute in a second, what a link carries, and from which measurement that is known."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.execution import resolve
from vdpp_core.config.layout import Parallel
from vdpp_core.models import checkpoint
from vdpp_core.predict import costs, schedule
from vdpp_core.predict.costs import Cost
from vdpp_core.predict.published import PUBLISHED_STEPS, memory_config, memory_rows
from vdpp_core.predict.schedule import Schedule, Seconds
from vdpp_core.runs import disturbed, files, machine, other_runs, results, runfolder
from vdpp_core.runs.events import Event
from vdpp_core.runs.metrics import Array, others_at_work

ALONE = (1, 2, 3)  # published rows of one card: any of them can be the one to calibrate on
HICCUP = 3  # times the median of a rank's steps
TOLD_APART = 0.5  # ranks more or less at work: from there on their effect can be seen
WAITING = 5  # FSDP at 25 × 72 × 128 waited for its parameters, so the link carried at least that


@dataclass(frozen=True)
class Link:
    """What a rank sends to another: `latency_s` for every message, then so many bytes a second.

    on: the published row that it is known from.

    Raises:
        ConfigError: it carries nothing, or in less than no time.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    source: str = "given"
    on: int | None = None

    def __post_init__(self) -> None:
        _numbers(bytes_per_s=self.bytes_per_s, latency_s=self.latency_s)
        if not self.bytes_per_s >= 1:
            allowed = "must be at least 1e-9: hand-offs would never arrive"
            raise ConfigError("link_gb_per_s", self.bytes_per_s / 1e9, allowed)
        if not 0 <= self.latency_s <= 1e3:
            raise ConfigError("link_us", self.latency_s * 1e6, "must be from 0 to 1e9 microseconds")

    def seconds(self, size: float, messages: int = 1) -> float:
        """For so many bytes in so many messages."""
        return messages * self.latency_s + size / self.bytes_per_s


@dataclass(frozen=True)
class Rates:
    """What a rank computes in a second, and its link to others.

    on: the published row or the run that it is known from; setting: the device, type and threads of that run.
    cores: that all ranks of this machine share, in threads of a rank; None where each rank has a device of its own.
    slowdown: by which share a step takes longer for every other rank that is at work (cores share caches and clock).
    error: least and greatest relative error of what this foretells, where a measurement exists.

    Raises:
        ConfigError: nothing is computed in a second, or more than could be.
    """

    flops_per_s: float
    link: Link
    source: str = "given"
    on: int | str | None = None
    setting: str = ""
    cores: float | None = None
    slowdown: float = 0.0
    error: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        _numbers(flops_per_s=self.flops_per_s, slowdown=self.slowdown, cores=1 if self.cores is None else self.cores)
        if not isinstance(self.link, Link):
            raise ConfigError("link", self.link, "must be a Link")
        if not 1e3 <= self.flops_per_s <= 1e21:
            raise ConfigError("tflops", self.flops_per_s / 1e12, "must be from 1e-9 to 1e9")
        if self.cores is not None and not self.cores > 0:
            raise ConfigError("cores", self.cores, "must be above 0")
        if not 0 <= self.slowdown < math.inf:
            raise ConfigError("slowdown", self.slowdown, "must be finite and not negative")

    def __str__(self) -> str:
        known = "not checked against a measurement"
        if self.error is not None:
            known = f"others foretold from it are {self.error[0]:+.1%} to {self.error[1]:+.1%} off"
        return f"{self.flops_per_s / 1e12:.4g} TFLOP/s ({self.source}; {known}); link: {self.link.source}"

    def checked(self, table: pd.DataFrame) -> Rates:
        """The same with the errors of a table of `vdpp_core.predict.accuracy`."""
        errors = table.loc[~table["calibrated on"], "error"].dropna()
        return replace(self, error=(float(errors.min()), float(errors.max())) if len(errors) else None)


def _numbers(**values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, int | float) or (abs(value) > sys.float_info.max and value != math.inf):
            raise ConfigError(name, value, "must be a number")


def seconds(cost: Cost, rates: Rates) -> float:
    """Of a step of the slowest rank: what the lockstep group exchanges, and beside that the longer of computing and
    gathering parameters. Pessimistic where exchanges overlap, optimistic where ranks wait for each other."""
    computing, gathering = cost.flops / rates.flops_per_s, rates.link.seconds(cost.gathered, cost.gathers)
    return rates.link.seconds(sum(cost.sent.values()), cost.exchanges) + max(computing, gathering)


def step_s(config: RunConfig, rates: Rates) -> float:
    """Seconds of a step of a run."""
    return seconds(costs.cost(config), shared(config, rates))


def shared(config: RunConfig, rates: Rates) -> Rates:
    """What is left of the rates for each rank where there are more of them at work at once than cores."""
    if rates.cores is None:
        return rates
    layout = config.parallel or Parallel()
    at_once = layout.lockstep * min(layout.dp * layout.pp, config.num_samples)
    if config.fsdp_same_sample:
        at_once = layout.world_size
    return replace(rates, flops_per_s=rates.flops_per_s * min(1.0, rates.cores / at_once))


def hop_s(config: RunConfig, rates: Rates) -> float:
    """Seconds in which the latents of a sample go from stage to stage."""
    return rates.link.seconds(math.prod(config.shape) * resolve(config).element_size)


def predict(config: RunConfig, rates: Rates, arrivals: ArrayLike = 0.0) -> Schedule:
    """The schedule of a run on ranks that are all alike."""
    config = config.replace(parallel=config.parallel or Parallel())
    return foretold(config, costs.cost(config), rates, arrivals)


def foretold(config: RunConfig, cost: Cost, rates: Rates, arrivals: ArrayLike = 0.0) -> Schedule:
    """The same where the cost of a step is known."""
    step = Seconds(seconds(cost, shared(config, rates)), hop=hop_s(config, rates))
    planned = schedule.predict(config, step, arrivals)
    if rates.slowdown and rates.cores and config.layout.world_size > 1:
        spans = planned.spans()
        busy = np.array([span.busy for span in spans])
        others = min(float((others_at_work(spans) * busy).sum() / busy.sum()), rates.cores - 1)
        slower = replace(rates, flops_per_s=rates.flops_per_s / (1 + rates.slowdown * others))
        step = Seconds(seconds(cost, shared(config, slower)), hop=step.hop)
        planned = schedule.predict(config, step, arrivals)
    return planned


def from_run(folder: Path, link: Link | None = None, though_disturbed: bool = False) -> Rates:
    """What the ranks of a finished run computed in a second, what lies between their steps included, hiccups left out.

    On a CPU the steps of ranks that were alone for a while tell, too, by how much others slow them down. Where ranks of
    other runs were at work beside it, the source says so: that is how fast the machine is in their company.

    Args:
        though_disturbed: take a disturbed run, too, and let the source say what disturbed it.

    Raises:
        ConfigError: it did not finish or was disturbed, its ranks waited for each other within a step, or its model is
            gone.
    """
    config, result = finished(folder, though_disturbed)
    if not is_plain(config.layout):
        raise ConfigError("calibrate", folder, f"must be without cfg, frames and fsdp, not {config.layout}")
    checkpoint.check_model(config, resolve(config))
    on_cpu = result["device"] == "cpu"
    events = runfolder.read_events(folder)
    spans = results.measured_spans(events)
    if len(spans) != config.num_samples * config.layout.pp:
        raise ConfigError("calibrate", folder, "must have the events of all of its samples")
    cores = result["hardware"]["cores"] / result["threads_per_rank"][0] if on_cpu else None
    steady = _without_hiccups(events, crowd=1.0 if cores is None else max(1.0, config.layout.world_size / cores))
    sizes = np.array([len(steady[span.rank, span.sample]) for span in spans])
    each = np.array([fmean(steady[span.rank, span.sample] or [0.0]) for span in spans])
    step, slowdown = _step_alone(others_at_work(spans), each, sizes) if on_cpu else (_mean_step(each, sizes), 0.0)
    others, reason = result.get("other_ranks_at_work"), disturbed.unfit(result)
    company = f" beside {other_runs.ranks_of_other_runs(others)}" if others else ""
    return Rates(
        costs.cost(config).flops / step,
        link or measured_link("cpu" if on_cpu else "cuda"),
        f"measured: run {folder.name}{company}" + (f", which was disturbed: {reason}" if reason else ""),
        on=folder.name,
        setting=setting_of(config, result),
        cores=cores,
        slowdown=slowdown,
    )


def _without_hiccups(events: Sequence[Event], crowd: float) -> dict[tuple[int, int], list[float]]:
    """(rank, sample) -> seconds of its steps, from the end of one to the end of the next, without those far above the
    rank's median. Of the others the mean says what a run takes; a median alone was 20 % off where steps vary.

    Args:
        crowd: how often as long a step may take while all ranks are at work.
    """
    seconds = {
        place: [steps[0]["seconds"], *(after["t"] - before["t"] for before, after in itertools.pairwise(steps))]
        for place, steps in results.measured_steps(events).items()
    }
    most: dict[int, float] = {}
    for rank in {rank for rank, _ in seconds}:
        own = itertools.chain.from_iterable(each for (other, _), each in seconds.items() if other == rank)
        most[rank] = HICCUP * crowd * median(own)
    return {place: [each for each in own if each <= most[place[0]]] for place, own in seconds.items()}


def finished(folder: Path, though_disturbed: bool = False) -> tuple[RunConfig, dict[str, Any]]:
    """Configuration and result of a run that finished.

    Raises:
        ConfigError: it did not, it was disturbed, or what is left of it is damaged.
    """
    if not isinstance(folder, Path):
        raise ConfigError("calibrate", folder, "must be the Path of a run folder")
    try:
        config, result = RunConfig.read(folder), runfolder.read_result(folder)
        if result is None or result["outcome"] != "ok":
            raise ConfigError("calibrate", folder, "must be a run that finished")
        if result.get("resumed"):
            raise ConfigError("calibrate", folder, "was resumed: its times are those of its last attempt alone")
        if (reason := disturbed.unfit(result)) and not though_disturbed:
            raise ConfigError("calibrate", folder, f"was disturbed: {reason}; take another run, or run it again")
        told = result["parallel"], result["num_samples"], result["total_steps"]
        whole = told == (config.layout.model_dump(), config.num_samples, config.total_steps)
        if not whole or result["hardware"]["cores"] < 1 or min(result["threads_per_rank"]) < 1:
            raise ValueError("its files contradict each other")
        setting_of(config, result)
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
        words = error.allowed if isinstance(error, ConfigError) else f"must be a whole run folder ({error!r})"
        raise ConfigError("calibrate", folder, words) from None
    return config, result


def _mean_step(each: Array, sizes: Array) -> float:
    return float(np.average(each, weights=sizes))


def _step_alone(others: Array, each: Array, sizes: Array) -> tuple[float, float]:
    """Seconds of a step of a rank that is alone, and by which share each other one lengthens it: a straight line
    through what was seen. Where all had the same company, the mean, and nothing of others.

    Args:
        others: (spans,) ranks at work beside each span.
        each: (spans,) seconds of a step, on average.
        sizes: (spans,) how many steps that was.
    """
    if np.ptp(others) < TOLD_APART:
        return _mean_step(each, sizes), 0.0
    slope, alone = np.polyfit(others, each, 1, w=np.sqrt(sizes))
    return (float(alone), float(slope / alone)) if slope > 0 else (_mean_step(each, sizes), 0.0)


def published(row: int, link: Link | None = None) -> Rates:
    """Of an RTX A5000, from one row of the published memory experiment; by default with the link that row 5 implies.

    Raises:
        ConfigError: no such row of one card that finished.
    """
    if row not in ALONE:
        raise ConfigError("row", row, f"must be a published run of one card that finished: {ALONE}")
    found = memory_rows()[row]
    step = found["first_sample_time_s"] / PUBLISHED_STEPS
    flops = costs.cost(memory_config(found)).flops
    return Rates(flops / step, link or published_link(), f"published: one A5000 at {_shape(found)}", on=row)


def published_link() -> Link:
    """Bytes a second of FSDP's parameters between seven A5000; the latency of a message cannot be told from it."""
    row = memory_rows()[WAITING]
    step = row["first_sample_time_s"] / PUBLISHED_STEPS
    gathered = costs.cost(memory_config(row)).gathered
    source = (
        f"{gathered / step / 1e9:.2f} GB/s, published: FSDP on seven A5000 at {_shape(row)} waited for its parameters"
    )
    return Link(gathered / step, 0.0, source, on=WAITING)


def link_path(device_type: str) -> Path:
    """Where `launch.probe` leaves what it measured between two ranks of this machine."""
    return runfolder.runs_root() / f"link-{device_type}.json"


def measured_link(device_type: str) -> Link:
    """The link that was measured last on this machine; one that takes no time where none was."""
    facts = files.read_object(link_path(device_type), "rows", "date")
    if facts is None:
        return Link(
            math.inf, 0.0, "none measured, hand-offs and exchanges count as free (notebook 00_setup measures it)"
        )
    best, least = max(row["gb_per_s"] for row in facts["rows"]), min(row["seconds"] for row in facts["rows"])
    known = f"measured between two ranks ({device_type}, {facts['date']})"
    words = f"{best:.3g} GB/s, {least * 1e6:.0f} µs a message, {known}"
    return Link(best * 1e9, least, words)


def nearest_row(config: RunConfig) -> int:
    """The published row of one card whose video is nearest in size to a run's."""
    size = math.prod(config.shape[2:])
    rows = memory_rows()
    return min(ALONE, key=lambda row: abs(math.log(size / rows[row]["frames"] / math.prod(rows[row]["latent_hw"]))))


def beyond(config: RunConfig, row: int) -> float:
    """By how much the operations of a step on one rank are more than those of a published row, or less: a factor."""
    known = costs.cost(memory_config(memory_rows()[row])).flops
    return costs.cost(config.replace(parallel=Parallel())).flops / known


def _shape(row: dict[str, Any]) -> str:
    return " × ".join(map(str, [row["frames"], *row["latent_hw"]]))


def is_plain(layout: Parallel) -> bool:
    """Whether ranks compute their steps without each other."""
    return layout.lockstep == 1 and not layout.fsdp


def setting_of(config: RunConfig, result: dict[str, Any]) -> str:
    """What has to be the same for one run to say something about another."""
    device = str(result["device"]).partition(":")[0]
    threads = "/".join(map(str, sorted(set(result["threads_per_rank"]))))
    weights = f"{config.model_id or config.model}{', shortcuts' * config.shortcuts}"
    return f"{weights} on {machine.hardware_name(result['hardware'])}, {device}, {result['dtype']}, {threads} thread(s)"
