"""What the step pipeline costs on two CPU ranks of one core each: python -m tests.benchmarks.step_pipeline

One alternating sweep of one rank, the step pipeline on two and data parallel on two; the last is two processes that do
not communicate while the clock runs, so its rate is the machine's own limit L2. Then the engine's one rank against
`StableVideoDiffusionPipeline` on the same denoising, alternating in one process. Nothing else should be running.
"""

from statistics import median

import pandas as pd

import launch
from tests.benchmarks import one_rank
from vdpp_core import Parallel, RunConfig
from vdpp_core.compare import tables
from vdpp_core.predict import schedule
from vdpp_core.runs import results

REPEATS = 5  # of the sweep
BASE = RunConfig(
    latent_shape=(1, 4, 14, 8, 8), total_steps=28, num_samples=14, warmup_samples=1, threads=1, device="cpu"
)

SAMPLE = BASE.replace(command="generate", num_samples=1, save_latents=False, parallel=Parallel())


def step_s(job: launch.Job) -> float:
    """Mean seconds of a step of a run."""
    spans = results.measured_spans(job.run.events())
    steps = sum(len(stage) for stage in RunConfig.read(job.folder).stages()) * BASE.num_samples
    return sum(span.busy for span in spans) / steps


def ratio(name: str, job: launch.Job, other: launch.Job) -> float:
    """A number of one run over that of another; of a list, the medians."""
    mine, theirs = (
        median(value) if isinstance(value, list) else value for value in (job.result()[name], other.result()[name])
    )
    return mine / theirs


def sweep_rows(sweep: launch.Sweep) -> pd.DataFrame:
    """One row a repeat."""
    rows = []
    for repeat in range(REPEATS):
        one, pp, dp = (
            next(
                job
                for job, run in zip(sweep.jobs, sweep.runs, strict=True)
                if (run["config"], run["repeat"]) == (config, repeat)
            )
            for config in range(3)
        )
        rate = {job: job.result()["steady_state_samples_per_s"] for job in (one, pp, dp)}
        busy_t = step_s(dp)  # both cores busy, and not this run's own steps
        formula = schedule.closed_form(Parallel(pp=2), BASE.total_steps, BASE.num_samples, busy_t)["makespan_s"]
        waits = pp.result()["steady_handoff_wait_share_per_rank"]
        rows.append(
            {
                "one rank, samples/s": rate[one],
                "step pipeline / one rank": rate[pp] / rate[one],
                "L2 = two processes / one": rate[dp] / rate[one],
                "step pipeline / one rank, fill counted": ratio("samples_per_s", pp, one),
                "data parallel / one rank, fill counted": ratio("samples_per_s", dp, one),
                "makespan, step pipeline / data parallel": ratio("makespan_s", pp, dp),
                "latency, step pipeline / one rank": ratio("latency_s", pp, one),
                "step pipeline / (L2 × one rank)": rate[pp] / rate[dp],
                "makespan / formula": pp.result()["makespan_s"] / formula,
                "hand-off wait / busy, rank 0": waits[0],
                "hand-off wait / busy, rank 1": waits[1],
            }
        )
    return pd.DataFrame(rows)


def main() -> None:
    sweep = launch.sweep(
        [BASE.replace(parallel=layout) for layout in (Parallel(), Parallel(pp=2), Parallel(dp=2))], REPEATS
    )
    sweep.wait()
    rows = sweep_rows(sweep)
    rows = rows.join(
        pd.Series(one_rank.run_ratios(SAMPLE)[0], name="engine / official pipeline, one rank"), how="outer"
    )
    print(tables.source([job.folder for job in sweep.jobs]))
    print(f"{BASE.total_steps} steps, {BASE.num_samples} samples, latents {BASE.shape}")
    summary = pd.DataFrame({"median": rows.median(), "least": rows.min(), "greatest": rows.max()})
    print(summary.to_string(float_format="{:.4f}".format))
    medians = rows.median()
    for name, holds in {
        "step pipeline ≥ 0.97 · L2 · one rank": medians["step pipeline / (L2 × one rank)"] >= 0.97,
        "makespan within 5 % of the formula": abs(medians["makespan / formula"] - 1) <= 0.05,
        "hand-off wait under 2 % on both ranks": max(medians[f"hand-off wait / busy, rank {r}"] for r in (0, 1)) < 0.02,
        "engine ≤ 0.97 × official": medians["engine / official pipeline, one rank"] <= 0.97,
    }.items():
        print(f"{'holds ' if holds else 'MISSED'}  {name}")


if __name__ == "__main__":
    main()
