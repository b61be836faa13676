"""What the step pipeline costs on two CPU ranks of one core each: python -m tests.benchmarks.step_pipeline

One alternating sweep of one rank, the step pipeline on two and data parallel on two; the last is two processes that do
not communicate while the clock runs, so its rate is the machine's own limit L2. Then the engine's one rank against
`StableVideoDiffusionPipeline` on the same denoising, alternating in one process. Nothing else should be running.
"""

import time
from statistics import median

import pandas as pd
import torch
from diffusers import StableVideoDiffusionPipeline

import launch
from vdpp_core import Parallel, RunConfig
from vdpp_core.compare import tables
from vdpp_core.config.fields import EXAMPLE_IMAGE, MODELS
from vdpp_core.engine import worker
from vdpp_core.models.images import read_image
from vdpp_core.predict import schedule
from vdpp_core.runs import results, runfolder

REPEATS = 5  # of the sweep
PAIRS = 31  # engine and official pipeline; short, since the machine drifts
BASE = RunConfig(
    latent_shape=(1, 4, 14, 8, 8), total_steps=28, num_samples=14, warmup_samples=1, threads=1, device="cpu"
)


def step_s(job: launch.Job) -> float:
    """Mean seconds of a step of a run."""
    spans = results.measured_spans(runfolder.read_events(job.folder))
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


def official_s(pipeline: StableVideoDiffusionPipeline, config: RunConfig) -> float:
    """Seconds of the pipeline's denoising: from its first UNet call to its return."""
    began: list[float] = []
    hook = pipeline.unet.register_forward_pre_hook(lambda *_: began.append(time.perf_counter()))
    _, _, frames, rows, columns = config.shape
    pipeline(
        read_image(EXAMPLE_IMAGE),
        height=rows * 8,
        width=columns * 8,
        num_frames=frames,
        num_inference_steps=config.total_steps,
        generator=torch.Generator().manual_seed(config.seed),
        output_type="latent",
    )
    hook.remove()
    return time.perf_counter() - began[0]


def engine_ratios() -> list[float]:
    """The engine's makespan of one sample over the official pipeline's, pair by pair."""
    config = BASE.replace(command="generate", num_samples=1, save_latents=False)
    torch.set_num_threads(1)
    pipeline = StableVideoDiffusionPipeline.from_pretrained(MODELS["tiny"])
    pipeline.set_progress_bar_config(disable=True)
    official_s(pipeline, config)
    ratios = []
    for pair in range(PAIRS):
        seconds = {}
        for who in ("ours", "official") if pair % 2 else ("official", "ours"):
            if who == "ours":
                result = runfolder.read_result(worker.run(config))
                assert result is not None
                seconds[who] = result["makespan_s"]
            else:
                torch.set_num_threads(1)
                seconds[who] = official_s(pipeline, config)
        ratios.append(seconds["ours"] / seconds["official"])
    return ratios


def main() -> None:
    sweep = launch.sweep(
        [BASE.replace(parallel=layout) for layout in (Parallel(), Parallel(pp=2), Parallel(dp=2))], REPEATS
    )
    sweep.wait()
    rows = sweep_rows(sweep)
    rows = rows.join(pd.Series(engine_ratios(), name="engine / official pipeline, one rank"), how="outer")
    print(tables.source([job.folder for job in sweep.jobs]))
    print(f"{BASE.total_steps} steps, {BASE.num_samples} samples, latents {BASE.shape}")
    summary = pd.DataFrame({"median": rows.median(), "least": rows.min(), "greatest": rows.max()})
    print(summary.to_string(float_format="{:.4f}".format))
    medians = rows.median()
    for name, holds in {
        "step pipeline ≥ 0.97 · L2 · one rank": medians["step pipeline / (L2 × one rank)"] >= 0.97,
        "makespan within 5 % of the formula": abs(medians["makespan / formula"] - 1) <= 0.05,
        "hand-off wait under 2 % on both ranks": max(medians[f"hand-off wait / busy, rank {r}"] for r in (0, 1)) < 0.02,
        "engine ≤ 1.02 × official": medians["engine / official pipeline, one rank"] <= 1.02,
    }.items():
        print(f"{'holds ' if holds else 'MISSED'}  {name}")


if __name__ == "__main__":
    main()
