"""What is printed of a run that has ended."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from vdpp_core.cli import arguments
from vdpp_core.cli.words import counted
from vdpp_core.compare.official import in_words
from vdpp_core.config import RunConfig
from vdpp_core.models.images import how_it_fits
from vdpp_core.runs import machine
from vdpp_core.runs.run import Run

MOST_LISTED = 8  # samples


def run(folder: Path, as_json: bool) -> None:
    """Print the result of a run: a summary, or all of result.json."""
    run = Run(folder)
    result, config = run.result() or {}, run.config
    if as_json:
        print(json.dumps(result, indent=2))
        return
    print(f"{config.layout}, {machine.hardware_name(result['hardware'])}, {result['dtype']}, {result['backend']}")
    if config.command == "simulate":
        for line in _assignment(config):
            print(line)
    for name, value in (_summary(result) | _videos(result, config)).items():
        print(f"  {name:34} {value}")
    print("where the time went (s, rank by rank)", *_time_spent(result), sep="\n")
    print(f"run folder: {folder}")
    if config.profile:
        print(f"profile: {folder / 'profile'}", f"draw it: python -m launch trace {folder.name}", sep="\n")
    arguments.warn(f"disturbed: {line}" for line in result.get("disturbed") or [])


def _time_spent(result: dict[str, Any]) -> list[str]:
    """A line for each rank, without the parts that took no time anywhere."""
    table = pd.DataFrame(result["time_s_per_rank"]).rename_axis("rank").reset_index()
    table.insert(len(table.columns) - 1, "cold step", result["cold_step_s_per_rank"])
    table = table.loc[:, (table >= 0.05).any() | (table.columns == "rank")].rename(columns={"warm_up": "warm-up"})
    return ["  " + line for line in table.to_string(index=False, float_format="{:.1f}".format, na_rep="–").split("\n")]


def _assignment(config: RunConfig) -> list[str]:
    """The steps of each rank in the order of execution, and counted down as in the documents."""
    lines = []
    layout = config.layout
    for rank in range(layout.world_size):
        replica, stage, member, copy = layout.place(rank)
        steps, last = config.steps_of(rank), config.total_steps - 1
        partners = layout.partners(stage, copy, stage + 1)
        others = ", ".join(str(layout.rank(replica, stage + 1, member, other)) for other in partners)
        goal = f"to rank{'s' * (len(partners) > 1)} {others}" if partners else "final result"
        countdown = ", ".join(str(last - step) for step in steps)
        lines.append(f"rank {rank}, replica {replica}: steps {steps[0]}–{steps[-1]} ({countdown} to go) → {goal}")
    return lines


def _summary(result: dict[str, Any]) -> dict[str, str]:
    rate = result["steady_state_samples_per_s"]
    predicted = result["predicted"] or {}
    peak = predicted.get("max_peak_memory_gb", math.nan)
    return {
        "samples finished": str(result["samples_finished"]),
        "time to first sample (s)": f"{result['first_sample_time_s']:.3f}",
        "latency of each sample (s)": _listed(result["latency_s"], 3),
        "interval between samples (s)": _listed(result["interval_s"], 3) or "needs two samples",
        "makespan (s)": f"{result['makespan_s']:.3f}",
        "samples/s, fill included": f"{result['samples_per_s']:.4f}",
        "samples/s, steady state": "needs more samples on each rank" if rate is None else f"{rate:.4f}",
        "utilisation per rank": ", ".join(f"{share:.0%}" for share in result["utilisation_per_rank"]),
        "peak memory per rank (GB)": ", ".join(f"{peak:.3f}" for peak in result["peak_memory_gb_per_rank"]),
        "predicted peak memory (GB)": "not predicted" if math.isnan(peak) else f"{peak:.3f}",
    } | _handoffs(result.get("handoff_bytes_per_rank", []), predicted)


def _handoffs(measured: Sequence[int | None], predicted: dict[str, Any]) -> dict[str, str]:
    if not any(measured):
        return {}
    lines = {"hand-off of each rank (MB)": _megabytes(measured)}
    if "solver" in predicted:
        lines["predicted hand-off (MB)"] = f"{_megabytes(predicted['handoff_bytes_per_rank'])} ({predicted['solver']})"
    return lines


def _megabytes(sizes: Sequence[int | None]) -> str:
    return ", ".join("–" if size is None else f"{size / 1e6:.4g}" for size in sizes)


def _listed(seconds: Sequence[float], digits: int) -> str:
    rest = " …" if len(seconds) > MOST_LISTED else ""
    return ", ".join(f"{value:.{digits}f}" for value in seconds[:MOST_LISTED]) + rest


def _videos(result: dict[str, Any], config: RunConfig) -> dict[str, str]:
    if config.command != "generate":
        return {}
    seen = {}
    if config.rows is not None:
        seen["manifest"] = f"{config.manifest}, {counted(len(config.rows), 'row')}; videos.csv names the video of each"
    elif config.is_svd and config.image_path is not None:
        seen["image"] = how_it_fits(config.image_path, config.image_size)
    frames = config.shape[2] if config.is_svd else config.num_frames
    videos = f"{result['videos_written']} × {counted(frames, 'frame')}" if frames else str(result["videos_written"])
    lines = seen | {
        "videos": f"{videos} at {config.fps} frames/s, in videos/",
        "decoding and writing each (s)": _listed(result["decode_s"], 2),
    }
    if official := result["official"]:
        lines |= in_words(official)
        if result["dtype"] == "float16":
            lines["frames"] += "; diffusers decodes in fp16, this package in fp32"
        if official["max_batch_difference"] is not None:
            lines["batches"] = (
                "each video was decoded alone; the official pipeline's decoding chunks cross from one video of a batch "
                f"into the next, which changes its frames by up to {official['max_batch_difference']} of 255"
            )
    return lines
