"""Who computes which sample when, before it runs: replicas × stages, and closed forms where there are some."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.layout import IN_FLIGHT, Parallel
from vdpp_core.runs.metrics import Array, Span, numbers_of

LONGEST_S = 1e9  # thirty years
MOST_SAMPLES = 100_000  # as in a RunConfig
AHEAD = IN_FLIGHT + 2  # samples that a stage can be ahead of the next: besides those, one received and one at work


@dataclass(frozen=True)
class Seconds:
    """What a sample takes of a rank's time.

    step: of a step: one number for all ranks, one for each stage, or one for each replica and stage.
    hop: from the end of a stage to the beginning of the next; the link between them carries one sample at a time.
    encode, decode: on the first stage before the first step, on the last stage after the last.

    Raises:
        ConfigError: a step takes no time, or anything less than none.
    """

    step: ArrayLike
    hop: float = 0.0
    encode: float = 0.0
    decode: float = 0.0

    def __post_init__(self) -> None:
        for name in ("step", "hop", "encode", "decode"):
            value = getattr(self, name)
            try:
                numbers = np.asarray(value, dtype=float)
            except (TypeError, ValueError, OverflowError):
                raise ConfigError(f"{name}_s", value, "must be numbers of seconds") from None
            if name == "step" and not (numbers.size and ((numbers > 0) & (numbers < LONGEST_S)).all()):
                raise ConfigError("step_s", numbers.ravel().tolist(), f"must be seconds above 0, below {LONGEST_S:g}")
            if name != "step" and not (numbers.ndim == 0 and 0 <= numbers < LONGEST_S):
                raise ConfigError(f"{name}_s", value, f"must be seconds below {LONGEST_S:g}, not negative")

    def on_ranks(self, layout: Parallel, sizes: Sequence[int]) -> Array:
        """Seconds that a sample occupies each rank, (dp, pp)."""
        try:
            step = np.broadcast_to(np.asarray(self.step, dtype=float), (layout.dp, layout.pp))
        except ValueError:
            allowed = f"must be one number, one for each of {layout.pp} stages, or {layout.dp} × {layout.pp}"
            raise ConfigError("step_s", np.shape(self.step), allowed) from None
        taken = step * np.asarray(sizes)
        taken[:, 0] += self.encode
        taken[:, -1] += self.decode
        return taken


@dataclass(frozen=True)
class Schedule:
    """The schedule of a run; `make` and `predict` compute it.

    begun: (rounds + pp - 1, dp, pp): when stage p takes up its replica's sample number r, at [r + p, replica, p]; NaN
        where there is no such sample.
    occupied: (dp, pp) seconds that a sample occupies a rank.
    arrivals: (num_samples,) when each sample may begin at the earliest.
    """

    layout: Parallel
    seconds: Seconds
    begun: Array
    occupied: Array
    arrivals: Array

    def taken_up(self, stage: int) -> Array:
        """(rounds, dp): when a stage takes up the samples of each replica, NaN where there are fewer."""
        rounds = len(self.begun) - self.begun.shape[2] + 1
        return self.begun[stage : stage + rounds, :, stage]

    def of_samples(self, values: Array) -> Array:
        """(rounds, dp) -> (num_samples,): sample m is number m // dp of replica m % dp."""
        return values.ravel()[: len(self.arrivals)]

    @property
    def ready_s(self) -> Array:
        """(num_samples,): when each sample is done, decoding included."""
        return self.of_samples(self.taken_up(self.begun.shape[2] - 1) + self.occupied[:, -1])

    @property
    def response_s(self) -> Array:
        """(num_samples,): from a sample's arrival until it is done, waiting for a rank included."""
        return self.ready_s - self.arrivals

    def spans(self) -> list[Span]:
        """One for each sample and rank."""
        layout, (_, replicas, stages) = self.layout, self.begun.shape
        starts = [self.of_samples(self.taken_up(stage)).tolist() for stage in range(stages)]
        taken = self.occupied.tolist()
        return [
            Span(layout.rank(sample % replicas, stage, member), sample, start, start + seconds, seconds)
            for sample in range(len(self.arrivals))
            for stage in range(stages)
            for start, seconds in ((starts[stage][sample], taken[sample % replicas][stage]),)
            for member in range(layout.lockstep)
        ]

    def numbers(self) -> dict[str, Any]:
        """What `metrics.numbers` says of the spans, which this does not need to make; latency from step to step,
        without encoding before the first and decoding after the last."""
        layout, (_, replicas, stages) = self.layout, self.begun.shape
        done = (~np.isnan(self.taken_up(0))).sum(axis=0)
        first = np.stack([self.taken_up(stage)[0] for stage in range(stages)], axis=1)
        last = np.stack([np.fmax.reduce(self.taken_up(stage)) for stage in range(stages)], axis=1)

        def of_ranks(values: Array, elsewhere: float) -> Array:
            more = layout.world_size - values.size * layout.lockstep  # fsdp_same_sample: replicas that only help
            return np.append(np.repeat(values, layout.lockstep), np.full(more, elsewhere))

        return numbers_of(
            layout,
            replica=np.arange(len(self.arrivals)) % replicas,
            latency=self.ready_s - self.of_samples(self.taken_up(0)) - self.seconds.encode - self.seconds.decode,
            ended=self.ready_s,
            busy=of_ranks(self.occupied * done[:, None], 0.0),
            taken=of_ranks(first, np.nan),
            left=of_ranks(last + self.occupied, np.nan),
        )


