"""Which rank computes which sample when, before it runs: replicas × stages, and closed forms for the even case."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, SkipValidation

from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.layout import IN_FLIGHT, Parallel
from vdpp_core.predict.checked_arguments import checked, checked_dataclass
from vdpp_core.runs.metrics import Array, Span, numbers_of

LONGEST_S = 1e9  # thirty years
AHEAD = IN_FLIGHT + 2  # samples that a rank can be ahead of the next one: also one received there and one computed

Positive = Annotated[float, Field(gt=0, lt=LONGEST_S)]  # seconds
NotNegative = Annotated[float, Field(ge=0, lt=LONGEST_S)]
Samples = Annotated[int, Field(ge=1, le=100_000)]  # as in a RunConfig


@checked_dataclass
class Seconds:
    """How long a sample occupies ranks and links, in seconds.

    Attributes:
        step: one denoising step: one number for all ranks, one per stage, or one per replica and stage (dp, pp).
        hop: a hand-off, from the end of a stage to the start of the next; a link carries one sample at a time.
        encode: on the first stage, before the first step.
        decode: of a sample; on the last stage after its last step, or else once its replica has denoised all samples.
        as_ready: which of the two.
        swap: for an expert to take the place of another on a rank that holds one at a time.

    Raises:
        ConfigError: a step takes no time, or something takes less than none.
    """

    step: SkipValidation[ArrayLike]
    hop: NotNegative = 0.0
    encode: NotNegative = 0.0
    decode: NotNegative = 0.0
    as_ready: bool = True
    swap: NotNegative = 0.0

    def __post_init__(self) -> None:
        step = _numbers("step", self.step)
        if not (step.size and ((step > 0) & (step < LONGEST_S)).all()):
            raise ConfigError("step", step.ravel().tolist(), f"must be above 0 and below {LONGEST_S:g} seconds")

    @property
    def decode_in_between(self) -> float:
        """Seconds for which decoding keeps the last stage from its next sample."""
        return self.decode if self.as_ready else 0.0

    def on_ranks(self, layout: Parallel, sizes: list[int]) -> Array:
        """Seconds that a sample occupies each rank, (dp, pp).

        Raises:
            ConfigError: `step` has another shape than the layout.
        """
        try:
            step = np.broadcast_to(_numbers("step", self.step), (layout.dp, layout.pp))
        except ValueError:
            allowed = f"must be one number, one for each of {layout.pp} stages, or {layout.dp} × {layout.pp}"
            raise ConfigError("step", np.shape(self.step), allowed) from None
        occupied = step * np.asarray(sizes)
        occupied[:, 0] += self.encode
        occupied[:, -1] += self.decode_in_between
        return occupied


def _numbers(name: str, values: ArrayLike) -> Array:
    try:
        return np.asarray(values, dtype=float)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(name, values, "must be numbers of seconds") from None


@dataclass(frozen=True)
class Schedule:
    """The schedule of a run; `make` and `predict` compute it.

    Attributes:
        started: (rounds + pp - 1, dp, pp), in seconds: when stage p starts its replica's sample number r, at
            [r + p, replica, p]; NaN where there is no such sample. Where ranks swap experts, each expert's steps are a
            stage here, and all stages are on one rank.
        occupied: (rounds + pp - 1, dp, pp), in seconds: for how long, indexed as `started`.
        arrivals: (num_samples,), the earliest start of each sample in seconds.
        swaps: when ranks load experts.
        batch: number of samples that a rank takes through an expert before it loads the next.
    """

    layout: Parallel
    seconds: Seconds
    started: Array
    occupied: Array
    arrivals: Array
    swaps: tuple[Span, ...] = ()
    batch: int = 1

    def starts(self, stage: int) -> Array:
        """When a stage starts the samples of each replica, (rounds, dp) in seconds; NaN where there are fewer."""
        rounds = len(self.started) - self.started.shape[2] + 1
        return self.started[stage : stage + rounds, :, stage]

    def in_steps(self, stage: int) -> Array:
        """Seconds that the samples of each replica occupy a stage without decoding, (rounds, dp)."""
        rounds, last = len(self.starts(stage)), self.started.shape[2] - 1
        decode = self.seconds.decode_in_between if stage == last else 0.0
        return self.occupied[stage : stage + rounds, :, stage] - decode

    def of_samples(self, values: Array) -> Array:
        """(rounds, dp) -> (num_samples,): sample m is number m // dp of replica m % dp."""
        return values.ravel()[: len(self.arrivals)]

    @property
    def finished_s(self) -> Array:
        """When the last step of each sample ends, (num_samples,) in seconds."""
        last = self.started.shape[2] - 1
        return self.of_samples(self.starts(last) + self.in_steps(last))

    @property
    def response_s(self) -> Array:
        """From each sample's arrival until it is finished, waiting included, (num_samples,) in seconds."""
        return self.finished_s - self.arrivals

    @property
    def first_video_s(self) -> float | None:
        """When the first sample is decoded, in seconds; None where the time of decoding is not known."""
        if not self.seconds.decode:
            return None
        finished, replicas = self.finished_s, self.started.shape[1]
        if not self.seconds.as_ready:
            finished = np.array([finished[replica::replicas].max() for replica in range(min(replicas, len(finished)))])
        return float(finished.min()) + self.seconds.decode

    def rank(self, sample: int, stage: int, member: int = 0) -> int:
        """The rank that computes a stage of a sample."""
        turn, replica = divmod(sample, self.started.shape[1])
        return self.layout.rank(replica, min(stage, self.layout.pp - 1), member, turn)

    def spans(self) -> list[Span]:
        """One span for each sample and rank, one for each decoding between two samples, and one for each swap."""
        layout, stages, decode = self.layout, self.started.shape[2], self.seconds.decode_in_between
        starts, in_steps = (
            [self.of_samples(of_stage(stage)).tolist() for stage in range(stages)]
            for of_stage in (self.starts, self.in_steps)
        )
        found = [
            Span(self.rank(sample, stage, member), sample, start, start + seconds, seconds)
            for sample in range(len(self.arrivals))
            for stage in range(stages)
            for start, seconds in ((starts[stage][sample], in_steps[stage][sample]),)
            for member in range(layout.lockstep)
        ]
        if decode:
            found += [
                Span(self.rank(sample, stages - 1), sample, end, end + decode, decode, beside="decoding")
                for sample, end in enumerate(self.finished_s.tolist())
            ]
        return found + list(self.swaps)

    def numbers(self) -> dict[str, Any]:
        """The numbers of the run, named as by `metrics.numbers`, without making the spans; latency leaves out
        encoding."""
        layout, (_, replicas, stages) = self.layout, self.started.shape
        copies = layout.copies if stages == layout.pp else (1,) * stages
        places = [(stage, copy) for stage in range(stages) for copy in range(copies[stage])]
        own = [self.starts(stage)[copy :: copies[stage]] for stage, copy in places]
        in_steps = [
            np.where(np.isnan(starts), 0.0, self.in_steps(stage)[copy :: copies[stage]])
            for starts, (stage, copy) in zip(own, places, strict=True)
        ]
        first = np.stack([np.fmin.reduce(starts, initial=np.nan) for starts in own], axis=1)
        ends = [np.fmax.reduce(each + steps, initial=np.nan) for each, steps in zip(own, in_steps, strict=True)]
        busy, last = np.stack([steps.sum(axis=0) for steps in in_steps], axis=1), np.stack(ends, axis=1)

        def of_ranks(values: Array, elsewhere: float, together: np.ufunc) -> Array:
            if stages != layout.pp:  # one rank has all parts
                values = together.reduce(values, axis=1)
            more = layout.world_size - values.size * layout.lockstep  # fsdp_same_sample: replicas that only help
            return np.append(np.repeat(values, layout.lockstep), np.full(more, elsewhere))

        return numbers_of(
            layout,
            replica=np.arange(len(self.arrivals)) % replicas,
            latency=self.finished_s - self.of_samples(self.starts(0)) - self.seconds.encode,
            ended=self.finished_s,
            busy=of_ranks(busy, 0.0, np.add),
            taken=of_ranks(first, np.nan, np.fmin),
            left=of_ranks(last, np.nan, np.fmax),
            batch=self.batch,
        )


