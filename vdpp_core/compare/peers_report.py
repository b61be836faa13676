"""What is compared side by side, on which ranks and in which order; and what came out: table, ratios, files."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import torch

from vdpp_core.config import RunConfig
from vdpp_core.config.axes import AXIS_NAMES
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.execution import resolve
from vdpp_core.config.fields import EXAMPLE_IMAGE
from vdpp_core.config.layout import Parallel
from vdpp_core.runs import files, machine, runfolder, saved_latents

OFFICIAL = "official pipeline"
PEERS = {"one rank": OFFICIAL, "data parallel": "accelerate", "step pipeline": "GPipe"}
NOT_COMPARED = {
    **dict.fromkeys(AXIS_NAMES, "the layouts to compare follow from the ranks"),
    **dict.fromkeys(("stage_weights", "fsdp", "fsdp_same_sample", "fsdp_cpu_offload"), "no peer has it"),
    **dict.fromkeys(("guidance_mode", "shortcuts", "enable_memory_opt", "memory_limit_gib"), "no peer has it"),
    **dict.fromkeys(("compare_official", "decode_chunk_size"), "only denoising is compared, nothing is decoded"),
}


@dataclass(frozen=True)
class Variant:
    """One way to denoise the samples: a peer, or ours in the layout that does what the peer of its kind does."""

    name: str
    kind: str
    layout: Parallel
    ours: bool


@dataclass(frozen=True)
class Run:
    """One variant in one repeat; `run_id` is the name of its folder."""

    run_id: str
    variant: Variant
    repeat: int


def variants(config: RunConfig, ranks: int) -> list[Variant]:
    """All that is compared on so many ranks, each peer beside ours of the same kind."""
    alike = {"one rank": Parallel(), "data parallel": Parallel(dp=ranks), "step pipeline": Parallel(pp=ranks)}
    found = []
    for kind, layout in alike.items():
        found += [Variant(PEERS[kind], kind, layout, ours=False), Variant(f"ours, {layout}", kind, layout, ours=True)]
    guided = config.guidance_scale > 1
    without_peer = [("guidance", Parallel(cfg=2))] * guided + [("frames", Parallel(frames=ranks))]
    if guided and ranks >= 4 and ranks % 2 == 0:
        without_peer.append(("frames", Parallel(cfg=2, frames=ranks // 2)))
    return found + [Variant(f"ours, {layout}", kind, layout, ours=True) for kind, layout in without_peer]


def plan(compared: Sequence[Variant], repeats: int) -> list[Run]:
    """A B C, C B A, A B C, …"""
    runs: list[Run] = []
    for repeat in range(repeats):
        for variant in compared if repeat % 2 == 0 else reversed(compared):
            label = variant.name.replace(", ", "-").replace(" × ", "-").replace(" ", "")
            runs.append(Run(f"{len(runs):03d}-{label}", variant, repeat))
    return runs


def configuration(flags: dict[str, Any], ranks: int, local_ranks: int) -> RunConfig:
    """What all variants have in common: model, samples, seeds, threads. Each adds its layout and its folder.

    Args:
        flags: those of the command line by their names; None or False where they were not given.

    Raises:
        ConfigError: one line on what cannot be compared.
    """
    for name, reason in NOT_COMPARED.items():
        if flags.get(name) not in (None, False):
            raise ConfigError(name, flags[name], f"not here: {reason}")
    given = {name: flags[name] for name in RunConfig.model_fields if flags.get(name) is not None}
    config = RunConfig(**({"num_samples": 2 * ranks, "save_latents": True} | given | {"command": "benchmark"}))
    if not config.save_latents:
        raise ConfigError("save_latents", False, "not here: all latents are kept, to be compared")
    if config.model == "dummy":
        raise ConfigError("model", "dummy", "the official pipeline needs a spatio-temporal UNet: tiny, medium or svd")
    if ranks < 2:
        raise ConfigError("world_size", ranks, "must be at least 2, or there is nothing to split")
    for name, most in (("total_steps", config.total_steps), ("num_frames", config.shape[2])):
        if ranks > most:
            raise ConfigError("world_size", ranks, f"must be at most {name}, {most}, which are shared out")
    image = config.image or (None if config.random_weights else EXAMPLE_IMAGE)
    return config.replace(image=image, threads=resolve(config, local_ranks).threads)


def place(config: RunConfig) -> RunConfig:
    """The configuration with the folder where everything will be.

    Raises:
        ConfigError: there is something at that place already, or it cannot be written.
    """
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-peers-{secrets.token_hex(2)}"
    config = config.replace(output_dir=config.output_dir or runfolder.runs_root() / name)
    return config.replace(output_dir=runfolder.check_place(config))


def of_run(config: RunConfig, folder: Path, run: Run) -> RunConfig:
    return config.replace(parallel=run.variant.layout, output_dir=folder / run.run_id)


def prepare(config: RunConfig, runs: Sequence[Run]) -> Path:
    """Make a run folder for each of ours, and for each of the peers one for its latents, in a folder of their own."""
    config = place(config)
    assert config.output_dir is not None
    for run in runs:
        ready = of_run(config, config.output_dir, run)
        if run.variant.ours:
            runfolder.create(ready)
        else:
            (config.output_dir / run.run_id / "latents").mkdir(parents=True)
    return config.output_dir


def entry(run: Run) -> dict[str, Any]:
    """What `table` wants to know of a run that no measurement tells."""
    variant = run.variant
    return {
        "run_id": run.run_id,
        "variant": variant.name,
        "kind": variant.kind,
        "ours": variant.ours,
        "ranks": variant.layout.world_size,
        "repeat": run.repeat,
    }


def difference(folder: Path, run_id: str, reference: str, num_samples: int) -> dict[str, Any]:
    """How many samples have the latents of the run `reference`, bit for bit; the largest relative error of the rest."""
    equal, errors = 0, []
    for sample in range(num_samples):
        expected, found = (saved_latents.load_latents(folder / name, sample) for name in (reference, run_id))
        equal += torch.equal(found, expected)
        errors.append(((found.double() - expected.double()).norm() / expected.double().norm()).item())
    return {"equal_latents": equal, "relative_error": max(errors)}


def table(measured: Sequence[dict[str, Any]], num_samples: int) -> pd.DataFrame:
    """One row a variant, from one entry a run.

    Args:
        measured: variant, kind, ours, ranks, repeat, makespan_s, latency_s (of each sample; empty where not known),
            equal_latents and relative_error.

    Returns:
        median, least and greatest of the makespan, and of its ratios to those of the official pipeline
        (`of_official…`) and of the peer of the same kind (`of_peer…`) in the same repeat; NaN where there is none.
    """
    runs = pd.DataFrame(measured)
    makespans = runs.pivot(index="repeat", columns="variant", values="makespan_s")
    rows = []
    for variant, own in runs.groupby("variant", sort=False):
        kind, ours, ranks = own[["kind", "ours", "ranks"]].iloc[0]
        seconds = makespans[variant]
        peer = makespans.get(PEERS.get(kind, "")) if ours else None
        latencies = [latency for latencies in own["latency_s"] for latency in latencies]
        rows.append(
            {"variant": variant, "kind": kind, "ours": bool(ours), "ranks": int(ranks)}
            | _spread("makespan_s", seconds)
            | {"samples_per_s": num_samples / seconds.median(), "latency_s": median(latencies) if latencies else None}
            | _spread("of_official", seconds / makespans[OFFICIAL])
            | _spread("of_peer", seconds / (float("nan") if peer is None else peer))
            | {"equal_latents": int(own["equal_latents"].min()), "samples": num_samples}
            | {"max_relative_error": float(own["relative_error"].max())}
        )
    return pd.DataFrame(rows)


def _spread(name: str, values: pd.Series) -> dict[str, float]:
    return {name: values.median(), f"{name}_least": values.min(), f"{name}_greatest": values.max()}


def facts(config: RunConfig, ranks: int, repeats: int) -> dict[str, Any]:
    """What was compared, and on what."""
    execution = resolve(config)
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        "world_size": ranks,
        "repeats": repeats,
        "device": execution.device_type,
        "dtype": execution.dtype_name,
        "backend": execution.backend,
        "config": json.loads(config.to_json()),
    }


def small_print(told: dict[str, Any]) -> str:
    """The small print of the figure, from `facts` or what peers.json recorded of them."""
    config, versions = RunConfig(**told["config"]), told["versions"]
    libraries = ", ".join(f"{name} {versions[name]}" for name in ("torch", "diffusers", "accelerate"))
    frames, rows, columns = config.shape[2:]
    model = f"{config.model_id or config.model}{' (random weights)' * config.random_weights}"
    name = config.output_dir.name if config.output_dir else ""
    return (
        f"{machine.hardware_name(told['hardware'])}, {told['device']}, {told['dtype']}, {config.threads} thread(s) "
        f"a rank; {model}, latents {frames} × {rows} × {columns}, {config.total_steps} "
        f"steps, {config.num_samples} samples, repeated {told['repeats']} × in alternating order\n"
        f"{libraries}; {told['date'][:10]}; {name}"
    )


def write(folder: Path, told: dict[str, Any], measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare the latents, and write peers.csv, peers.png and, last, peers.json.

    Args:
        measured: an entry a run as `table` wants it, with its run_id and still without what its latents tell.
    """
    from vdpp_core.plots import peer_comparison  # seconds, that checking the arguments does not need

    num_samples = told["config"]["num_samples"]
    reference = next(run["run_id"] for run in measured if run["variant"] == OFFICIAL)
    measured = [run | difference(folder, run["run_id"], reference, num_samples) for run in measured]
    rows = table(measured, num_samples)
    files.write_atomically(folder / "peers.csv", rows.to_csv(index=False))
    peer_comparison.peers(rows, small_print(told)).savefig(folder / "peers.png")
    known = json.loads(rows.to_json(orient="records", double_precision=15))  # null where a number is not known
    result = told | {"rows": known, "runs": measured}
    files.write_atomically(folder / "peers.json", json.dumps(result, indent=2) + "\n")
    return result


