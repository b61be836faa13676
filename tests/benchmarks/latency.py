"""What splitting one forward pass buys on CPU ranks of one core each: python -m tests.benchmarks.latency [tiny|medium]

1. Forward passes of 14 × 24 × 24, alternating between the same two ranks, for each model or only the named one: one
   rank, each way to use two, and two processes that do not communicate, whose rate is the machine's own limit L2.
2. Peak activations of frames 2 and 4 against one rank's, predicted and measured under a limit that is not met.
3. Bytes of a forward pass at the published size, counted from the collectives, against the formula.
Nothing else should be running.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pandas as pd

import launch
from tests.benchmarks.forward_passes import ALONE, LAYOUTS, LIMIT, MODELS, SIZE
from vdpp_core import Parallel, RunConfig
from vdpp_core.config.run_config import by_text
from vdpp_core.engine.measure import keep_freed_memory
from vdpp_core.parallel.devices import GIB
from vdpp_core.predict import costs, memory

REPEATS = 5
LARGE = MODELS["medium"].replace(latent_shape=(1, 4, 12, 48, 48), total_steps=1, threads=1, device="cpu")
WANTED = {"frames 2": 0.92, "cfg 2": 0.95}  # of L2
PUBLISHED = RunConfig(model="svd", random_weights=True, device="cuda", latent_shape=(1, 4, 14, 72, 128))


def speed_ups(model: str) -> pd.DataFrame:
    """Speed-ups over one rank in the same repeat, printed: of a video or, for L2, of the rate of two."""
    command = [sys.executable, "-m", "tests.distributed.forked", "2", "tests.benchmarks.forward_passes"]
    printed = subprocess.run([*command, model, str(REPEATS)], check=True, capture_output=True, text=True).stdout
    table = pd.DataFrame([json.loads(line) for line in printed.splitlines()])[list(LAYOUTS)]
    rates = table.rdiv(table[ALONE], axis=0)
    rates[LIMIT] *= 2
    for name in list(LAYOUTS)[2:]:
        rates[f"{name} / L2"] = rates[name] / rates[LIMIT]
    print(f"{model}, forward passes of {by_text(*SIZE[2:])}, {REPEATS} repeats: speed-up over one rank")
    summary = pd.DataFrame({"median": rates.median(), "least": rates.min(), "greatest": rates.max()})
    print(summary.to_string(float_format="{:.3f}".format), "\n")
    return rates


def activations() -> pd.DataFrame:
    """GB of a rank's peak beyond its parameters, and the shares of one rank's."""
    layouts = {ranks: Parallel(frames=ranks) for ranks in (1, 2, 4)}
    configs = [LARGE.replace(parallel=layout) for layout in layouts.values()]
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
    named = sys.argv[1:]
    checks = {} if named else other_checks()
    for model in named or MODELS:
        medians = speed_ups(model).median()
        for name, least in WANTED.items():
            checks[f"{model}, {name} ≥ {least} · L2"] = medians[f"{name} / L2"] >= least
    for name, holds in checks.items():
        print(f"{'holds ' if holds else 'MISSED'}  {name}")


def other_checks() -> dict[str, bool]:
    """What is measured once, whatever the model: printed, and whether it is as wanted."""
    bytes_moved = exchanged()
    print(bytes_moved.round(4).to_string(index=False), "\n")
    shares = activations()
    print(shares.round(3).to_string(), "\n")
    return {
        "activations of frames 2 ≤ 0.58, predicted": shares["predicted share"][2] <= 0.58,
        "activations of frames 2 ≤ 0.58, measured": shares["measured share"][2] <= 0.58,
        "activations of frames 4 ≤ 0.33, predicted": shares["predicted share"][4] <= 0.33,
        "activations of frames 4 ≤ 0.33, measured": shares["measured share"][4] <= 0.33,
        "bytes within 5 % of the formula": (bytes_moved["counted / formula"] - 1).abs().max() <= 0.05,
    }


if __name__ == "__main__":
    main()