@checked
def make(
    layout: Parallel,
    sizes: list[Annotated[int, Field(ge=1)]],
    num_samples: Samples,
    seconds: Seconds,
    arrivals: SkipValidation[ArrayLike] = 0.0,
    replicas: Annotated[int, Field(ge=1)] | None = None,
    stretch: SkipValidation[ArrayLike] = 1.0,
) -> Schedule:
    """Schedule samples on replicas × stages; sample m runs on replica m % dp.

    A stage starts a sample once the stage before has handed it on, its own previous sample is finished, and the next
    stage has room. Copies of a stage take a replica's samples in turn. Computed by anti-diagonals of samples × stages,
    all replicas at once: 4096 stages and 10 000 samples take seconds, and 8 bytes for each of their products.

    Args:
        sizes: steps of each stage.
        arrivals: when each sample arrives, in seconds, not decreasing; 0: all at the start.
        replicas: how many of the layout's replicas get samples of their own; all by default.
        stretch: factors on the seconds that samples occupy ranks, indexed as `Schedule.occupied`.

    Raises:
        ConfigError: no sample, a stage without steps, or arrivals that are not one finite time per sample.
    """
    if len(sizes) != layout.pp:
        raise ConfigError("sizes", sizes, f"must be the steps of {layout.pp} stages")
    if replicas is not None and replicas > layout.dp:
        raise ConfigError("replicas", replicas, f"must be at most {layout.dp}, those of the layout")
    replicas, stages = replicas or layout.dp, layout.pp
    times = _arrivals(arrivals, num_samples)
    rounds = math.ceil(num_samples / replicas)
    earliest = np.full((rounds + stages - 1) * replicas, np.nan)
    earliest[:num_samples] = times
    started = np.full((rounds + stages - 1, replicas, stages), -np.inf)
    started[:, :, 0] = earliest.reshape(-1, replicas)
    occupied = _stretched(seconds.on_ranks(layout, sizes)[:replicas], stretch, started)
    copies, every = np.asarray(layout.copies), np.arange(stages)
    room = (
        (AHEAD - 1) * copies[:-1] + copies[1:] - 1
    )  # diagonals since the next stage started what leaves room for more
    arrived = np.full((copies.max() + 1, replicas, stages), -np.inf)  # of the latest diagonals
    for number, row in enumerate(started):
        before = number - copies
        np.maximum(row, _earlier(started, before, every) + _earlier(occupied, before, every), out=row)
        if number > 0:
            finished = started[number - 1] + occupied[number - 1]
            busy = arrived[(number - 1 - copies) % len(arrived), :, every].T  # a rank sends one sample at a time
            arrived[(number - 1) % len(arrived)] = np.maximum(finished, busy) + seconds.hop
            np.maximum(row[:, 1:], arrived[(number - 1) % len(arrived), :, :-1], out=row[:, 1:])
        np.maximum(row[:, :-1], _earlier(started, number - room, every[1:]), out=row[:, :-1])
        row[:, number + 1 :] = -np.inf  # no sample has reached these stages yet
    return Schedule(layout, seconds, started, occupied, times)