def make(
    layout: Parallel,
    sizes: Sequence[int],
    num_samples: int,
    seconds: Seconds,
    arrivals: ArrayLike = 0.0,
    replicas: int | None = None,
) -> Schedule:
    """The schedule of samples that go through replicas × stages, sample m through replica m % dp.

    A stage takes up a sample when it has come from the stage before, its own earlier sample is done, and the next stage
    has taken up the one that is AHEAD before it. Anti-diagonal by anti-diagonal of samples × stages, all replicas at
    once: 4096 stages and 10 000 samples take seconds, and 8 bytes for each of their products.

    Args:
        sizes: steps of each stage.
        arrivals: when each sample is there, in seconds, not decreasing; 0: all at once.
        replicas: where only so many of the layout's take samples of their own.

    Raises:
        ConfigError: no sample, no steps of a stage, or arrivals that are not one finite time for each.
    """
    _samples(num_samples)
    whole = isinstance(sizes, list | tuple) and all(isinstance(size, int) and size > 0 for size in sizes)
    if not whole or len(sizes) != layout.pp:
        raise ConfigError("sizes", sizes, f"must be the steps of {layout.pp} stages, at least 1 each")
    if replicas is not None and (not _whole(replicas) or not 1 <= replicas <= layout.dp):
        raise ConfigError("replicas", replicas, f"must be a whole number from 1 to {layout.dp}, those of the layout")
    replicas, stages = replicas or layout.dp, layout.pp
    times = _arrivals(arrivals, num_samples)
    rounds = math.ceil(num_samples / replicas)
    occupied = seconds.on_ranks(layout, sizes)[:replicas]
    coming = np.full((rounds + stages - 1) * replicas, np.nan)
    coming[:num_samples] = times
    begun = np.full((rounds + stages - 1, replicas, stages), -np.inf)
    begun[:, :, 0] = coming.reshape(-1, replicas)
    arrived = np.full((replicas, stages - 1), -np.inf)
    for number, row in enumerate(begun):
        if number > 0:
            done = begun[number - 1] + occupied
            np.maximum(row, done, out=row)
            arrived = np.maximum(done[:, :-1], arrived) + seconds.hop  # a link carries one sample at a time
            np.maximum(row[:, 1:], arrived, out=row[:, 1:])
        if number >= AHEAD - 1:
            np.maximum(row[:, :-1], begun[number - AHEAD + 1, :, 1:], out=row[:, :-1])
        row[:, number + 1 :] = -np.inf  # nothing has come so far yet
    return Schedule(layout, seconds, begun, occupied, times)


