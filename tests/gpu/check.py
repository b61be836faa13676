"""The published memory experiment on the CUDA devices that are here, predictions beside it: python -m tests.gpu.check

The full-size UNet with random weights, two steps of one sample a run, since peak memory and seconds of a step are all
that is wanted. A run that ends for lack of memory is a result; one that ends otherwise makes this command end with 1.
On several devices the second half is `python -m vdpp_core peers`. Nothing else should be using the devices. `--dry`
prints what would be run here, and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import torch

import launch
from tests.doubles import cards as doubles
from vdpp_core import Parallel, RunConfig
from vdpp_core.config.execution import resolve
from vdpp_core.parallel import devices
from vdpp_core.parallel.devices import GIB
from vdpp_core.predict import communicators, memory, published
from vdpp_core.runs import files, machine
from vdpp_core.runs.event_types import Event

Row = dict[str, Any]

COMMAND = "python -m tests.gpu.check"
# fp16, which every card has, also for the peers: with random weights no activation exceeds 10, no latent 5,000
DTYPE = "fp16"
PEERS_STEPS = 8  # and so the most ranks that they are compared on
PEERS = [
    *("--model", "svd", "--random-weights", "--device", "cuda", "--dtype", DTYPE, "--total-steps", str(PEERS_STEPS)),
    *("--latent-shape", "1", "4", "14", "72", "128"),
]
PUBLISHED_STEPS = 28
PUBLISHED: list[Row] = published.figures()["memory_cfg3_28steps_1sample"]
ONE_RANK = [row for row in PUBLISHED if row["mode"] == "pipeline" and row["gpus"] == 1]
FSDP = [row for row in PUBLISHED if row["mode"] == "fsdp"]
TOO_LARGE = next(row for row in ONE_RANK if row["outcome"] == "oom")
LIMIT_GIB = round(TOO_LARGE["gpu_capacity_gib"] - memory.CONTEXT_GIB, 2)  # what PyTorch's allocator had of that card
BASE = RunConfig(
    command="benchmark",
    model="svd",
    random_weights=True,
    dtype=DTYPE,
    device="cuda",
    total_steps=2,
    num_samples=1,
    warmup_samples=0,
    guidance_mode="sequential",
)


def candidates(cards: int) -> list[RunConfig]:
    """All that is to be measured on so many cards, whether or not they have the memory for it."""
    found = []
    for row in ONE_RANK:
        shape = BASE.replace(latent_shape=_latents(row))
        found += [shape, shape.replace(guidance_mode="batched")]
    too_large = BASE.replace(latent_shape=_latents(TOO_LARGE))
    found += [too_large.replace(forward_chunking=True), too_large.replace(memory_limit_gib=LIMIT_GIB)]
    if cards > 1:
        layout = Parallel(dp=cards, fsdp=True)
        sharded = [
            BASE.replace(latent_shape=_latents(row), parallel=layout, fsdp_same_sample=True)
            for row in sorted(FSDP, key=lambda row: row["id"])
        ]
        found += [*sharded, sharded[-1].replace(memory_limit_gib=LIMIT_GIB)]
        frames = Parallel(frames=min(cards, too_large.shape[2]))
        found += [too_large.replace(parallel=layout) for layout in (frames, Parallel(cfg=2))]
    return found


def plan(cards: int) -> tuple[list[RunConfig], list[str]]:
    """What is measured on so many cards here, and in words what is left out: batched guidance that finds no room."""
    configs, left_out = [], []
    for config in candidates(cards):
        needed, there = memory.needed(config), whole(config)
        if config.sequential or needed < there:
            configs.append(config)
        else:
            left_out.append(f"{_what(named(config))}: {needed / GIB:.1f} GiB needed, {there / GIB:.1f} GiB there")
    if cards == 1:
        left_out.append("the peers side by side: they need two cards")
    return configs, left_out


def whole(config: RunConfig) -> int:
    """Bytes of the smallest device of a run's ranks, without the limit that it plays."""
    execution = resolve(config, (config.parallel or Parallel()).world_size)
    return devices.capacity(config.replace(memory_limit_gib=None), execution)


