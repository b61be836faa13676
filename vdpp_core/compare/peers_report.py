"""The comparison with other libraries: what is compared, in which order, and the table, ratios and files made of it."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from pandas.core.groupby import DataFrameGroupBy

from vdpp_core.config import RunConfig
from vdpp_core.config.axes import AXIS_NAMES
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.execution import resolve
from vdpp_core.config.fields import EXAMPLE_IMAGE
from vdpp_core.config.layout import Parallel
from vdpp_core.runs import files, machine, runfolder
from vdpp_core.runs.run import Run

OFFICIAL = "official pipeline"
PEERS = {"one rank": OFFICIAL, "data parallel": "accelerate", "step pipeline": "GPipe"}
NOT_COMPARED = {
    **dict.fromkeys((*AXIS_NAMES, "stage_ranks"), "the layouts follow from the number of ranks"),
    **dict.fromkeys(("stage_weights", "fsdp", "fsdp_same_sample", "fsdp_cpu_offload"), "no peer has it"),
    **dict.fromkeys(("split", "swap", "swap_batch", "swap_gb_per_s"), "no peer has it"),
    **dict.fromkeys(("guidance_mode", "shortcuts", "enable_memory_opt", "memory_limit_gib"), "no peer has it"),
    **dict.fromkeys(("compare_official", "decode_chunk_size"), "only denoising is compared, without decoding"),
}


@dataclass(frozen=True)
class Variant:
    """One way to denoise the samples: a peer, or ours in the layout that splits the work as the peer does."""

    name: str
    kind: str
    layout: Parallel
    ours: bool


@dataclass(frozen=True)
class Trial:
    """One variant in one repeat; `run_id` is the name of its folder."""

    run_id: str
    variant: Variant
    repeat: int


def variants(config: RunConfig, ranks: int) -> list[Variant]:
    """All variants on so many ranks: each peer beside ours of the same kind, then ours without a peer."""
    alike = {"one rank": Parallel(), "data parallel": Parallel(dp=ranks), "step pipeline": Parallel(pp=ranks)}
    found = []
    for kind, layout in alike.items():
        found += [Variant(PEERS[kind], kind, layout, ours=False), Variant(f"ours, {layout}", kind, layout, ours=True)]
    guided = config.guidance_passes > 1
    without_peer = [("guidance", Parallel(cfg=2))] * guided + [("frames", Parallel(frames=ranks))]
    if guided and ranks >= 4 and ranks % 2 == 0:
        without_peer.append(("frames", Parallel(cfg=2, frames=ranks // 2)))
    return found + [Variant(f"ours, {layout}", kind, layout, ours=True) for kind, layout in without_peer]


def plan(compared: Sequence[Variant], repeats: int) -> list[Trial]:
    """All trials in the order of execution: A B C, C B A, A B C, …"""
    order = [(each, n) for n in range(repeats) for each in (compared if n % 2 == 0 else reversed(compared))]
    labels = [f"ours-{each.layout.slug}" if each.ours else each.name.replace(" ", "") for each, _ in order]
    return [Trial(f"{n:03d}-{label}", *each) for n, (label, each) in enumerate(zip(labels, order, strict=True))]


def configuration(flags: dict[str, Any], ranks: int, local_ranks: int) -> RunConfig:
    """What all variants have in common: model, samples, seeds, threads. Each adds its layout and its folder.

    Args:
        flags: the command line's, by name; None or False where not given.
        ranks: of the variants that split the work.
        local_ranks: of them on this machine.

    Raises:
        ConfigError: an argument that cannot be compared, or too few or too many ranks.
    """
    for name, reason in NOT_COMPARED.items():
        if flags.get(name) not in (None, False):
            raise ConfigError(name, flags[name], f"not with peers: {reason}")
    given = {name: flags[name] for name in RunConfig.model_fields if flags.get(name) is not None}
    config = RunConfig(**({"num_samples": 2 * ranks, "save_latents": True} | given | {"command": "benchmark"}))
    if not config.save_latents:
        raise ConfigError("save_latents", False, "not with peers: all latents are saved, to compare them")
    if config.model == "dummy":
        raise ConfigError("model", "dummy", "the official pipeline needs a spatio-temporal UNet: tiny, medium or svd")
    if not config.is_svd or config.svd_experts:
        allowed = "not with peers: they are compared on Stable Video Diffusion with one UNet"
        raise ConfigError(*config.model_argument, allowed)
    if ranks < 2:
        raise ConfigError("world_size", ranks, "must be at least 2, or there is nothing to split")
    for name, most in (("total_steps", config.total_steps), ("num_frames", config.shape[2])):
        if ranks > most:
            raise ConfigError("world_size", ranks, f"must be at most {name}, {most}: they are split over the ranks")
    image = config.image or (None if config.random_weights else EXAMPLE_IMAGE)
    return config.replace(image=image, threads=resolve(config, local_ranks).threads)


def place(config: RunConfig) -> RunConfig:
    """The configuration with the folder of the whole comparison.

    Raises:
        ConfigError: something exists there already, or it cannot be written.
    """
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-peers-{secrets.token_hex(2)}"
    config = config.replace(output_dir=config.output_dir or runfolder.runs_root() / name)
    return config.replace(output_dir=runfolder.check_place(config))


def of_trial(config: RunConfig, folder: Path, trial: Trial) -> RunConfig:
    """The configuration of one trial, in its folder below that of the comparison."""
    return config.replace(parallel=trial.variant.layout, output_dir=folder / trial.run_id)


def prepare(config: RunConfig, trials: Sequence[Trial]) -> Path:
    """Make the folder of the comparison: in it a run folder for each of ours, and one for the latents of each peer."""
    config = place(config)
    assert config.output_dir is not None
    for trial in trials:
        if trial.variant.ours:
            runfolder.create(of_trial(config, config.output_dir, trial))
        else:
            (config.output_dir / trial.run_id / "latents").mkdir(parents=True)
    return config.output_dir


def entry(trial: Trial) -> dict[str, Any]:
    """What `table` needs about a trial beside its measurements."""
    variant = trial.variant
    return {
        "run_id": trial.run_id,
        "variant": variant.name,
        "kind": variant.kind,
        "ours": variant.ours,
        "ranks": variant.layout.world_size,
        "repeat": trial.repeat,
    }


def difference(run: Run, reference: Run, num_samples: int) -> dict[str, Any]:
    """How many samples have the same latents as `reference`, bit for bit, and the largest relative error (L2 norm)."""
    equal, errors = 0, []
    for sample in range(num_samples):
        found, expected = run.load_latents(sample), reference.load_latents(sample)
        equal += torch.equal(found, expected)
        errors.append(((found.double() - expected.double()).norm() / expected.double().norm()).item())
    return {"equal_latents": equal, "relative_error": max(errors)}


def table(measured: Sequence[dict[str, Any]], num_samples: int) -> pd.DataFrame:
    """One row per variant, from one entry per trial.

    Args:
        measured: variant, kind, ours, ranks, repeat, makespan_s, latency_s (of each sample; empty where not known),
            equal_latents and relative_error.
        num_samples: of each trial.

    Returns:
        Median, least and greatest of the makespan in seconds, and of its ratios to the makespans of the official
        pipeline (`of_official…`) and of the peer of the same kind (`of_peer…`) in the same repeat; NaN where there is
        no such peer.
    """
    trials = pd.DataFrame(measured)
    makespans = trials.set_index(["variant", "repeat"])["makespan_s"]
    peers = trials["kind"].map(PEERS).where(trials["ours"].astype(bool))
    for name, bases in (("of_official", [OFFICIAL] * len(trials)), ("of_peer", peers)):
        base = makespans.reindex(pd.MultiIndex.from_arrays([bases, trials["repeat"]])).to_numpy()
        trials[name] = trials["makespan_s"] / base
    grouped = trials.groupby("variant", sort=False)
    latencies = trials.explode("latency_s").astype({"latency_s": float}).groupby("variant")["latency_s"]
    rows = grouped[["kind", "ours", "ranks"]].first().join(_spread(grouped, "makespan_s"))
    rows["samples_per_s"], rows["latency_s"] = num_samples / rows["makespan_s"], latencies.median()
    rows = rows.join([_spread(grouped, name) for name in ("of_official", "of_peer")])
    rows["equal_latents"], rows["samples"] = grouped["equal_latents"].min(), num_samples
    rows["max_relative_error"] = grouped["relative_error"].max()
    return rows.reset_index()


def _spread(grouped: DataFrameGroupBy, name: str) -> pd.DataFrame:
    return grouped[name].agg(["median", "min", "max"]).set_axis([name, f"{name}_least", f"{name}_greatest"], axis=1)


def facts(config: RunConfig, ranks: int, repeats: int) -> dict[str, Any]:
    """What was compared, and on which machine."""
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


def small_print(recorded: dict[str, Any]) -> str:
    """The small print of the figure, from `facts` or from peers.json."""
    config, versions = RunConfig(**recorded["config"]), recorded["versions"]
    libraries = ", ".join(f"{name} {versions[name]}" for name in ("torch", "diffusers", "accelerate"))
    model = f"{config.model_id or config.model}{' (random weights)' * config.random_weights}"
    name = config.output_dir.name if config.output_dir else ""
    return (
        f"{machine.hardware_name(recorded['hardware'])}, {recorded['device']}, {recorded['dtype']}, "
        f"{machine.threads_text([config.threads])}; {model}, latents {config.size_text}, {config.total_steps} steps, "
        f"{config.num_samples} samples, repeated {recorded['repeats']} × in alternating order\n"
        f"{libraries}; {recorded['date'][:10]}; {name}"
    )


def write(folder: Path, recorded: dict[str, Any], measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare the latents, and write peers.csv, peers.png and, last, peers.json.

    Args:
        folder: that of the comparison.
        recorded: from `facts`.
        measured: one entry per trial, as for `table`, with its run_id but without the comparison of its latents.

    Returns:
        The content of peers.json.
    """
    from vdpp_core.plots import peer_comparison  # takes seconds, which checking the arguments does not need

    num_samples = recorded["config"]["num_samples"]
    reference = Run(folder / next(trial["run_id"] for trial in measured if trial["variant"] == OFFICIAL))
    measured = [trial | difference(Run(folder / trial["run_id"]), reference, num_samples) for trial in measured]
    rows = table(measured, num_samples)
    files.write_atomically(folder / "peers.csv", rows.to_csv(index=False))
    peer_comparison.peers(rows, small_print(recorded)).savefig(folder / "peers.png")
    known = json.loads(rows.to_json(orient="records", double_precision=15))  # null where a number is not known
    result = recorded | {"rows": known, "runs": measured}
    files.write_atomically(folder / "peers.json", json.dumps(result, indent=2) + "\n")
    return result


def shown(folder: Path, as_json: bool) -> str:
    """peers.json as the command prints it."""
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
    head = "median (least – greatest) over the repeats; a ratio compares two makespans of the same repeat"
    return "\n".join([small_print(result), head, pd.DataFrame(columns).to_string(index=False), f"folder: {folder}"])


def _shown_spread(rows: pd.DataFrame, name: str) -> list[str]:
    spreads = rows[[name, f"{name}_least", f"{name}_greatest"]].astype(float)
    return [
        "" if pd.isna(middle) else f"{middle:.3f} ({least:.3f} – {greatest:.3f})"
        for middle, least, greatest in spreads.itertuples(index=False)
    ]
