"""Seconds from costs: what a rank computes per second, what a link carries, and which measurement says so."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from pydantic import Field

from vdpp_core.config import RunConfig
from vdpp_core.config.axes import FSDP
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

FEW = 10  # measurements of which all are within what is said, not 9 in 10
MOST_ROUNDS, SETTLED = 12, 0.003  # of finding out how long ranks take that share cores
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
        exchange_s: lockstep axis, or "fsdp" -> seconds that an exchange of two ranks, or a gather, takes besides its
            bytes while they compute: they wake up, wait for the slower one and have smaller tensors. `latency_s` for
            those of which that is not known.

    Raises:
        ConfigError: it carries nothing, or takes less than no time.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    source: str = "given"
    on: int | None = None
    exchange_s: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.bytes_per_s >= 1:
            allowed = "must be at least 1e-9, or hand-offs would never arrive"
            raise ConfigError("link_gb_per_s", self.bytes_per_s / 1e9, allowed)
        if not 0 <= self.latency_s <= 1e3:
            raise ConfigError("link_us", self.latency_s * 1e6, "must be from 0 to 1e9 microseconds")

    def seconds(self, size: float, messages: int = 1) -> float:
        """Seconds for `size` bytes in so many messages."""
        return messages * self.latency_s + size / self.bytes_per_s

    def exchanging(self, cost: Cost) -> float:
        """Seconds for the exchanges of a step within its lockstep group."""
        meetings = sum(count * self._meeting_s(cost, axis) for axis, count in cost.exchanges_of.items())
        return meetings + sum(cost.sent.values()) / self.bytes_per_s

    def gathering(self, cost: Cost) -> float:
        """Seconds for the parameters that FSDP gathers in a step."""
        return cost.gathers * self._meeting_s(cost, FSDP.name) + cost.gathered / self.bytes_per_s

    def _meeting_s(self, cost: Cost, name: str) -> float:
        known = self.exchange_s.get(name)
        return self.latency_s if known is None else known * longest_wait(cost.ranks.get(name, 2))


def longest_wait(ranks: int) -> float:
    """How long so many ranks wait for the slowest of them, in waits of two: the expected longest of N exponential
    waits grows as 1 + 1/2 + … + 1/N."""
    return sum(1 / rank for rank in range(1, ranks + 1)) / 1.5


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
        on: the published row it is calibrated on.
        runs: folders of the runs it is calibrated on.
        setting: model, hardware, type and threads of those runs.
        cores: what all ranks of this machine share, in threads of a rank; None where each rank has its own device.
        slowdown: by which share each other busy rank lengthens a step (CPU cores share caches and clock).
        decode_s: seconds to decode one value of the latents and write its video; 0 where they are not known.
        errors: relative errors of predictions made from this, where measurements exist.

    Raises:
        ConfigError: nothing is computed in a second, or more than any machine could.
    """

    flops_per_s: float
    link: Link
    source: str = "given"
    on: int | None = None
    runs: tuple[Path, ...] = ()
    setting: str = ""
    cores: Annotated[float, Field(gt=0)] | None = None
    slowdown: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    decode_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    swap: Mapping[str, Loading] = field(default_factory=lambda: dict(ASSUMED_LOADING))
    errors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 1e3 <= self.flops_per_s <= 1e21:
            raise ConfigError("tflops", self.flops_per_s / 1e12, "must be from 1e-9 to 1e9")

    def __str__(self) -> str:
        known = how_far_off(self.errors)
        return f"{self.flops_per_s / 1e12:.4g} TFLOP/s ({self.source}; {known}); link: {self.link.source}"

    @property
    def error(self) -> tuple[float, float] | None:
        """The least and the greatest of `errors`."""
        return (min(self.errors), max(self.errors)) if self.errors else None

    def checked(self, table: pd.DataFrame) -> Rates:
        """The same rates with the errors of a table of `vdpp_core.predict.accuracy`."""
        return replace(self, errors=tuple(table.loc[~table["calibrated on"], "error"].dropna().tolist()))


