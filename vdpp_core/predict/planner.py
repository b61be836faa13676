"""Which layout to take: all that fit, ranked by what is wanted, with a reason each; and why the others fall out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from statistics import fmean
from typing import Any, get_args

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from tqdm import tqdm

from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.layout import Parallel
from vdpp_core.parallel.devices import GIB
from vdpp_core.predict import costs, memory, rates
from vdpp_core.predict.costs import Cost
from vdpp_core.predict.predictor import Predictor, Room
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


def advise(
    config: RunConfig,
    gpus: int,
    goal: str,
    known: Rates,
    capacity_gib: float | None = None,
    modes: tuple[str, ...] = MODES,
    predictor: Predictor | None = None,
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
        predictor: where costs and peaks come from; counted one by one where none are given.

    Raises:
        ConfigError: one line on the argument that cannot be.
    """
    predictor = predictor or Predictor()
    check(config, gpus, goal, capacity_gib)
    if not isinstance(known, Rates):
        raise ConfigError("known", known, "must be Rates, as of vdpp_core.predict.rates")
    if not isinstance(modes, tuple) or not modes or not set(modes) <= set(MODES):
        raise ConfigError("modes", modes, f"must be one or several of {', '.join(MODES)}")
    if goal == "memory":
        modes = tuple(reversed(modes))
    bar = tqdm(list(layouts(gpus)), desc="layouts", leave=False, disable=None)
    rows: list[dict[str, Any]] = []
    fit_whole: set[tuple[int, int]] = set()  # (cfg, frames): what a rank's memory depends on where nothing is sharded
    for layout in bar:
        if layout.fsdp and goal != "memory" and (layout.cfg, layout.frames) in fit_whole:
            rows.append(_fallen(layout, "fits without sharding, which can only add waiting"))
            continue
        rows.append(_row(config, layout, known, capacity_gib, modes, predictor, arrivals))
        if rows[-1]["fits"] and not layout.fsdp:
            fit_whole.add((layout.cfg, layout.frames))
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
    predictor: Predictor,
    arrivals: ArrayLike = 0.0,
) -> tuple[pd.DataFrame, list[Span] | str]:
    """`advise`, and the schedule of one layout; what cannot be comes in words instead, to be shown in its place."""
    table = pd.DataFrame(columns=["place", *_fallen(chosen, "")])
    try:
        table = advise(config, gpus, goal, known, capacity_gib, predictor=predictor, arrivals=arrivals)
        if chosen.world_size > gpus:
            raise ConfigError("layout", chosen, f"needs {chosen.world_size} ranks, there are {gpus}")
        if chosen.fsdp and chosen.shards == 1:
            raise ConfigError("fsdp", True, "with one rank a stage there is nobody to share the parameters with")
        mode = table["guidance"][table["layout"] == str(chosen)].item()
        config = config.replace(parallel=chosen, guidance_mode=mode if mode in MODES else MODES[0])
        return table, rates.predict_schedule(config, predictor.cost(config), known, arrivals).spans()
    except ConfigError as error:
        return table, str(error)


def layouts(gpus: int) -> Iterator[Parallel]:
    """All of the axes whose product is at most so many; with and without sharding where there is somebody to share."""
    sizes = range(1, gpus + 1)
    for dp, pp, cfg, frames in itertools.product(sizes, sizes, (1, 2), sizes):
        if dp * pp * cfg * frames <= gpus:
            for fsdp in (False, True)[: 1 + (dp * cfg * frames > 1)]:
                yield Parallel(dp=dp, pp=pp, cfg=cfg, frames=frames, fsdp=fsdp)


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
    predictor: Predictor,
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
        room = predictor.room(candidate)
        row |= {"peak_gib": room.peak / GIB, "needed_gib": room.needed / GIB, "guidance": mode if guided else "–"}
        row["fits"] = capacity_gib is None or room.needed <= capacity_gib * GIB * (1 - SPARE)
        if row["fits"]:
            break
    else:
        return row | {"reason": _too_large(candidate, room, capacity_gib or 0.0)}
    cost = predictor.cost(candidate)
    planned = rates.predict_schedule(candidate, cost, known, arrivals)
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
