"""Peak memory of ranks on this machine's CPU against the prediction: python -m tests.benchmarks.memory

Every run has a limit that it does not meet, so that each process gives freed memory back at once: what is resident is
what is alive. Prints a table, and the memory that FSDP saves a rank against parameters · (1 − 1/N) − gathered.
"""

from __future__ import annotations

import pandas as pd

import launch
from vdpp_core import Parallel, RunConfig, memory
from vdpp_core.limits import GIB

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
MODES = {"batched": {}, "sequential, chunked": {"enable_memory_opt": True}}
SHARDS = {1: Parallel(), 2: Parallel(dp=2, fsdp=True), 3: Parallel(dp=3, fsdp=True)}


def configurations() -> dict[tuple[str, str, int], RunConfig]:
    """(latents, mode, shards) -> the run."""
    found = {}
    for shape, latents in SHAPES.items():
        for mode, change in MODES.items():
            for shards, parallel in SHARDS.items():
                if shards == 1 or (shape, mode) == ("4 × 24 × 24", "batched"):
                    config = BASE.replace(latent_shape=latents, parallel=parallel, **change)
                    limit = 4 * memory.predict(config).total / GIB
                    found[shape, mode, shards] = config.replace(memory_limit_gib=limit)
    return found


def main() -> None:
    configs = configurations()
    sweep = launch.sweep(list(configs.values()))
    sweep.wait()
    rows = []
    for (shape, mode, shards), job in zip(configs, sweep.jobs, strict=True):
        expected, result = memory.predict(configs[shape, mode, shards]), job.result()
        rows.append({"latents": shape, "guidance": mode, "shards": shards, "outcome": result["outcome"]})
        peaks = {"predicted_gb": expected.total / 1e9, "measured_gb": result["max_peak_memory_gb"]}
        rows[-1] |= {"parameters_gb": expected.parameters / 1e9, "gathered_gb": expected.gathered / 1e9, **peaks}
    table = pd.DataFrame(rows)
    table["measured / predicted"] = table["measured_gb"] / table["predicted_gb"]
    print(table.round(3).to_string(index=False))
    alike = table[(table["latents"] == "4 × 24 × 24") & (table["guidance"] == "batched")].set_index("shards")
    for shards in (2, 3):
        saved = alike["measured_gb"][1] - alike["measured_gb"][shards]
        foretold = alike["parameters_gb"][1] * (1 - 1 / shards) - alike["gathered_gb"][shards]
        print(f"FSDP over {shards} ranks saves {saved:.3f} GB, foretold {foretold:.3f} GB: {saved / foretold:.3f}")


if __name__ == "__main__":
    main()
