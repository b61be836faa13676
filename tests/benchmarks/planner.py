"""Runs on two CPU ranks predicted from one of them: python -m tests.benchmarks.planner

One alternating sweep of one rank, data parallel and the step pipeline with even and uneven stages, with few and many
samples. The rates come from one run, the first repeat of the even step pipeline with most samples: its ranks are alone
at the start and at the end and busy together in between. The link is measured first. Makespan and mean latency of every
layout are then compared with the median of its repeats. Nothing else should run on the machine.
"""

from statistics import fmean, median

import pandas as pd

import launch
from vdpp_core import Parallel, RunConfig
from vdpp_core.compare import tables
from vdpp_core.predict import rates

REPEATS = 3
SAMPLES = (3, 8, 14)
BASE = RunConfig(
    latent_shape=(1, 4, 7, 8, 8), total_steps=28, num_samples=14, warmup_samples=1, threads=1, device="cpu"
)
LAYOUTS = {
    "1 rank": BASE.replace(parallel=Parallel()),
    "dp 2": BASE.replace(parallel=Parallel(dp=2)),
    "pp 2, 14 + 14 steps": BASE.replace(parallel=Parallel(pp=2)),
    "pp 2, 7 + 21 steps": BASE.replace(parallel=Parallel(pp=2), stage_weights=(1, 3)),
    "pp 2, 18 + 10 steps": BASE.replace(parallel=Parallel(pp=2), stage_weights=(9, 5)),
}
CONFIGS = {(name, count): config.replace(num_samples=count) for name, config in LAYOUTS.items() for count in SAMPLES}


def main() -> None:
    launch.probe("cpu")
    sweep = launch.sweep(list(CONFIGS.values()), REPEATS)
    sweep.wait()
    compare(sweep)


def compare(sweep: launch.Sweep) -> None:
    """Print predictions beside the medians of a finished sweep."""
    runs = {(run["config"], run["repeat"]): job for job, run in zip(sweep.jobs, sweep.runs, strict=True)}
    known = rates.from_run(runs[list(CONFIGS).index(("pp 2, 14 + 14 steps", max(SAMPLES))), 0].folder)
    rows = {}
    for number, (name, config) in enumerate(CONFIGS.items()):
        predicted = rates.predict(config, known).numbers()
        results = [runs[number, repeat].result() or {} for repeat in range(REPEATS)]
        makespan = median(result["makespan_s"] for result in results)
        latency = median(fmean(result["latency_s"]) for result in results)
        rows[name] = {
            "makespan (s)": makespan,
            "predicted / measured": predicted["makespan_s"] / makespan,
            "mean latency (s)": latency,
            "predicted / measured ": fmean(predicted["latency_s"]) / latency,
        }
    table = pd.DataFrame(rows).T.rename_axis(["layout", "samples"])
    print(tables.source([job.folder for job in sweep.jobs]))
    print(known)
    print(table.to_string(float_format="{:.3f}".format))
    worst = max((table[column] - 1).abs().max() for column in table if "predicted" in column)
    print(f"{'holds ' if worst <= 0.07 else 'MISSED'}  within 7 %: the worst is {worst:.1%} off")


if __name__ == "__main__":
    main()