def _stretched(occupied: Array, stretch: ArrayLike, started: Array) -> Array:
    """Seconds by which each sample occupies each rank; a view where all take as long."""
    return np.broadcast_to(occupied if np.ndim(stretch) == 0 else occupied * np.asarray(stretch), started.shape)


def _earlier(values: Array, numbers: NDArray[np.int64], stages: NDArray[np.int64]) -> Array:
    """What stages have on these diagonals, (replicas, stages); -inf on diagonals before the first."""
    found = values[np.maximum(numbers, 0), :, stages].T
    found[:, numbers < 0] = -np.inf
    return found


def _arrivals(arrivals: ArrayLike, num_samples: int) -> Array:
    given = _numbers("arrivals", arrivals)
    if given.shape not in ((), (1,), (num_samples,)):
        raise ConfigError("arrivals", given.shape, f"must be {num_samples} times, one for each sample")
    times = np.broadcast_to(given, (num_samples,))
    if not np.isfinite(times).all() or (np.diff(times, prepend=0.0) < 0).any():
        raise ConfigError("arrivals", times.tolist(), "must be finite seconds, not negative and not decreasing")
    return times


def predict(config: RunConfig, seconds: Seconds, arrivals: ArrayLike = 0.0, stretch: ArrayLike = 1.0) -> Schedule:
    """Schedule a run before it runs; a run without a layout is on one rank.

    Args:
        arrivals, stretch: as of `make`.
    """
    config = config.for_ranks((config.parallel or Parallel()).world_size)
    if config.swap is not None:
        return _with_swaps(config, seconds, _arrivals(arrivals, config.num_samples), stretch)
    sizes = [len(steps) for steps in config.stages()]
    replicas = 1 if config.fsdp_same_sample else None
    return make(config.layout, sizes, config.num_samples, seconds, arrivals, replicas, stretch)


