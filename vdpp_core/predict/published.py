"""The figures that the documents of docs/benchmark.md publish, the runs behind them, and rates that they imply."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.layout import Parallel
from vdpp_core.predict import costs, schedule
from vdpp_core.predict.rates import Link, Rates
from vdpp_core.predict.schedule import Schedule, Seconds

STEPS = 28
VIDEO = (4, 14, 72, 128)  # latents of 14 frames of 1024 × 576 pixels
ONE_CARD = (1, 2, 3)  # memory rows of one card that finished: any of them can be calibrated on
WAITING = 5  # memory row: FSDP at 25 × 72 × 128 waited for its parameters, so the link carried at least those


def figures() -> dict[str, Any]:
    """The published figures, as the documents name them."""
    return json.loads((Path(__file__).parent / "reference" / "a5000x7.json").read_bytes())


def memory_rows() -> dict[int, dict[str, Any]]:
    """The rows of the memory experiment, by their id."""
    return {row["id"]: row for row in figures()["memory_cfg3_28steps_1sample"]}


def memory_config(row: dict[str, Any]) -> RunConfig:
    """The run of a row of the memory experiment."""
    sharded = row["mode"] == "fsdp"
    return RunConfig(
        model="svd",
        random_weights=True,
        device="cuda",
        dtype="fp16",
        total_steps=STEPS,
        latent_shape=(1, 4, row["frames"], *row["latent_hw"]),
        guidance_mode="sequential",
        fsdp_same_sample=sharded,
        parallel=Parallel(dp=row["gpus"], fsdp=True) if sharded else Parallel(pp=row["gpus"]),
    )


def rates(row: int, link_used: Link | None = None) -> Rates:
    """Rates of an RTX A5000 from a row of the memory experiment; by default with the link that row 5 implies.

    Raises:
        ConfigError: no such row of one card that finished.
    """
    if row not in ONE_CARD:
        raise ConfigError("row", row, f"must be a published run of one card that finished: {ONE_CARD}")
    facts = memory_rows()[row]
    flops = costs.cost(memory_config(facts)).flops
    source = f"published: one A5000 at {_video(facts)}"
    step_s, decode_s = facts["first_sample_time_s"] / STEPS, _decode_s()
    return Rates(flops / step_s, link_used or link(), source, on=row, decode_s=decode_s)


def _decode_s() -> float:
    """Seconds to decode one value of the latents: of the one video of 1024 × 576 pixels whose decoding was timed."""
    return figures()["single_video_1024x576_14f_25steps"]["decode_s"] / math.prod(VIDEO)


def link() -> Link:
    """The link between seven A5000, from the parameters that FSDP waited for; latency per message is not known."""
    row = memory_rows()[WAITING]
    bytes_per_s = costs.cost(memory_config(row)).gathered / (row["first_sample_time_s"] / STEPS)
    source = f"{bytes_per_s / 1e9:.2f} GB/s, published: FSDP on seven A5000 at {_video(row)} waited for its parameters"
    return Link(bytes_per_s, 0.0, source, on=WAITING)


def nearest_row(config: RunConfig) -> int:
    """The row of one card whose video is nearest in size to a run's."""
    size, rows = math.prod(config.shape[2:]), memory_rows()
    return min(ONE_CARD, key=lambda row: abs(math.log(size / rows[row]["frames"] / math.prod(rows[row]["latent_hw"]))))


def times_operations(config: RunConfig, row: int) -> float:
    """Operations of a run's step on one rank over those of a row: how far the prediction extrapolates."""
    known = costs.cost(memory_config(memory_rows()[row])).flops
    return costs.cost(config.replace(parallel=Parallel())).flops / known


class Time(NamedTuple):
    """A published time in seconds: `number` of the run `config`; `row` where it is from the memory experiment."""

    name: str
    config: RunConfig
    number: str
    seconds: float
    row: int | None = None


def times() -> Iterator[Time]:
    """The published times of SVD.

    memory: the first sample. throughput and pp: the average interval of a step pipeline. dp: the makespan of 14
    samples, of an experiment that does not state its guidance; one pass per step comes nearest to its times.
    """
    for row, facts in memory_rows().items():
        if facts["first_sample_time_s"] is not None:
            name, config = f"memory, row {row}", memory_config(facts)
            yield Time(name, config, "first_sample_time_s", facts["first_sample_time_s"], row)
    base, experiment = memory_config(memory_rows()[1]), figures()["throughput_cfg3_14x72x128"]
    for facts in experiment["rows"]:
        gpus = facts["world_size"]
        config = base.replace(num_samples=experiment["num_samples"], parallel=Parallel(pp=gpus))
        yield Time(f"throughput, pp {gpus}", config, "avg_sample_time_s", facts["avg_sample_time_s"])
    experiment = figures()["pipeline_vs_data_parallel"]
    samples = experiment["num_samples"]
    base = base.replace(num_samples=samples, latent_shape=experiment["latent_shape"], guidance_scale=1.0)
    for facts in experiment["svd_fp16"]:
        gpus = facts["world_size"]
        stages, replicas = (base.replace(parallel=Parallel(**{axis: gpus})) for axis in ("pp", "dp"))
        yield Time(f"comparison, pp {gpus}", stages, "avg_sample_time_s", facts["pipeline_avg_s"])
        yield Time(f"comparison, dp {gpus}", replicas, "makespan_s", samples / facts["data_samples_per_s"])


def schedules() -> list[tuple[str, Schedule]]:
    """The schedules of the documents' section 8, on seven A5000 with 28 steps per sample, and a caption for each.

    As that section reads them: the dummy network took 3.93 s on one card and 7.23 s on seven, so six hops of 0.55 s
    (section 2 has steps of 0.5 ms, so nearly all of both is starting up). Their table expects 4.2 and 8 s.
    """
    one, seven, sizes, free = Parallel(), Parallel(pp=7), [4] * 7, Seconds(0.15)
    measured = Seconds(3.93 / STEPS, hop=(7.23 - 3.93) / 6)
    expected = Seconds(4.2 / STEPS, hop=(8 - 4.2) / 6)
    return [
        ("one sample, seven cards: each waits for the one before", schedule.make(seven, sizes, 1, measured)),
        (
            "seven samples, hand-offs free: the drawing of the steady state",
            schedule.make(seven, sizes, 7, free),
        ),
        ("ten samples, one card (their table: 42 s)", schedule.make(one, [STEPS], 10, free)),
        ("ten samples, seven cards (their table: about 14 s)", schedule.make(seven, sizes, 10, expected)),
    ]


def _video(row: dict[str, Any]) -> str:
    return " × ".join(map(str, [row["frames"], *row["latent_hw"]]))