def predict(config: RunConfig, seconds: Seconds, arrivals: ArrayLike = 0.0) -> Schedule:
    """The schedule of a run before it runs."""
    config = config.for_ranks((config.parallel or Parallel()).world_size)
    sizes = [len(steps) for steps in config.stages()]
    replicas = 1 if config.fsdp_same_sample else None
    return make(config.layout, sizes, config.num_samples, seconds, arrivals, replicas)


def run_times(config: RunConfig, step_s: list[float]) -> dict[str, Any]:
    """The numbers of a run, as `metrics.numbers` names them, predicted from the seconds of a step on each stage."""
    return predict(config, Seconds(step_s)).numbers()


def _samples(num_samples: int) -> None:
    if not _whole(num_samples) or num_samples < 1:
        raise ConfigError("num_samples", num_samples, "must be a whole number of at least 1")
    if num_samples > MOST_SAMPLES:
        raise ConfigError("num_samples", num_samples, f"must be at most {MOST_SAMPLES}")


def _whole(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def _arrivals(arrivals: ArrayLike, num_samples: int) -> Array:
    try:
        times = np.broadcast_to(np.asarray(arrivals, dtype=float), (num_samples,))
    except (TypeError, ValueError, OverflowError):
        raise ConfigError("arrivals", np.shape(arrivals), f"must be {num_samples} times, one for each sample") from None
    if not np.isfinite(times).all() or (np.diff(times, prepend=0.0) < 0).any():
        raise ConfigError("arrivals", times.tolist(), "must be finite seconds, not negative and not decreasing")
    return times


def periodic(num_samples: int, every_s: float) -> Array:
    """Arrivals every so many seconds, the first at 0."""
    _samples(num_samples)
    return np.arange(float(num_samples)) * _interval(every_s)


def poisson(num_samples: int, every_s: float, seed: int) -> Array:
    """Arrivals of a Poisson process, every so many seconds on average, the first at 0."""
    _samples(num_samples)
    gaps = np.random.default_rng(seed).exponential(_interval(every_s), num_samples - 1)
    return np.concatenate([[0.0], np.cumsum(gaps)])


def _interval(every_s: float) -> float:
    if not isinstance(every_s, Real) or not 0 <= every_s < LONGEST_S:
        raise ConfigError("every_s", every_s, f"must be seconds below {LONGEST_S:g}, not negative")
    return every_s


def closed_form(
    layout: Parallel, total_steps: int, num_samples: int, step_s: float, hop_s: float = 0.0
) -> dict[str, float]:
    """What follows without a schedule for equal ranks, steps split evenly, and all samples there at once.

    S steps of t seconds, P stages, ⌈M/dp⌉ rounds of samples and P-1 hops of h. Latency: S·t + (P-1)·h. Makespan: that,
    and ⌈S/P⌉·t for each further round, or h if that is longer (then the latency is the first sample's, others wait).
    Fill: all of the first latency but the last stage's ⌊S/P⌋·t.

    Raises:
        ConfigError: more stages than steps, no sample, a step that takes no time, or a hop of less.
    """
    Seconds(step_s, hop_s)
    _samples(num_samples)
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


def documented() -> list[tuple[str, Schedule]]:
    """The schedules that the documents draw or reckon with (section 8), on seven A5000, 28 steps a sample.

    The dummy network alone took 3.93 s, on seven cards 7.23 s: six hops of 0.55 s. Their table expects 4.2 and 8 s.
    """
    one, seven, sizes = Parallel(), Parallel(pp=7), [4] * 7
    measured = Seconds(3.93 / 28, hop=(7.23 - 3.93) / 6)
    expected = Seconds(4.2 / 28, hop=(8 - 4.2) / 6)
    return [
        ("one sample, seven cards: each waits for the one before", make(seven, sizes, 1, measured)),
        ("seven samples, hand-offs free: the drawing of the steady state", make(seven, sizes, 7, Seconds(0.15))),
        ("ten samples, one card (their table: 42 s)", make(one, [28], 10, Seconds(0.15))),
        ("ten samples, seven cards (their table: about 14 s)", make(seven, sizes, 10, expected)),
    ]