def how_far_off(errors: Sequence[float]) -> str:
    """How many measurements predictions were checked against, and how far off they were, in words.

    Args:
        errors: predicted / measured - 1 of each.
    """
    if not len(errors):
        return "not checked against a measurement"
    off, checked = np.abs(np.asarray(errors)), f"checked against {len(errors)} measurement{'s' * (len(errors) > 1)}"
    if len(off) < FEW:
        return f"{checked}: at most {off.max():.1%} off"
    return f"{checked}: 9 in 10 within {np.quantile(off, 0.9):.0%}, the worst {off.max():.0%} off"


def seconds(cost: Cost, rates: Rates) -> float:
    """Seconds of a step of a rank that shares its cores with no other.

    Ranks with a device of their own compute while they gather parameters; those on a CPU gather, then compute.
    Pessimistic where exchanges overlap with computing.
    """
    computing, gathering = cost.flops / rates.flops_per_s, rates.link.gathering(cost)
    both = max(computing, gathering) if rates.cores is None else computing + gathering
    return rates.link.exchanging(cost) + both


def step_s(config: RunConfig, rates: Rates) -> float:
    """Seconds of a step of a run while as many of its ranks as ever are busy."""
    layout = config.parallel or Parallel()
    busy = layout.lockstep * min(layout.dp * layout.groups, config.num_samples)
    return seconds(costs.cost(config), rates) * float(crowding(layout.world_size if layout.fsdp else busy, rates))


def crowding(busy: ArrayLike, rates: Rates) -> Array:
    """By which factor a step is longer while so many ranks are busy on this machine: they slow each other down, and
    share the cores where they are more than those. That goes for exchanges, too, which are work of the CPU."""
    if rates.cores is None:
        return np.ones(np.shape(busy))
    count, cores = np.maximum(1.0, busy), max(1.0, rates.cores)
    return np.maximum(1.0, count / cores) * (1 + rates.slowdown * (np.minimum(count, cores) - 1))


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
    layout, last_busy = config.layout, decode_s(config, rates) / seconds(cost[-1], rates)
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
        [seconds(each, rates) for each in cost],
        hop=hop_s(config, rates),
        decode=decode_s(config, rates),
        as_ready=config.decode == "as-ready",
        swap=swap_s(config, rates),
    )
    planned = schedule.predict(config, step, arrivals)
    if rates.cores is None or config.layout.world_size == 1:
        return planned
    stretch = np.ones(planned.started.shape)
    for _ in range(MOST_ROUNDS):
        before, stretch = stretch, _stretch(config, planned, rates)
        planned = schedule.predict(config, step, arrivals, stretch)
        if np.abs(stretch / before - 1).max() < SETTLED:
            break
    return planned


def _stretch(config: RunConfig, planned: Schedule, rates: Rates) -> Array:
    """By how much the ranks that are busy in a schedule lengthen each of its samples' steps, as of `schedule.make`."""
    layout, exists = config.layout, np.isfinite(planned.started)
    members = np.full(exists.shape, float(layout.lockstep))
    if layout.fsdp:  # replicas without a sample compute as well
        members *= layout.dp / np.maximum(1, exists.sum(axis=1, keepdims=True))
    start, end = planned.started[exists], (planned.started + planned.occupied)[exists]
    speed = _mean_while(start, end, members[exists], lambda busy: 1 / crowding(busy, rates))
    found = np.ones(exists.shape)
    found[exists] = 1 / speed
    return found


def _mean_while(start: Array, end: Array, members: ArrayLike, of: Callable[[Array], Array]) -> Array:
    """(spans,) the mean of something during each span that depends on how many ranks are busy in any span.

    Args:
        start, end: (spans,) in seconds.
        members: how many ranks have each span.
        of: number of busy ranks -> the thing.
    """
    times = np.concatenate([start, end])
    order = np.argsort(times)
    changes = np.broadcast_to(members, start.shape)
    busy = np.cumsum(np.concatenate([changes, -changes])[order])
    done = np.append(0.0, np.cumsum(of(busy[:-1]) * np.diff(times[order])))
    until = np.empty_like(done)
    until[order] = done
    return (until[len(start) :] - until[: len(start)]) / (end - start)