def expectation(config: RunConfig) -> memory.Fit:
    """Whether a run should find room: in its device, and in its limit. On CUDA what is outside comes on top of that."""
    capacity: float = whole(config)
    if config.memory_limit_gib is not None:
        capacity = min(capacity, config.memory_limit_gib * GIB + memory.outside_a_limit(config))
    return memory.fit(config, capacity)


def published(config: RunConfig) -> Row | None:
    """The published row of a run's shape. Sequential guidance, unchunked: only so do predictions meet those peaks."""
    layout = config.parallel or Parallel()
    if config.model != "svd" or not config.sequential or config.chunked:
        return None
    rows = FSDP if layout.shards > 1 else ONE_RANK if layout.world_size == 1 else []
    return next((row for row in rows if _latents(row) == config.shape), None)


def named(config: RunConfig) -> Row:
    """The columns that tell one run from another."""
    return {
        "shape": _shape(config),
        "layout": str(config.parallel or Parallel()),
        "guidance": ("sequential" if config.sequential else "batched") + ", chunked" * config.chunked,
        "limit_gib": config.memory_limit_gib,
    }


def row(config: RunConfig, result: dict[str, Any], events: Sequence[Event], expected: memory.Fit | None = None) -> Row:
    """A run that has ended, prediction and published figures beside it; None where there is nothing to tell.

    context_gib: what a card has in use beyond the allocator's peak, the most of all ranks. Too low where the allocator
    gave back segments, too high by what other processes use.
    """
    facts: list[dict[str, float]] = result["memory_per_rank"]
    full: dict[str, Any] = (result.get("failure") or {}).get("oom") or {}
    steps = [event.seconds for event in events if event.kind == "step" and event.sample >= 0]
    contexts = [fact["device_used_gb"] - fact["reserved_gb"] for fact in facts if "device_used_gb" in fact]
    predicted, measured = memory.predict(config).total / 1e9, result["max_peak_memory_gb"]
    known = published(config) or {}
    known_s, known_gib = known.get("first_sample_time_s"), known.get("requested_gib")
    return {
        "run_id": result["run_id"],
        **named(config),
        "expected": expected and ("ok" if expected.fits else "oom"),
        "outcome": result["outcome"],
        "cause": (result.get("failure") or {}).get("cause"),
        "predicted_peak_gb": predicted,
        "peak_gb": measured,
        "ratio": measured and measured / predicted,
        "reserved_gb": max((fact["reserved_gb"] for fact in facts if "reserved_gb" in fact), default=None),
        "communicators": communicators.most(config),
        "context_gib": max(contexts) * 1e9 / GIB if contexts else None,
        "step_s": median(steps) if steps else None,
        "published_outcome": known.get("outcome"),
        "published_gpus": known.get("gpus"),
        "published_peak_gb": known.get("peak_gb_per_gpu"),
        "published_step_s": known_s and known_s / PUBLISHED_STEPS,
        "request_gib": full["requested_gb"] * 1e9 / GIB if full.get("requested_gb") else None,
        "expected_request_gib": expected and expected.request and expected.request / GIB,
        "published_request_gib": known_gib if result["outcome"] == "oom" else None,
    }


