"""What splitting one forward pass buys on CPU ranks of one core each: python -m tests.benchmarks.latency

1. One sample of 14 × 24 × 24 in an alternating sweep: one rank, frames 2, cfg 2, and data parallel on two (two
   processes that do not communicate while the clock runs), whose rate is the machine's own limit L2.
2. Peak activations of frames 2 and 4 against one rank's, predicted and measured under a limit that is not met.
3. Bytes of a forward pass at the published size, counted from the collectives, against the formula.
Nothing else should be running.
"""

from __future__ import annotations

import pandas as pd

import launch
from vdpp_core import Parallel, RunConfig
from vdpp_core.compare import tables
from vdpp_core.engine.measure import keep_freed_memory
from vdpp_core.parallel.devices import GIB
from vdpp_core.predict import costs, memory

REPEATS = 5
BASE = RunConfig(latent_shape=(1, 4, 14, 24, 24), total_steps=6, threads=1, device="cpu")
LAYOUTS = {
    "one rank": Parallel(),
    "frames 2": Parallel(frames=2),
    "cfg 2": Parallel(cfg=2),
    "two processes": Parallel(dp=2),
}
MEDIUM = RunConfig(
    model="medium", random_weights=True, latent_shape=(1, 4, 12, 48, 48), total_steps=1, threads=1, device="cpu"
)
PUBLISHED = RunConfig(model="svd", random_weights=True, device="cuda", latent_shape=(1, 4, 14, 72, 128))


def speed_ups() -> pd.DataFrame:
    """Rates as multiples of one rank's in the same repeat: a sample's latency, or two samples in that time."""
    configs = [BASE.replace(parallel=layout, num_samples=layout.dp) for layout in LAYOUTS.values()]
    sweep = launch.sweep(configs, REPEATS)
    table = sweep.wait().pivot(index="repeat", columns="config", values="makespan_s")
    table.columns = pd.Index(LAYOUTS)
    print(tables.source([job.folder for job in sweep.jobs]))
    rates = table.rdiv(table["one rank"], axis=0)
    rates["two processes"] *= 2
    for name in ("frames 2", "cfg 2"):
        rates[f"{name} / L2"] = rates[name] / rates["two processes"]
    return rates


def activations() -> pd.DataFrame:
    """GB of a rank's peak beyond its parameters, and the shares of one rank's."""
    layouts = {ranks: Parallel(frames=ranks) for ranks in (1, 2, 4)}
    configs = [MEDIUM.replace(parallel=layout) for layout in layouts.values()]
    limited = [config.replace(memory_limit_gib=4 * memory.predict(config).total / GIB) for config in configs]
    sweep = launch.sweep(limited)
    sweep.wait()
    rows = []
    for config, job in zip(limited, sweep.jobs, strict=True):
        expected = memory.predict(config)
        measured = job.result()["max_peak_memory_gb"] - expected.parameters / 1e9
        rows.append({"predicted_gb": expected.activations / 1e9, "measured_gb": measured})
    table = pd.DataFrame(rows, index=pd.Index(layouts, name="frames"))
    for name in ("predicted", "measured"):
        table[f"{name} share"] = table[f"{name}_gb"] / table[f"{name}_gb"][1]
    return table


def exchanged() -> pd.DataFrame:
    """GB that all ranks together send in a step."""
    rows = []
    for ranks in (2, 4, 7):
        config = PUBLISHED.replace(parallel=Parallel(frames=ranks))
        counted, formula = costs.sent_by_all(config), costs.formula(config)
        rows += [
            {"ranks": ranks, "kind": kind, "counted_gb": count / 1e9, "counted / formula": count / formula[kind]}
            for kind, count in counted.items()
        ]
        whole = sum(counted.values())
        rows.append(
            {
                "ranks": ranks,
                "kind": "all",
                "counted_gb": whole / 1e9,
                "counted / formula": whole / sum(formula.values()),
            }
        )
    return pd.DataFrame(rows)


def main() -> None:
    keep_freed_memory(True)
    bytes_moved = exchanged()
    print(bytes_moved.round(4).to_string(index=False), "\n")
    shares = activations()
    print(shares.round(3).to_string(), "\n")
    rates = speed_ups()
    print("speed-up over one rank")
    summary = pd.DataFrame({"median": rates.median(), "least": rates.min(), "greatest": rates.max()})
    print(summary.to_string(float_format="{:.3f}".format), "\n")
    medians = rates.median()
    for name, holds in {
        "frames 2 ≥ 0.85 · L2": medians["frames 2 / L2"] >= 0.85,
        "cfg 2 ≥ 0.93 · L2": medians["cfg 2 / L2"] >= 0.93,
        "activations of frames 2 ≤ 0.58, predicted": shares["predicted share"][2] <= 0.58,
        "activations of frames 2 ≤ 0.58, measured": shares["measured share"][2] <= 0.58,
        "activations of frames 4 ≤ 0.33, predicted": shares["predicted share"][4] <= 0.33,
        "activations of frames 4 ≤ 0.33, measured": shares["measured share"][4] <= 0.33,
        "bytes within 5 % of the formula": (bytes_moved["counted / formula"] - 1).abs().max() <= 0.05,
    }.items():
        print(f"{'holds ' if holds else 'MISSED'}  {name}")


if __name__ == "__main__":
    main()