def _with_swaps(config: RunConfig, seconds: Seconds, arrivals: Array, stretch: ArrayLike) -> Schedule:
    """Schedule replicas that hold one expert at a time, and take `swap_batch` samples through it before the next."""
    layout, parts = config.layout, config.segments(range(config.total_steps))
    sizes = [len(steps) for _, steps in parts]
    started = np.full((math.ceil(config.num_samples / layout.dp) + len(parts) - 1, layout.dp, len(parts)), np.nan)
    occupied = _stretched(seconds.on_ranks(Parallel(dp=layout.dp, pp=len(parts)), sizes), stretch, started)
    swaps: list[Span] = []
    for replica in range(layout.dp):
        own, now, resident = arrivals[replica :: layout.dp], 0.0, 0
        for first in range(0, len(own), config.swap_batch):
            for part in range(len(parts)):
                if part != resident:
                    ranks = (layout.rank(replica, 0, member) for member in range(layout.lockstep))
                    swaps += [
                        Span(rank, -1, now, now + seconds.swap, seconds.swap, beside="swapping") for rank in ranks
                    ]
                    now, resident = now + seconds.swap, part
                for turn in range(first, min(first + config.swap_batch, len(own))):
                    started[turn + part, replica, part] = now = max(now, own[turn])
                    now += occupied[turn + part, replica, part]
    return Schedule(layout, seconds, started, occupied, arrivals, tuple(swaps), config.swap_batch)


def run_times(config: RunConfig, step_s: list[float], decode_s: float = 0.0, swap_s: float = 0.0) -> dict[str, Any]:
    """The numbers of a run, named as in its result, predicted from the seconds of a step on each stage and, where they
    are known, of decoding a sample and of swapping experts."""
    planned = predict(config, Seconds(step_s, decode=decode_s, as_ready=config.decode == "as-ready", swap=swap_s))
    return planned.numbers() | {"time_to_first_video_s": planned.first_video_s}


@checked
def periodic(num_samples: Samples, every_s: NotNegative) -> Array:
    """Arrivals every `every_s` seconds, the first at 0, (num_samples,)."""
    return np.arange(float(num_samples)) * every_s


@checked
def poisson(num_samples: Samples, every_s: NotNegative, seed: int) -> Array:
    """Arrivals of a Poisson process, every `every_s` seconds on average, the first at 0, (num_samples,)."""
    gaps = np.random.default_rng(seed).exponential(every_s, num_samples - 1)
    return np.concatenate([[0.0], np.cumsum(gaps)])


@checked
def closed_form(
    layout: Parallel, total_steps: int, num_samples: Samples, step_s: Positive, hop_s: NotNegative = 0.0
) -> dict[str, float]:
    """Times in seconds without a schedule, for equal ranks, steps split evenly, and all samples there at the start.

    S steps of t seconds, P stages, ⌈M/dp⌉ rounds of samples and P-1 hops of h. Latency: S·t + (P-1)·h. Makespan: that,
    and ⌈S/P⌉·t for each further round, or h if that is longer (the latency is then the first sample's; others wait).
    Fill: all of the first latency but the last stage's ⌊S/P⌋·t. Bubble: 1 − the busy share of the ranks; samples play
    the part of micro-batches in Narayanan et al. 2021.

    Raises:
        ConfigError: more stages than steps, no sample, a step that takes no time, or a hop that takes less than none.
    """
    if layout.pp > total_steps:
        raise ConfigError("pp", layout.pp, f"must be at most total_steps, {total_steps}")
    rounds = math.ceil(num_samples / layout.dp)
    latency = total_steps * step_s + (layout.pp - 1) * hop_s
    interval = max(math.ceil(total_steps / layout.pp) * step_s, hop_s if layout.pp > 1 else 0.0)
    makespan = latency + (rounds - 1) * interval
    busy = num_samples * total_steps * step_s / (layout.dp * layout.pp * makespan)
    return {
        "first_sample_time_s": latency,
        "latency_s": latency,
        "makespan_s": makespan,
        "samples_per_s": num_samples / makespan,
        "steady_state_samples_per_s": layout.dp / interval,
        "fill_s": latency - total_steps // layout.pp * step_s,
        "bubble": 1 - busy,
    }