def shown(folder: Path, as_json: bool) -> str:
    """What the command prints of peers.json."""
    text = (folder / "peers.json").read_text(encoding="utf-8")
    if as_json:
        return text.strip()
    result = json.loads(text)
    rows = pd.DataFrame(result["rows"])
    columns = {
        "variant": rows["variant"],
        "ranks": rows["ranks"],
        "makespan (s)": _shown_spread(rows, "makespan_s"),
        "samples/s": rows["samples_per_s"].map("{:.3f}".format),
        "latency (s)": ["" if pd.isna(value) else f"{value:.3f}" for value in rows["latency_s"]],
        "/ official": _shown_spread(rows, "of_official"),
        "/ peer of its kind": _shown_spread(rows, "of_peer"),
        "equal latents": [f"{equal} of {of}" for equal, of in zip(rows["equal_latents"], rows["samples"], strict=True)],
        "largest error": ["0" if value == 0 else f"{value:.1e}" for value in rows["max_relative_error"]],
    }
    head = "median (least – greatest) of the repeats; a ratio is one of two makespans of the same repeat"
    return "\n".join([small_print(result), head, pd.DataFrame(columns).to_string(index=False), f"folder: {folder}"])


def _shown_spread(rows: pd.DataFrame, name: str) -> list[str]:
    spreads = rows[[name, f"{name}_least", f"{name}_greatest"]].astype(float)
    return [
        "" if pd.isna(middle) else f"{middle:.3f} ({least:.3f} – {greatest:.3f})"
        for middle, least, greatest in spreads.itertuples(index=False)
    ]
