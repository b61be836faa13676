"""Which layout to use: all that fit, ranked by a goal, with a reason for each, and why the rest are excluded."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any, NamedTuple, get_args

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from tqdm import tqdm

from vdpp_core.config import RunConfig
from vdpp_core.config.axes import AXES, AXIS_NAMES
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.execution import resolve
from vdpp_core.config.layout import Parallel
from vdpp_core.config.steps import ranks_for
from vdpp_core.parallel.devices import GIB
from vdpp_core.predict import costs, memory, rates
from vdpp_core.predict.costs import Cost
from vdpp_core.predict.predictor import Predictor, Room
from vdpp_core.predict.rates import Rates
from vdpp_core.predict.schedule import Schedule
from vdpp_core.runs.metrics import Span

MOST_GPUS = 16
MOST_SAMPLES = 10_000
# Share of a card's nominal size that PyTorch does not get: the documents' A5000 has 24 GiB, PyTorch found 23.68 GiB
SPARE = 0.02
GOALS = {  # goal -> columns to rank by, the first one first
    "latency": ("latency_s", "makespan_s"),
    "throughput": ("makespan_s", "latency_s"),
    "cadence": ("longest_interval_s", "latency_s"),
    "memory": ("needed_gib", "latency_s"),
}
WANTED = {
    "latency": "shortest time from a video's first step to its last",
    "throughput": "shortest time until all videos are finished",
    "cadence": "shortest longest wait between two videos",
    "memory": "least memory per rank",
}
NUMBERS = [
    "latency_s",
    "response_s",
    "longest_interval_s",
    "makespan_s",
    "time_to_first_video_s",
    "samples_per_s",
    "utilisation",
    "peak_gib",
    "needed_gib",
    "swap_s",
    "swaps",
]
SWAPS = {"host": "host memory", "disk": "disk"}  # an expert that takes the place of another
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
    ways: Sequence[Way] | None = None,
) -> pd.DataFrame:
    """Rank every layout on up to `gpus` GPUs: the best first, excluded ones last.

    Columns: `place` (1 is best, missing where the layout is excluded), `layout`, the axes and `fsdp`, `stage_ranks`,
    `swap` and `swap_batch` (see `RunConfig`), `gpus`, `guidance` (the first mode that fits), `latency_s` and
    `response_s` (means; the latter from a sample's arrival to its end), `longest_interval_s`, `makespan_s`,
    `time_to_first_video_s` (missing where no time of decoding is known), `samples_per_s`, `utilisation` (mean over the
    ranks, 0 to 1), `peak_gib`, `needed_gib` (peak and allowances), `swap_s` (seconds to load an expert), `swaps` (how
    often the busiest rank does), `reason`. `attrs`: the goal, whether samples arrive `one_by_one`, how `decoding` is
    included, source and error of the rates, and the steps of each of the `experts`, where the model has several.

    Args:
        goal: a key of GOALS.
        known: what a rank computes per second, and the link.
        capacity_gib: memory of each GPU; by default the device that the memory limit of `config` emulates, if any.
        modes: guidance modes in order of preference.
        predictor: source of costs and memory; by default everything is counted.
        arrivals: when each sample arrives, in seconds, as of `schedule.make`.
        ways: what to rank, by default all `candidates`.

    Raises:
        ConfigError: an argument is not allowed, or the video is too large to be counted.
    """
    predictor = predictor or Predictor()
    check(config, gpus, goal, capacity_gib)
    if not isinstance(known, Rates):
        raise ConfigError("known", known, "must be Rates (vdpp_core.predict.rates)")
    if not isinstance(modes, tuple) or not modes or not set(modes) <= set(MODES):
        raise ConfigError("modes", modes, f"must be one or several of {', '.join(MODES)}")
    if goal == "memory":
        modes = tuple(reversed(modes))
    if not config.is_svd:
        modes = MODES[:1]  # whether the passes share a batch is up to the pipeline
    bar = tqdm(list(candidates(config, gpus) if ways is None else ways), desc="layouts", leave=False, disable=None)
    rows: list[dict[str, Any]] = []
    fit_whole: set[tuple[Any, ...]] = set()  # lockstep sizes and experts held: they decide a rank's memory
    for way in bar:
        whole = Way(Parallel(**(way.layout.model_dump() | {"fsdp": False})))
        memory_key = tuple(way.layout.lockstep_sizes.values()), whole.parameters(config)
        if (way.layout.fsdp or way.swap) and goal != "memory" and memory_key in fit_whole:
            saving = "sharding" if way.layout.fsdp else "swapping"
            rows.append(_excluded(way, f"fits without {saving}, which would only slow it down"))
            continue
        rows.append(_row(config, way, known, capacity_gib, modes, predictor, arrivals))
        if rows[-1]["fits"] and way == whole:
            fit_whole.add(memory_key)
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
    table.attrs["decoding"] = _decoding(config, known)
    if config.experts is not None and len(config.experts) > 1:
        table.attrs["experts"] = dict(config.experts)
    return table


def _decoding(config: RunConfig, known: Rates) -> str:
    """Whether the predictions include decoding, in words."""
    if config.command != "generate":
        return "decoding is not included"
    if not (seconds := rates.decode_s(config, known)):
        return "decoding is not included in the times: how long it takes is not known"
    where = "by the last stage between its samples" if config.decode == "as-ready" else "after all denoising"
    return f"decoding is included: {seconds:.3g} s for each sample, {where}"


def rivals(table: pd.DataFrame) -> pd.DataFrame:
    """The best row of `advise` for each way of holding a model's experts: the best way first, those that fit nowhere
    or were not counted last.

    Columns: `way` in words, `layout`, `value` (of the goal's column), `times_best` (1 for the best), `needed_gib` (of a
    way that fits nowhere, the least; missing where none was counted), `swap_s` (seconds to load an expert),
    `break_even_s` (of a way that swaps, with the goal throughput: the same above which the step pipeline would be
    faster), `reason`.
    """
    column, rows = GOALS[table.attrs["goal"]][0], []
    stages = table[(table["pp"] > 1) & table["place"].notna()]
    for way, own in table.groupby(table.apply(_way, axis=1), sort=False):
        ranked = own if own["place"].notna().any() else own.sort_values("needed_gib", kind="stable")
        row = ranked.to_dict("records")[0]
        value = math.nan if pd.isna(row["place"]) else row[column]
        rows.append({"way": way, "layout": row["layout"], "value": value, "break_even_s": math.nan, **row})
        if row["swaps"] > 0 and column == "makespan_s" and len(stages):
            rows[-1]["break_even_s"] = row["swap_s"] + (stages[column].iloc[0] - row[column]) / row["swaps"]
    found = pd.DataFrame(rows).sort_values("value", kind="stable", ignore_index=True)
    found["times_best"] = found["value"] / found["value"].min()
    columns = ["way", "layout", "value", "times_best", "needed_gib", "swap_s", "break_even_s", "reason"]
    return found[columns]


def _way(row: pd.Series) -> str:
    """How the ranks of a layout hold the experts."""
    if row["swap"]:
        words = f"one expert at a time, from {SWAPS[row['swap']]}" + ", samples batched" * (row["swap_batch"] > 1)
    else:
        words = "step pipeline" if row["pp"] > 1 else "all experts on every rank"
    return words + ", tensor parallel" * (row["tp"] > 1) + ", sharded" * row["fsdp"]


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
    """`advise`, and the spans of one layout's schedule; or, if that is impossible, the reason in words.

    The arguments are those of `advise`; `chosen` is the layout to show.
    """
    table = pd.DataFrame(columns=["place", *_excluded(Way(chosen), "")])
    try:
        table = advise(config, gpus, goal, known, capacity_gib, predictor=predictor, arrivals=arrivals)
        if chosen.world_size > gpus:
            raise ConfigError(
                "layout",
                chosen,
                f"needs {chosen.world_size} GPUs, but only {gpus} {'are' if gpus > 1 else 'is'} available",
            )
        if chosen.fsdp and chosen.shards == 1:
            raise ConfigError("fsdp", True, "needs at least two ranks per stage to share the parameters")
        mode = table["guidance"][table["layout"] == str(chosen)].item()
        config = config.replace(parallel=chosen, guidance_mode=mode if mode in MODES else MODES[0])
        cost = predictor.per_stage(config)
        return table, rates.predict_schedule(rates.balanced(config, cost, known), cost, known, arrivals).spans()
    except ConfigError as error:
        return table, str(error)


def place_of(chosen: Parallel, table: pd.DataFrame) -> str:
    """The place of a layout among those of `advise`, and the best one, in words."""
    places, layouts = table["place"], table["layout"]
    if not places.notna().any():
        return f"{chosen}: nothing fits"
    own = places[(layouts == str(chosen)) & places.notna()]
    if own.empty:
        return f"{chosen} is excluded, {layouts[0]} is best"
    return f"{chosen} is best" if own.min() == 1 else f"{chosen} is number {own.min()}, {layouts[0]} is best"


class Way(NamedTuple):
    """A layout and, where its ranks hold one expert at a time, where they load the next from, and how often."""

    layout: Parallel
    swap: str | None = None
    batch: int = 1

    def __str__(self) -> str:
        if self.swap is None:
            return str(self.layout)
        return f"{self.layout} swap {self.swap}" + (f" batch {self.batch}" if self.batch > 1 else "")

    def of(self, config: RunConfig) -> RunConfig:
        """A run's configuration, executed in this way.

        Raises:
            ConfigError: it cannot be.
        """
        split = config.split if self.layout.pp > 1 else None
        how = {"parallel": self.layout, "swap": self.swap, "swap_batch": self.batch, "split": split}
        return config.replace(**how, fsdp_same_sample=False)

    def parameters(self, config: RunConfig) -> int:
        """Bytes of the parameters that the fullest rank holds; of the whole model where it cannot be run like this."""
        try:
            return costs.held(self.of(config))
        except ConfigError:
            return costs.parameters(config)


def candidates(config: RunConfig, gpus: int) -> Iterator[Way]:
    """All ways to run on up to `gpus` GPUs: every layout and, for a model with experts, stages with ranks in proportion
    to their steps, and replicas that swap experts, for each sample or once for all of their samples."""
    sizes_of_tp = costs.tp_sizes(config.model, config.model_id, resolve(config).dtype, gpus)
    ways = [layout for layout in layouts(gpus) if layout.tp in sizes_of_tp]
    yield from map(Way, ways)
    sizes = [count for _, count in config.experts or ()]
    if len(sizes) < 2:
        return
    for layout in [layout for layout in ways if layout.dp == layout.pp == 1 and not layout.fsdp]:
        for groups in range(len(sizes), gpus // layout.lockstep + 1):
            if len(set(shares := ranks_for(sizes, groups))) > 1:
                for fsdp in (False, True):
                    yield Way(Parallel(**layout.sizes | {"pp": len(sizes)}, stage_ranks=shares, fsdp=fsdp))
    for layout in [layout for layout in ways if layout.pp == 1 and not layout.fsdp]:
        for batch in dict.fromkeys((1, math.ceil(config.num_samples / layout.dp))):
            yield from (Way(layout, swap, batch) for swap in SWAPS)


def layouts(gpus: int) -> Iterator[Parallel]:
    """All layouts on up to `gpus` GPUs, with and without sharding where several ranks hold the same parameters."""
    for sizes in itertools.product(*(range(1, min(gpus, axis.most) + 1) for axis in AXES)):
        if math.prod(sizes) <= gpus:
            layout = dict(zip(AXIS_NAMES, sizes, strict=True))
            yield Parallel(**layout)
            if (sharded := Parallel(**layout, fsdp=True)).shards > 1:
                yield sharded


def check(config: RunConfig, gpus: int, goal: str, capacity_gib: float | None) -> None:
    """Check the arguments of a plan before anything is counted.

    Raises:
        ConfigError: an argument is not allowed, or the parameters fit no layout.
    """
    if not isinstance(gpus, int) or not 1 <= gpus <= MOST_GPUS:
        raise ConfigError("gpus", gpus, f"must be from 1 to {MOST_GPUS}")
    if goal not in tuple(GOALS):
        raise ConfigError("goal", goal, f"must be {', '.join(GOALS)}")
    if config.num_samples > MOST_SAMPLES:
        allowed = f"must be at most {MOST_SAMPLES} in a plan, which schedules every sample on every layout"
        raise ConfigError("num_samples", config.num_samples, allowed)
    if goal == "cadence" and config.num_samples <= gpus:
        allowed = f"compares the time between videos and needs more samples than GPUs: num_samples above {gpus}"
        raise ConfigError("goal", goal, allowed)
    capacity_gib = memory.device_gib(config, capacity_gib)
    if capacity_gib is None:
        return
    memory.check_capacity(capacity_gib)
    least = costs.parameters(config) / gpus / GIB
    if config.experts is not None:  # one at a time, or one in each stage
        least = min(least, max(costs.experts(config).values()) / GIB)
    if capacity_gib <= least and not config.fsdp_cpu_offload:
        allowed = f"must be above the parameters of a rank, {least:.3f} GiB when sharded over {gpus} GPUs"
        raise ConfigError("capacity_gib", capacity_gib, allowed)


def _row(
    config: RunConfig,
    way: Way,
    known: Rates,
    capacity_gib: float | None,
    modes: tuple[str, ...],
    predictor: Predictor,
    arrivals: ArrayLike,
) -> dict[str, Any]:
    row, layout = _excluded(way, ""), way.layout
    if layout.dp > config.num_samples and not layout.fsdp:
        return row | {"reason": f"more replicas than samples ({config.num_samples})"}
    if layout.tp > 1 or (layout.frames > 1 and not config.is_svd):
        split = Parallel(frames=layout.frames, tp=layout.tp)
        if refusal := costs.refusal(config.model, config.model_id, split):
            return row | {"reason": refusal}
    try:
        whole = way.of(config)
    except ConfigError as error:
        return row | {"reason": str(error)}
    guided = config.is_svd and config.guidance_passes > layout.cfg
    capacity_gib = memory.device_gib(whole, capacity_gib)
    for mode in modes if guided else modes[:1]:
        candidate = whole.replace(guidance_mode=mode)
        try:
            room = predictor.room(candidate)
        except ConfigError as error:
            if config.is_svd:
                raise
            return row | {"reason": str(error)}
        row |= {"peak_gib": room.peak / GIB, "needed_gib": room.needed / GIB, "guidance": mode if guided else "–"}
        row["fits"] = capacity_gib is None or room.needed <= capacity_gib * GIB * (1 - SPARE)
        if row["fits"]:
            break
    else:
        return row | {"reason": _too_large(candidate, room, capacity_gib or 0.0)}
    cost = predictor.per_stage(candidate)
    candidate = rates.balanced(candidate, cost, known)
    planned = rates.predict_schedule(candidate, cost, known, arrivals)
    if way.swap is not None:
        most = max(Counter(span.rank for span in planned.swaps).values(), default=0)
        row |= {"swap_s": rates.swap_s(candidate, known), "swaps": most}
    return row | times(planned) | {"reason": _why(candidate, cost, known, planned)}


def _excluded(way: Way, reason: str) -> dict[str, Any]:
    layout = way.layout
    words = {"layout": str(way), **layout.model_dump(), "swap": way.swap or "", "swap_batch": way.batch}
    words |= {"gpus": layout.world_size, "guidance": "", "reason": reason}
    return {**words, "fits": False, **dict.fromkeys(NUMBERS, math.nan)}


def times(planned: Schedule) -> dict[str, float]:
    """The times of a schedule in the columns of `advise`: seconds, samples per second, and a share."""
    found = planned.numbers()
    return {
        "latency_s": fmean(found["latency_s"]),
        "response_s": float(planned.response_s.mean()),
        "longest_interval_s": max(found["interval_s"], default=math.nan),
        "makespan_s": found["makespan_s"],
        "time_to_first_video_s": math.nan if planned.first_video_s is None else planned.first_video_s,
        "samples_per_s": found["samples_per_s"],
        "utilisation": 1 - found["bubble"],
    }


def _why(config: RunConfig, stages: Sequence[Cost], known: Rates, planned: Schedule) -> str:
    """How a layout splits the work, and what that costs."""
    layout, words = config.layout, _experts_in_words(config, known, planned)
    cost = max(stages, key=lambda each: each.flops)
    if layout.frames > 1:
        words.append(f"each rank computes {_share(config)}")
    if layout.cfg > 1:
        words.append("each rank runs one guidance pass")
    if layout.tp > 1:
        held = sum(costs.experts(config, layout.tp).values()) / costs.parameters(config)
        words.append(f"each rank holds 1/{layout.tp} of the layers that can be cut, {held:.0%} of the parameters")
    if layout.lockstep > 1:
        share = known.link.exchanging(cost) / rates.seconds(cost, known)
        known_link = math.isfinite(known.link.bytes_per_s)
        words.append(
            f"exchanges take {share:.0%} of a step" if known_link else "exchanges not counted: link not measured"
        )
    if layout.pp > 1:
        words.append(f"the longest stage takes {planned.occupied.max():.3g} s, {_latency(planned)}")
        if config.stage_weights is not None:
            words[-1] += f", with --stage-weights {' '.join(f'{weight:g}' for weight in config.stage_weights)}"
    if (together := min(layout.dp, config.num_samples)) > 1:
        rounds = math.ceil(config.num_samples / layout.dp)
        words.append(f"{together} videos in parallel, {rounds} round{'s' * (rounds > 1)}")
    if layout.dp > config.num_samples:
        words.append(f"{layout.dp - config.num_samples} replica(s) only hold parameters")
    if layout.shards > 1:
        gathering, computing = known.link.gathering(cost), cost.flops / known.flops_per_s
        wait = f"the all-gathers limit a step to {gathering:.3g} s"
        if known.cores is not None:
            wait = f"the all-gathers take {gathering / rates.seconds(cost, known):.0%} of a step"
        elif gathering <= computing:
            wait = "all-gathers hidden by computing"
        words.append(f"parameters sharded {layout.shards} ways, {wait}")
    return "; ".join(words) or "no communication"


def _latency(planned: Schedule) -> str:
    """How long a sample takes in stages, waiting included, against one GPU."""
    alone, mean = float(planned.occupied[0, 0].sum()), fmean(planned.numbers()["latency_s"])
    return "latency as on one GPU" if mean < 1.05 * alone else f"samples wait {mean - alone:.3g} s between stages"


def _experts_in_words(config: RunConfig, known: Rates, planned: Schedule) -> list[str]:
    """Which experts the ranks hold, and what loading them costs."""
    if config.experts is None or len(config.experts) < 2:
        return []
    layout, held = config.layout, f"{costs.held(config) / 1e9:.3g}"
    total = f"{costs.parameters(config) / 1e9:.3g} GB of parameters"
    if config.swap is not None:
        loading = sum(span.busy for span in planned.swaps) / layout.world_size / planned.finished_s.max()
        each = f"{rates.swap_s(config, known):.3g} s each ({known.swap[config.swap]})"
        often = "per video" if config.swap_batch == 1 else f"per {config.swap_batch} videos"
        loads = f"{len(config.experts)} loads {often}, {each}: {loading:.1%} of the time"
        return [f"holds {held} of {total} at a time; {loads}"]
    if layout.pp == 1:
        return [f"every rank holds both experts, {held} GB" + (f" of {total}" if layout.fsdp else "")]
    if any(len(config.experts_of(stage) or ()) > 1 for stage in range(layout.pp)):
        return [f"a stage holds {held} of {total}"]
    each = ", ".join(
        f"{copies} rank{'s' * (copies > 1)} for {len(steps)} steps"
        for copies, steps in zip(layout.copies, config.stages(), strict=True)
    )
    return [f"each stage holds one expert, {held} of {total}, and loads none"] + [each] * (
        layout.stage_ranks is not None
    )


def _share(config: RunConfig) -> str:
    """What a rank computes of a video whose frames or tokens are split."""
    ranks, frames = config.layout.frames, config.shape[2]
    return f"{math.ceil(frames / ranks)} of {frames} frames" if config.is_svd else f"1/{ranks} of the frames or tokens"


def _too_large(config: RunConfig, room: Room, capacity_gib: float) -> str:
    layout = config.layout
    words = f"needs {room.needed / GIB:.4g} GiB, {capacity_gib * (1 - SPARE):.4g} of {capacity_gib:g} GiB usable"
    if config.command == "generate" and (decoding := memory.predict_decoding(config)) and decoding.total > room.peak:
        at_once = f"{config.decode_chunk_size} frame{'s' * (config.decode_chunk_size > 1)}"
        return f"{words}: decoding {at_once} at once; --decode-chunk-size 1 needs least"
    own = costs.held(config)
    if own > room.needed / 2:
        return f"{words}: mostly parameters" + (
            f", sharded {layout.shards} ways" if layout.shards > 1 else ", unsharded"
        )
    if layout.frames > 1:
        return f"{words}: even {_share(config)} per rank are too many"
    if layout.cfg > 1:
        return f"{words}: each rank holds all activations of one guidance pass"
    if layout.shards > 1:
        return f"{words}: sharding does not reduce the activations"
    if config.swap is not None:
        return f"{words}: one expert and all activations"
    if layout.world_size > 1:
        if config.experts is not None and layout.pp > 1:
            return f"{words}: a stage's expert and all activations"
        return f"{words}: every rank holds the model and all activations; splitting steps or samples saves no memory"
    return f"{words}: all parameters and activations on one GPU"
