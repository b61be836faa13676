"""Which layout to take: all that fit, ranked by what is wanted, with a reason each; and why the others fall out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from statistics import fmean
from typing import Any, NamedTuple, Protocol, get_args

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from tqdm import tqdm

from vdpp_core.config import RunConfig
from vdpp_core.config.axes import AXES, AXIS_NAMES
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.execution import resolve
from vdpp_core.config.layout import Parallel
from vdpp_core.parallel.devices import GIB
from vdpp_core.predict import costs, memory, rates
from vdpp_core.predict.costs import Cost
from vdpp_core.predict.rates import Rates
from vdpp_core.predict.schedule import Schedule
from vdpp_core.runs.metrics import Span

MOST_GPUS = 16
MOST_SAMPLES = 10_000
# Of a card's nominal size: of the documents' A5000, 24564 MiB by nvidia-smi, PyTorch found 23.68 GiB
SPARE = 0.02
GOALS = {  # goal -> columns to rank by, the first one first
    "latency": ("latency_s", "makespan_s"),
    "throughput": ("makespan_s", "latency_s"),
    "cadence": ("longest_interval_s", "latency_s"),
    "memory": ("needed_gib", "latency_s"),
}
WANTED = {
    "latency": "the soonest from a video's first step to its last",
    "throughput": "the soonest with all videos",
    "cadence": "the shortest of the longest waits between two videos",
    "memory": "the least memory of a rank",
}
NUMBERS = [
    "latency_s",
    "response_s",
    "longest_interval_s",
    "makespan_s",
    "samples_per_s",
    "utilisation",
    "peak_gib",
    "needed_gib",
]
MODES = get_args(RunConfig.model_fields["guidance_mode"].annotation)


class Room(NamedTuple):
    """Bytes of a rank: the peak of what it allocates, and the smallest device in which that finds room."""

    peak: float
    needed: float


class Figures(Protocol):
    """What is known of a layout before it runs."""

    def cost(self, config: RunConfig) -> Cost: ...

    def room(self, config: RunConfig) -> Room: ...


class Counted:
    """Counted on the meta device: seconds for each share of the work that was not counted before."""

    def __init__(self) -> None:
        self.rooms: dict[tuple[RunConfig, int, bool], Room] = {}

    def cost(self, config: RunConfig) -> Cost:
        return costs.cost(config)

    def room(self, config: RunConfig) -> Room:
        """Counted for one sample; each further one of a replica adds its image latents, a layout its communicators."""
        one = config.replace(num_samples=1)
        key = memory.alike(one), (config.parallel or Parallel()).shards, config.fsdp_cpu_offload
        if key not in self.rooms:
            self.rooms[key] = Room(memory.predict(one).total, memory.needed(one) - memory.outside(one))
        batch, channels, _, rows, columns = config.shape
        halves = 2 if config.guidance_scale > 1 else 1
        more = (len(config.samples(0)) - 1) * halves * batch * channels * rows * columns * resolve(config).element_size
        return Room(self.rooms[key].peak + more, self.rooms[key].needed + more + memory.outside(config))


def advise(
    config: RunConfig,
    gpus: int,
    goal: str,
    known: Rates,
    capacity_gib: float | None = None,
    modes: tuple[str, ...] = MODES,
    figures: Figures | None = None,
    arrivals: ArrayLike = 0.0,
) -> pd.DataFrame:
    """Every layout on at most so many GPUs, the best first, those that do not fit last.

    Columns: `place` (1 is best, missing where it falls out), `layout`, the axes and `fsdp`, `gpus`, `guidance` (the
    first mode that fits), `latency_s` and `response_s` (means; the latter from a sample's arrival to its end),
    `longest_interval_s`, `makespan_s`, `samples_per_s`, `utilisation` (mean of the ranks), `peak_gib`, `needed_gib`
    (allowances counted), `reason`. `attrs`: goal, whether samples arrive `one_by_one`, the rates' source and error.

    Args:
        known: what a rank computes in a second, and the link.
        capacity_gib: of each GPU; where none is given, what the memory limit of `config` plays, if it has one.
        modes: of the guidance, in the order of preference.
        figures: where costs and peaks come from; counted one by one where none are given.

    Raises:
        ConfigError: one line on the argument that cannot be.
    """
    figures = figures or Counted()
    check(config, gpus, goal, capacity_gib)
    if not isinstance(known, Rates):
        raise ConfigError("known", known, "must be Rates, as of vdpp_core.predict.rates")
    if not isinstance(modes, tuple) or not modes or not set(modes) <= set(MODES):
        raise ConfigError("modes", modes, f"must be one or several of {', '.join(MODES)}")
    if goal == "memory":
        modes = tuple(reversed(modes))
    bar = tqdm(list(layouts(gpus)), desc="layouts", leave=False, disable=None)
    rows: list[dict[str, Any]] = []
    fit_whole: set[tuple[int, ...]] = set()  # lockstep sizes: all that a rank's memory depends on, unsharded
    for layout in bar:
        if layout.fsdp and goal != "memory" and tuple(layout.lockstep_sizes.values()) in fit_whole:
            rows.append(_fallen(layout, "fits without sharding, which can only add waiting"))
            continue
        rows.append(_row(config, layout, known, capacity_gib, modes, figures, arrivals))
        if rows[-1]["fits"] and not layout.fsdp:
            fit_whole.add(tuple(layout.lockstep_sizes.values()))
    table = pd.DataFrame(rows)
    one_by_one = bool(np.any(arrivals))
    order = [*GOALS[goal], "gpus", "fsdp", "needed_gib"]
    if one_by_one and goal == "latency":
        order.insert(0, "response_s")
    fitting = table[table["fits"]].sort_values(order, kind="stable")
    rest = table[~table["fits"]].sort_values(["gpus", "needed_gib"], kind="stable")
    table = pd.concat([fitting, rest], ignore_index=True).drop(columns="fits")
    table.insert(0, "place", pd.Series(range(1, len(fitting) + 1), dtype="Int64").reindex(table.index))
    table.attrs = {"goal": goal, "source": str(known), "error": known.error, "one_by_one": one_by_one}
    return table


def look(
    config: RunConfig,
    chosen: Parallel,
    gpus: int,
    goal: str,
    known: Rates,
    capacity_gib: float,
    figures: Figures,
    arrivals: ArrayLike = 0.0,
) -> tuple[pd.DataFrame, list[Span] | str]:
    """`advise`, and the schedule of one layout; what cannot be comes in words instead, to be shown in its place."""
    table = pd.DataFrame(columns=["place", *_fallen(chosen, "")])
    try:
        table = advise(config, gpus, goal, known, capacity_gib, figures=figures, arrivals=arrivals)
        if chosen.world_size > gpus:
            raise ConfigError("layout", chosen, f"needs {chosen.world_size} ranks, there are {gpus}")
        if chosen.fsdp and chosen.shards == 1:
            raise ConfigError("fsdp", True, "with one rank a stage there is nobody to share the parameters with")
        mode = table["guidance"][table["layout"] == str(chosen)].item()
        config = config.replace(parallel=chosen, guidance_mode=mode if mode in MODES else MODES[0])
        return table, rates.foretold(config, figures.cost(config), known, arrivals).spans()
    except ConfigError as error:
        return table, str(error)


def layouts(gpus: int) -> Iterator[Parallel]:
    """All of the axes whose product is at most so many; with and without sharding where there is somebody to share."""
    for sizes in itertools.product(*(range(1, min(gpus, axis.most) + 1) for axis in AXES)):
        if math.prod(sizes) <= gpus:
            layout = dict(zip(AXIS_NAMES, sizes, strict=True))
            yield Parallel(**layout)
            if math.prod(sizes) > layout["pp"]:
                yield Parallel(**layout, fsdp=True)


def check(config: RunConfig, gpus: int, goal: str, capacity_gib: float | None) -> None:
    """Whether there is something to look for, before anything is counted; ConfigError if not."""
    if not isinstance(gpus, int) or not 1 <= gpus <= MOST_GPUS:
        raise ConfigError("gpus", gpus, f"must be from 1 to {MOST_GPUS}")
    if goal not in tuple(GOALS):
        raise ConfigError("goal", goal, f"must be {', '.join(GOALS)}")
    if config.num_samples > MOST_SAMPLES:
        allowed = f"must be at most {MOST_SAMPLES} in a plan, which schedules them for every layout"
        raise ConfigError("num_samples", config.num_samples, allowed)
    if goal == "cadence" and config.num_samples <= gpus:
        allowed = f"is about the time between videos: more of them than GPUs, num_samples above {gpus}"
        raise ConfigError("goal", goal, allowed)
    capacity_gib = memory.device_gib(config, capacity_gib)
    if capacity_gib is None:
        return
    memory.check_capacity(capacity_gib)
    least = costs.parameters(config) / gpus / GIB
    if capacity_gib <= least and not config.fsdp_cpu_offload:
        allowed = f"must be above what the parameters take on a rank, {least:.3f} GiB when shared by {gpus}"
        raise ConfigError("capacity_gib", capacity_gib, allowed)


def _row(
    config: RunConfig,
    layout: Parallel,
    known: Rates,
    capacity_gib: float | None,
    modes: tuple[str, ...],
    figures: Figures,
    arrivals: ArrayLike,
) -> dict[str, Any]:
    row = _fallen(layout, "")
    if layout.dp > config.num_samples and not layout.fsdp:
        return row | {"reason": f"more replicas than the {config.num_samples} sample(s)"}
    try:
        whole = config.replace(parallel=layout, fsdp_same_sample=False)
    except ConfigError as error:
        return row | {"reason": str(error)}
    guided = config.guidance_scale > 1 and layout.cfg == 1
    capacity_gib = memory.device_gib(whole, capacity_gib)
    for mode in modes if guided else modes[:1]:
        candidate = whole.replace(guidance_mode=mode)
        room = figures.room(candidate)
        row |= {"peak_gib": room.peak / GIB, "needed_gib": room.needed / GIB, "guidance": mode if guided else "–"}
        row["fits"] = capacity_gib is None or room.needed <= capacity_gib * GIB * (1 - SPARE)
        if row["fits"]:
            break
    else:
        return row | {"reason": _too_large(candidate, room, capacity_gib or 0.0)}
    cost = figures.cost(candidate)
    planned = rates.foretold(candidate, cost, known, arrivals)
    return row | times(planned) | {"reason": _why(candidate, cost, known, planned)}


def _fallen(layout: Parallel, reason: str) -> dict[str, Any]:
    words = {"layout": str(layout), **layout.model_dump(), "gpus": layout.world_size, "guidance": "", "reason": reason}
    return {**words, "fits": False, **dict.fromkeys(NUMBERS, math.nan)}


def times(planned: Schedule) -> dict[str, float]:
    """What people ask of a schedule, in the columns of `advise`."""
    found = planned.numbers()
    return {
        "latency_s": fmean(found["latency_s"]),
        "response_s": float(planned.response_s.mean()),
        "longest_interval_s": max(found["interval_s"], default=math.nan),
        "makespan_s": found["makespan_s"],
        "samples_per_s": found["samples_per_s"],
        "utilisation": 1 - found["bubble"],
    }


def _why(config: RunConfig, cost: Cost, known: Rates, planned: Schedule) -> str:
    """What a layout does with the work, and what that costs."""
    layout, frames = config.layout, config.shape[2]
    words = []
    if layout.frames > 1:
        words.append(f"each rank has {math.ceil(frames / layout.frames)} of {frames} frames")
    if layout.cfg > 1:
        words.append("each rank runs one of the guidance's passes")
    if layout.lockstep > 1:
        link, step = known.link, rates.seconds(cost, rates.shared(config, known))
        words.append(f"exchanges take {link.seconds(sum(cost.sent.values()), cost.exchanges) / step:.0%} of a step")
    if layout.pp > 1:
        words.append(f"the longest stage takes {planned.occupied.max():.3g} s, a video no less than on one stage")
    if (together := min(layout.dp, config.num_samples)) > 1:
        rounds = math.ceil(config.num_samples / layout.dp)
        words.append(f"{together} videos at once, {rounds} round{'s' * (rounds > 1)}")
    if layout.dp > config.num_samples:
        words.append(f"{layout.dp - config.num_samples} replicas only hold parameters")
    if layout.shards > 1:
        gathering = known.link.seconds(cost.gathered, cost.gathers)
        waits = gathering > cost.flops / rates.shared(config, known).flops_per_s
        wait = f"waiting for them {gathering:.3g} s a step" if waits else "gathered meanwhile"
        words.append(f"parameters / {layout.shards}, {wait}")
    return "; ".join(words) or "nothing is sent"


def _too_large(config: RunConfig, room: Room, capacity_gib: float) -> str:
    layout, frames = config.layout, config.shape[2]
    words = f"{room.needed / GIB:.4g} GiB needed, {capacity_gib * (1 - SPARE):.4g} of {capacity_gib:g} usable"
    own = costs.parameters(config) / layout.shards
    if own > room.needed / 2:
        return f"{words}: most of it parameters" + (f", shared by {layout.shards}" if layout.shards > 1 else ", whole")
    if layout.frames > 1:
        return f"{words}: even {math.ceil(frames / layout.frames)} of {frames} frames a rank are too many"
    if layout.cfg > 1:
        return f"{words}: each rank holds all activations of one pass"
    if layout.shards > 1:
        return f"{words}: sharding leaves the activations whole on every rank"
    if layout.world_size > 1:
        return f"{words}: every rank holds the whole UNet and all activations, splitting steps or samples saves none"
    return f"{words}: parameters and all activations on one GPU"
