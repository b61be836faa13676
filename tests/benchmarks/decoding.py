"""Decoding as-ready against decoding at the end: python -m tests.benchmarks.decoding

Eight samples of the tiny model on two stages, alternating; decoding at the end is shared by both ranks. As-ready comes
twice: with equal stages, and with stages weighted so that the last one has time to decode. Nothing else should be
running.
"""

import pandas as pd

import launch
from vdpp_core import Parallel, RunConfig
from vdpp_core.compare import tables

REPEATS = 5
BASE = RunConfig(command="generate", num_samples=8, total_steps=16, threads=1, device="cpu", parallel=Parallel(pp=2))
WEIGHTS = (1.25, 0.75)
MODES = {
    "at-end": BASE,
    "as-ready": BASE.replace(decode="as-ready"),
    f"as-ready, stages {WEIGHTS}": BASE.replace(decode="as-ready", stage_weights=WEIGHTS),
}
NUMBERS = ("time_to_first_video_s", "all_videos_s", "makespan_s", "peak_memory_gb")


def numbers(job: launch.Job) -> dict[str, float]:
    """Seconds from the start of the clock, and the largest peak of a rank."""
    result = job.result()
    events = job.run.events()
    begun = min(event.t for event in events if event.kind == "clock")
    peaks = [*result["peak_memory_gb_per_rank"], *result["decode_peak_memory_gb_per_rank"]]
    return {
        "time_to_first_video_s": result["time_to_first_video_s"],
        "all_videos_s": max(event.t for event in events if event.kind == "video") - begun,
        "makespan_s": result["makespan_s"],
        "peak_memory_gb": max(peak for peak in peaks if peak is not None),
    }


def main() -> None:
    sweep = launch.sweep(list(MODES.values()), REPEATS)
    sweep.wait()
    print(tables.source([job.folder for job in sweep.jobs]))
    places = [(list(MODES)[run["config"]], run["repeat"]) for run in sweep.runs]
    index = pd.MultiIndex.from_tuples(places, names=["decode", "repeat"])
    found = pd.DataFrame([numbers(job) for job in sweep.jobs], index=index).sort_index()
    print(found.groupby(level=0).median().to_string(float_format="{:.3f}".format))
    for mode in list(MODES)[1:]:
        paired = found.loc[mode] / found.loc["at-end"]
        print(f"{mode} / at-end, {REPEATS} pairs")
        print(paired.agg(["median", "min", "max"]).T.to_string(float_format="{:.3f}".format))


if __name__ == "__main__":
    main()
