"""Two experts on ranks that hold one each: python -m tests.benchmarks.experts

First memory: under a limit that holds one expert and not both, a rank with both, two stages, two ranks that swap, and
1 + 3 ranks, each compared with the official pipeline. Then time, in few steps and in more: stages against data parallel
that swaps from disk for each sample and once for all samples, alternating. Nothing else should be running.
"""

import math
import tempfile
from pathlib import Path

import pandas as pd
import torch

import launch
from vdpp_core import Parallel, RunConfig
from vdpp_core.compare import tables
from vdpp_core.config.fields import EXAMPLE_IMAGE
from vdpp_core.engine.videos import Official
from vdpp_core.runs import event_types as kinds
from vdpp_core.tiny_svd import wide_experts

REPEATS = 5
STEPS = (6, 12)
SAMPLES = 8
LIMIT_GIB = 0.5
BOUNDARY = math.log(9) / 4
WAYS = {
    "stages": {"parallel": Parallel(pp=2)},
    "swap for each sample": {"parallel": Parallel(dp=2), "swap": "disk"},
    "swap once for all samples": {"parallel": Parallel(dp=2), "swap": "disk", "swap_batch": SAMPLES // 2},
}


def base(model: Path) -> RunConfig:
    """A run of the wide experts on small latents, with one thread per rank."""
    size = {"num_frames": 2, "height": 128, "width": 128}
    return RunConfig(model_id=str(model), num_samples=SAMPLES, warmup_samples=2, threads=1, device="cpu", **size)


def report_memory(config: RunConfig) -> None:
    """Print what happens under the limit, and whether the latents are the official ones."""
    config = config.replace(total_steps=STEPS[0], save_latents=True, memory_limit_gib=LIMIT_GIB, image=EXAMPLE_IMAGE)
    official = Official(config, torch.device("cpu"), torch.float32)
    wanted = [official.generate(sample, lambda _: None)[0].transpose(1, 2) for sample in range(SAMPLES)]
    four = {"1 + 3 ranks": {"parallel": Parallel(stage_ranks=(1, 3))}}
    rows = []
    for name, change in {"both experts": {"parallel": Parallel()}, **WAYS, **four}.items():
        job = launch.start(config.replace(**change))
        job.wait()
        result, predicted = job.result(), job.run.prediction or {}
        done = [sample for sample in range(SAMPLES) if job.run.latents_path(sample).exists()]
        equal = sum(torch.equal(job.run.load_latents(sample), wanted[sample]) for sample in done)
        rows.append(
            {
                f"under {LIMIT_GIB} GiB": name,
                "outcome": result["outcome"],
                "predicted peak per stage (GB)": predicted.get("peak_memory_gb_per_stage"),
                "measured peak per rank (GB)": result["peak_memory_gb_per_rank"],
                "equal to official": f"{equal} of {len(done)}",
                "ranks of each sample": ranks_of(job),
            }
        )
    for row in rows:
        print("; ".join(f"{name}: {value}" for name, value in row.items()))


def ranks_of(job: launch.Job) -> str:
    """Which ranks computed which sample, in order."""
    takes = [event for event in kinds.of(job.run.events(), kinds.Take) if event.sample >= 0]
    each = [[take.rank for take in takes if take.sample == sample] for sample in range(SAMPLES)]
    return " ".join("→".join(map(str, dict.fromkeys(ranks))) for ranks in each)


def ratios(sweep: launch.Sweep, ways: list[str]) -> pd.DataFrame:
    """Makespan of the stages over that of each rival, measured and predicted, a row per repeat."""
    found = {}
    for job, run in zip(sweep.jobs, sweep.runs, strict=True):
        result = job.result()
        found[ways[run["config"]], run["repeat"]] = result["makespan_s"], result["predicted"]["makespan_s"]
    rows = []
    for repeat in range(REPEATS):
        mine = found["stages", repeat]
        row = {}
        for rival in ways[1:]:
            measured, predicted = (own / other for own, other in zip(mine, found[rival, repeat], strict=True))
            row |= {f"stages / {rival}": measured, f"  predicted / measured, {rival}": predicted / measured}
        rows.append(row)
    return pd.DataFrame(rows)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="wide-") as place:
        config = base(wide_experts.save(Path(place) / "experts", BOUNDARY))
        report_memory(config)
        for steps in STEPS:
            sweep = launch.sweep([config.replace(total_steps=steps, **way) for way in WAYS.values()], REPEATS)
            sweep.wait()
            rows = ratios(sweep, list(WAYS))
            print(tables.source([job.folder for job in sweep.jobs]))
            print(f"{steps} steps, {sweep.jobs[0].run.config.experts}, {SAMPLES} samples, makespans, {REPEATS} pairs")
            print(rows.agg(["median", "min", "max"]).T.to_string(float_format="{:.3f}".format))


if __name__ == "__main__":
    main()