def from_run(folder: Path | Sequence[Path], link: Link | None = None, though_disturbed: bool = False) -> Rates:
    """Rates of the ranks of finished runs in one setting, including what happens between steps, excluding hiccups.

    Runs without cfg, frames, tp and FSDP give the speed of computing and, on a CPU, by how much busy ranks slow each
    other down, where some were alone for a while. The others give what an exchange or a gather takes between ranks that
    compute, on their axes. Where ranks of other runs were busy on the machine, the source says so: that is its speed
    next to them.

    Args:
        folder: of a run, or of several.
        link: by default the one measured on this machine, with the exchanges and gathers of the runs. A given one stays
            as it is.
        though_disturbed: use disturbed runs as well; the source says what disturbed them.

    Raises:
        ConfigError: a run did not finish or was disturbed, its model is gone, it is in another setting than the first,
            or none of the runs is without cfg, frames, tp and FSDP.
    """
    folders: Any = folder if isinstance(folder, list | tuple) and folder else [folder]
    ended = [(each, *finished(each, though_disturbed)) for each in folders]
    if not any(is_plain(config.layout) for _, config, _ in ended):
        allowed = f"must be without cfg, frames, tp and fsdp, not {ended[0][1].layout}, or beside such a run"
        raise ConfigError("calibrate", ended[0][0], allowed)
    runs = [_Measured.of(*each) for each in ended]
    for run in runs:
        if run.setting != runs[0].setting:
            words = f"was in another setting ({run.setting}) than {runs[0].folder.name} ({runs[0].setting})"
            raise ConfigError("calibrate", run.folder, words)
    plain = [run for run in runs if is_plain(run.config.layout)]
    each, others, sizes = (
        np.concatenate(values)
        for values in zip(*((run.each / run.flops, run.others, run.sizes) for run in plain), strict=True)
    )
    first, cores = plain[0], plain[0].cores
    per_flop, slowdown = _mean_step(each, sizes), 0.0
    if cores is not None:
        crowd = np.maximum(1.0, (others + 1) / max(1.0, cores))
        per_flop, slowdown = _step_alone(np.minimum(others, max(1.0, cores) - 1), each / crowd, sizes)
    known = Rates(
        1 / per_flop,
        link or measured_link("cuda" if cores is None else "cpu"),
        f"measured: run{'s' * (len(plain) > 1)} {', '.join(run.words for run in plain)}",
        runs=tuple(run.folder.resolve() for run in runs),
        setting=first.setting,
        cores=cores,
        slowdown=slowdown,
        decode_s=max(run.decode_s for run in plain),
        swap=ASSUMED_LOADING | {swap: loading for run in plain for swap, loading in run.loading.items()},
    )
    together = [run for run in runs if run not in plain]
    return replace(known, link=_while_computing(known, together)) if together and link is None else known


def _while_computing(known: Rates, runs: Sequence[_Measured]) -> Link:
    """The link with what exchanges and gathers took in runs besides computing and their bytes.

    Least squares: what a step took longer is the sum of its exchanges of each axis and of its gathers.
    """
    free = replace(known.link, latency_s=0.0, exchange_s={})
    names = sorted({axis for run in runs for cost in run.cost for axis in cost.exchanges_of})
    if any(cost.gathers for run in runs for cost in run.cost):
        names.append(FSDP.name)
    counts, took = [], []
    for run in runs:
        computing = run.mean(lambda cost: seconds(cost, replace(known, link=free)))
        alone = float(np.average(run.each / crowding(run.others + 1, known), weights=run.sizes))
        counts.append([run.mean(lambda cost: _count(cost, name)) / alone for name in names])  # noqa: B023
        took.append((alone - computing) / alone)
    found = dict(zip(names, _not_negative(np.array(counts), np.array(took)).tolist(), strict=True))
    names_of_runs = f"run{'s' * (len(runs) > 1)} {', '.join(run.words for run in runs)}"
    source = f"{known.link.source}; {_each(found)} in {names_of_runs}"
    return replace(known.link, exchange_s={**known.link.exchange_s, **found}, source=source)


def _not_negative(counts: Array, took: Array) -> Array:
    """Least squares without negative coefficients: those that come out negative are left out, the least one first."""
    found, kept = np.zeros(counts.shape[1]), list(range(counts.shape[1]))
    while kept:
        each = np.linalg.lstsq(counts[:, kept], took, rcond=None)[0]
        if each.min() >= 0:
            found[kept] = each
            break
        del kept[int(each.argmin())]
    return found