def measure(sweep: launch.Sweep) -> list[Row]:
    """A row, and a line, for each run as it ends. Whatever interrupts this stops the sweep."""
    rows: list[Row] = []
    began = time.monotonic()
    try:
        for job in sweep.jobs:
            config = RunConfig.read(job.folder)
            expected = expectation(config)  # meanwhile the run is under way
            rows.append(row(config, job.wait(), job.run.events(), expected))
            print(f"{len(rows)}/{len(sweep.runs)} {time.monotonic() - began:4.0f} s  {_line(rows[-1])}", flush=True)
        sweep.wait()
    except BaseException:
        sweep.stop()
        raise
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows to read; a column that has nothing to tell is left out."""
    frame = pd.DataFrame(rows).drop(columns=["run_id", "cause"]).dropna(axis="columns", how="all")
    return frame.to_string(index=False, na_rep="–", float_format="{:.4g}".format)


def communicator_gib(rows: Sequence[Row]) -> float | None:
    """GiB that one more communicator adds to what is in use beside the allocator, by least squares over the runs that
    ended well; None where these do not tell: all with as many, or no more in use where there are more."""
    told = [row for row in rows if row["outcome"] == "ok" and row["context_gib"] is not None]
    numbers = [row["communicators"] for row in told]
    if len(set(numbers)) < 2:
        return None
    slope = float(np.polyfit(numbers, [row["context_gib"] for row in told], 1)[0])
    return slope if slope > 0 else None


def peers_arguments(cards: int) -> list[str]:
    """What comes after `python` to compare the peers on so many cards."""
    return ["-m", "vdpp_core", "peers", "--json", "--world-size", str(min(cards, PEERS_STEPS)), *PEERS]


def peers(cards: int) -> Row | None:
    """What `python -m vdpp_core peers` tells of so many cards; None where there is one alone, or it failed."""
    if cards < 2:
        return None
    command = [sys.executable, *peers_arguments(cards)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else None


def write(
    folder: Path,
    rows: Sequence[Row],
    left_out: Sequence[str],
    seconds: float,
    used: float | None,
    compared: Row | None = None,
) -> Path:
    """CARD-DATE.json in `folder`; a later one of the same card and day replaces it."""
    hardware = machine.hardware()
    card = hardware["gpus"][0] if hardware["gpus"] else hardware["cpu"]
    day = time.strftime("%Y-%m-%d")
    facts = {
        "card": card,
        "cards": len(hardware["gpus"]),
        "date": day,
        "command": COMMAND,
        "seconds": round(seconds, 1),
        "versions": machine.versions(),
        "hardware": hardware,
        "assumed_context_gib": memory.CONTEXT_GIB,
        "assumed_communicator_gib": communicators.gib_each()[0],
        "communicator_gib": communicator_gib(rows),
        "used_before_gib": used,
        "left_out": list(left_out),
        "rows": list(rows),
        "peers": compared,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{re.sub(r'[^a-z0-9]+', '-', card.lower()).strip('-')}-{day}.json"
    files.write_atomically(path, json.dumps(facts, indent=2) + "\n")
    return path


def used_gib() -> float | None:
    """What is in use on the first card, by whomever; None where nvidia-smi does not say."""
    if not torch.cuda.is_available():
        return None
    card = f"GPU-{str(torch.cuda.get_device_properties(0).uuid).removeprefix('GPU-')}"
    command = ["nvidia-smi", "-i", card, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        return float(said) / 1024
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def check(
    configs: Sequence[RunConfig],
    left_out: Sequence[str] = (),
    folder: Path = communicators.MEASURED,
    root: Path | None = None,
    cards: int = 1,
) -> int:
    """Measure (a sweep under `root`, then the peers on several cards), print, write; the exit code: 1 if a run ended
    neither well nor out of memory, or the comparison did."""
    began, used = time.monotonic(), used_gib()
    sweep = launch.sweep(configs, root=root)
    print(f"sweep {sweep.run_id}: {len(sweep.runs)} runs", flush=True)
    rows, compared = measure(sweep), peers(cards)
    seconds = time.monotonic() - began
    print(f"\n{table(rows)}\n")
    if compared is not None:
        print(f"{pd.DataFrame(compared['rows']).to_string(index=False, na_rep='–', float_format='{:.4g}'.format)}\n")
    for words in left_out:
        print(f"left out: {words}")
    before = "unknown" if used is None else f"{used:.2f} GiB"
    print(f"context: {memory.CONTEXT_GIB} GiB assumed; in use on the first card before the runs: {before}")
    each, source = communicators.gib_each()
    slope = communicator_gib(rows)
    found = "these runs do not tell" if slope is None else f"measured now: {slope:.3f} GiB, which predictions take"
    print(f"a communicator of NCCL: {each:.3g} GiB {source}; {found}")
    print(f"{seconds:.0f} s; written to {write(folder, rows, left_out, seconds, used, compared)}")
    bad = [one for one in rows if one["outcome"] not in ("ok", "oom")]
    for one in bad:
        print(f"FAILED  {_line(one)}, {one['cause'] or 'no cause known'}; see {sweep.folder / one['run_id']}")
    if cards > 1 and compared is None:
        print("FAILED  python -m vdpp_core peers; what it said is above")
    return 1 if bad or (cards > 1 and compared is None) else 0


def _latents(published_row: Row) -> tuple[int, ...]:
    return 1, 4, published_row["frames"], *published_row["latent_hw"]


def _shape(config: RunConfig) -> str:
    return config.size_text


def _what(one: Row) -> str:
    limit = f", limit {one['limit_gib']:g} GiB" if one["limit_gib"] else ""
    return f"{one['shape']}, {one['layout']}, {one['guidance']}{limit}"


def _line(one: Row) -> str:
    peak = f", peak {one['peak_gb']:.3f} GB ({one['predicted_peak_gb']:.3f} predicted)" if one["peak_gb"] else ""
    step = f", {one['step_s']:.3f} s a step" if one["step_s"] else ""
    request = f", asked for {one['request_gib']:.2f} GiB" if one["request_gib"] else ""
    surprise = "" if one["outcome"] == one["expected"] else f", {one['expected']} expected"
    return f"{_what(one)}: {one['outcome']}{surprise}{peak}{request}{step}"


def show(cards: int) -> None:
    """What `check` would do on so many cards here."""
    configs, left_out = plan(cards)
    least = min(torch.cuda.get_device_capability(card) for card in range(cards))
    there = devices.capacity(BASE, resolve(BASE, cards)) / GIB
    card = f"{machine.hardware_name(machine.hardware())}, compute capability {'.'.join(map(str, least))}"
    print(f"{card}, {there:.2f} GiB: {len(configs)} runs in {DTYPE}, nothing is run now")
    for number, config in enumerate(configs, start=1):
        expected, peak = expectation(config), memory.predict(config).total / 1e9
        outcome = "ok" if expected.fits else "oom"
        print(f"{number:3}  {_what(named(config))}: {outcome} expected, peak {peak:.3f} GB predicted", flush=True)
    if cards > 1:
        print(f"peers: python {shlex.join(peers_arguments(cards))}")
    for words in left_out:
        print(f"left out: {words}")
    each, source = communicators.gib_each()
    print(f"outside PyTorch's allocator: {memory.CONTEXT_GIB} GiB, and {each:.3g} ({source}) a communicator of NCCL")
    before = next((known for known in communicators.checks() if known["cards"] == cards), None)
    print(f"time: {before['seconds']:.0f} s on {before['date']}" if before else "time: not known, not checked before")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--dry", action="store_true", help="print what would be run here, and run nothing")
    dry, pretended = parser.parse_args(argv).dry, doubles.from_environment()
    if pretended:
        if not dry:
            parser.error(f"{doubles.VARIABLE}: only with --dry (make: DRY=1), nothing can run on cards that are faked")
        with doubles.faked(*pretended):
            show(len(pretended))
        return 0
    cards = torch.cuda.device_count()
    if not cards:
        shapes = ", ".join(dict.fromkeys(map(_shape, candidates(1))))
        print(
            f"no CUDA device here, nothing was run. Where there is one: SVD's UNet with random weights at {shapes}, "
            "its peak memory beside prediction and publication, written into figures/hardware/"
        )
        return 0
    if dry:
        show(cards)
        return 0
    configs, left_out = plan(cards)
    return check(configs, left_out=left_out, cards=cards)


if __name__ == "__main__":
    raise SystemExit(main())
