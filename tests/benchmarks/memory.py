"""Peak memory of ranks on this machine's CPU against the prediction: python -m tests.benchmarks.memory

Every run has a limit that it does not meet, so that each process gives freed memory back at once: what is resident is
what is alive. Prints a table, and the memory that FSDP saves a rank against parameters · (1 − 1/N) − gathered.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

import launch
from vdpp_core import Parallel, RunConfig
from vdpp_core.models.architectures import MEDIUM_UNET
from vdpp_core.models.architectures import PUBLISHED_SCHEDULER as SCHEDULER
from vdpp_core.parallel.devices import GIB
from vdpp_core.predict import memory

BASE = RunConfig(
    model="medium",
    random_weights=True,
    latent_shape=(1, 4, 4, 24, 24),
    total_steps=1,
    threads=1,
    device="cpu",
    parallel=Parallel(),
)
SHAPES = {"4 × 24 × 24": (1, 4, 4, 24, 24), "8 × 32 × 32": (1, 4, 8, 32, 32), "14 × 9 × 16": (1, 4, 14, 9, 16)}
MODES: dict[str, dict[str, Any]] = {"batched": {}, "sequential, chunked": {"enable_memory_opt": True}}
SHARDS = {1: Parallel(), 2: Parallel(dp=2, fsdp=True), 3: Parallel(dp=3, fsdp=True)}
WIDE = {"block_out_channels": (192, 384, 768, 768), "num_attention_heads": (6, 12, 24, 24)}  # 4 × medium's parameters


def within_a_limit(config: RunConfig) -> RunConfig:
    """One that it does not meet."""
    return config.replace(memory_limit_gib=4 * memory.predict(config).total / GIB)


def configurations(wide: Path) -> dict[tuple[str, str, str, int], RunConfig]:
    """(model, latents, mode, shards) -> the run."""
    found = {}
    for shape, latents in SHAPES.items():
        for mode, change in MODES.items():
            found["medium", shape, mode, 1] = BASE.replace(latent_shape=latents, **change)
    for shards, parallel in SHARDS.items():
        found["medium", "4 × 24 × 24", "batched", shards] = BASE.replace(parallel=parallel)
        more = {"model_id": str(wide), "latent_shape": (1, 4, 2, 8, 8), "parallel": parallel}
        found["wide", "2 × 8 × 8", "batched", shards] = BASE.replace(**more)
    return {name: within_a_limit(config) for name, config in found.items()}


def write_wide(folder: Path) -> Path:
    """A pipeline's folder without weights: medium at twice its width."""
    for part, facts in {"unet/config.json": MEDIUM_UNET | WIDE, "scheduler/scheduler_config.json": SCHEDULER}.items():
        (folder / part).parent.mkdir(parents=True)
        (folder / part).write_text(json.dumps(facts))
    return folder


def row(config: RunConfig, result: dict[str, Any]) -> dict[str, Any]:
    expected, rank_0 = memory.predict(config), result["memory_per_rank"][0]
    return {
        "outcome": result["outcome"],
        "parameters_gb": expected.parameters / 1e9,
        "gathered_gb": expected.gathered / 1e9,
        "predicted_gb": expected.total / 1e9,
        "measured_gb": result["max_peak_memory_gb"],
        "resident_gb": rank_0["resident_gb"],
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        configs = configurations(write_wide(Path(folder) / "wide"))
        sweep = launch.sweep(list(configs.values()))
        sweep.wait()
        names = pd.MultiIndex.from_tuples(configs, names=["model", "latents", "guidance", "shards"])
        rows = [row(config, job.result()) for config, job in zip(configs.values(), sweep.jobs, strict=True)]
    table = pd.DataFrame(rows, index=names)
    table["measured / predicted"] = table["measured_gb"] / table["predicted_gb"]
    print(table.reset_index().round(3).to_string(index=False))
    for key in (("medium", "4 × 24 × 24", "batched"), ("wide", "2 × 8 × 8", "batched")):
        alike = table.sort_index().loc[key]
        for shards in (2, 3):
            saved = alike["resident_gb"][1] - alike["resident_gb"][shards]
            predicted = alike["parameters_gb"][1] * (1 - 1 / shards) - alike["gathered_gb"][shards]
            what = f"{key[0]}, FSDP over {shards} ranks: resident memory of rank 0 is less by"
            print(f"{what} {saved:.3f} GB, predicted {predicted:.3f} GB: {saved / predicted:.3f}")


if __name__ == "__main__":
    main()