def _count(cost: Cost, name: str) -> float:
    """The exchanges of an axis in a step, or FSDP's gathers, in such of two ranks."""
    count = cost.gathers if name == FSDP.name else cost.exchanges_of.get(name, 0)
    return count * longest_wait(cost.ranks.get(name, 2))


@dataclass(frozen=True, eq=False)
class _Measured:
    """What a finished run says about rates.

    Attributes:
        cost: of a step on each stage or, where experts are swapped, with each expert; `weights`: the steps of each.
        each: (spans,) mean seconds of a step of a sample on a rank; `sizes`: the number of steps.
        others: (spans,) how many other ranks were busy.
        words: its name, and what disturbed it.
    """

    folder: Path
    config: RunConfig
    setting: str
    cores: float | None
    cost: list[Cost]
    weights: list[int]
    each: Array
    sizes: Array
    others: Array
    words: str
    decode_s: float
    loading: dict[str, Loading]

    @staticmethod
    def of(folder: Path, config: RunConfig, result: dict[str, Any]) -> _Measured:
        """Read the folder of a finished run.

        Raises:
            ConfigError: its model is gone, or events are missing.
        """
        if config.is_svd:
            checkpoint.check_model(config, resolve(config))
        layout, events = config.layout, Run(folder).events()
        all_spans = results.measured_spans(events)
        spans = [span for span in all_spans if not span.beside]  # the first ones
        visits = layout.pp if config.swap is None else len(config.experts or ())
        if len(spans) != config.num_samples * visits * layout.lockstep:
            raise ConfigError("calibrate", folder, "must have the events of all of its samples")
        cores = result["hardware"]["cores"] / result["threads_per_rank"][0] if result["device"] == "cpu" else None
        steady = _without_hiccups(events, crowd=1.0 if cores is None else max(1.0, layout.world_size / cores))
        others, reason = result.get("other_ranks_at_work"), unfit(result)
        company = f" beside {other_runs.ranks_of_other_runs(others)}" if others else ""
        return _Measured(
            folder,
            config,
            setting_of(config, result),
            cores,
            costs.per_stage(config),
            [count for _, count in config.experts or ()] if config.swap else [len(steps) for steps in config.stages()],
            each=np.array([fmean(steps or [0.0]) for steps in steady.values()]),
            sizes=np.array([len(steps) for steps in steady.values()]),
            others=others_busy(all_spans)[: len(spans)],
            words=f"{folder.name}{company}" + (f", which was disturbed: {reason}" if reason else ""),
            decode_s=median(result.get("decode_s") or [0.0]) / math.prod(config.shape),
            loading=_measured_loading(config, events, folder.name),
        )

    def mean(self, of: Callable[[Cost], float]) -> float:
        """The mean over all steps of a sample of what follows from their costs."""
        return float(np.average([of(cost) for cost in self.cost], weights=self.weights))

    @property
    def flops(self) -> float:
        """Operations of a step, the mean over all steps of a sample."""
        return self.mean(lambda cost: cost.flops)


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
    return _mean_while(start, end, 1.0, lambda busy: busy) - 1


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
    source, busy = f"{best:.3g} GB/s, {least * 1e6:.0f} µs per message, {known}", facts.get("exchange_s", {})
    if busy:  # not in the files of earlier versions
        source += f"; while they compute {_each(busy)}"
    return Link(best * 1e9, least, source, exchange_s=busy)


def _each(seconds: Mapping[str, float]) -> str:
    """`Link.exchange_s` in words."""
    kinds_of = {name: f"exchange ({name})" for name in seconds} | {FSDP.name: "gather"}
    return ", ".join(f"{each * 1e3:.2g} ms per {kinds_of[name]}" for name, each in seconds.items())


def is_plain(layout: Parallel) -> bool:
    """Whether every rank computes its steps alone: no cfg, frames, tp or FSDP."""
    return layout.lockstep == 1 and not layout.fsdp


def setting_of(config: RunConfig, result: dict[str, Any]) -> str:
    """Model, hardware, type and threads in words: equal for runs that can be predicted from each other."""
    device = str(result["device"]).partition(":")[0]
    threads = machine.threads_text(result["threads_per_rank"])
    weights = f"{config.model_id or config.model}{', shortcuts' * config.shortcuts}"
    return f"{weights} on {machine.hardware_name(result['hardware'])}, {device}, {result['dtype']}, {threads}"
