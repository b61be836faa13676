"""Every axis and their pairs predicted from five runs: python -m tests.benchmarks.predictions FIGURE [--part K/N]

Runs of the small model on CPU ranks, two video sizes, up to four ranks. Computing is calibrated on one run, exchanges
and gathers on one run of each axis that communicates; these are not counted. Makespan and mean latency of all others
are compared with the predictions. The figure is saved to FIGURE. Nothing else should run on the machine, for about five
minutes; `--part 1/3` to `--part 3/3` record a third each into the same folder of runs, and the last one compares.
"""

import argparse
import warnings
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

import launch
from vdpp_core import Parallel, RunConfig
from vdpp_core.compare import tables
from vdpp_core.plots import plan_overview
from vdpp_core.predict import accuracy, rates
from vdpp_core.runs import runfolder
from vdpp_core.runs.run import Run

SMALL = RunConfig(
    latent_shape=(1, 4, 8, 16, 16), total_steps=6, num_samples=4, warmup_samples=0, threads=1, device="cpu"
)
LARGE = SMALL.replace(latent_shape=(1, 4, 14, 24, 24), total_steps=3, num_samples=2)
AXES = {  # an axis on two ranks -> how
    "pp 2": Parallel(pp=2),
    "dp 2": Parallel(dp=2),
    "cfg 2": Parallel(cfg=2),
    "frames 2": Parallel(frames=2),
    "tp 2": Parallel(tp=2),
    "fsdp 2": Parallel(dp=2, fsdp=True),
}
CALIBRATED = ("pp 2", "cfg 2", "frames 2", "tp 2", "fsdp 2")  # on the small video
LAYOUTS = {
    "1 rank": Parallel(),
    **AXES,
    **{f"{axis} 4": Parallel(**{axis: 4}) for axis in ("dp", "pp", "frames")},
    "dp 2, pp 2": Parallel(dp=2, pp=2),
    "dp 2, cfg 2": Parallel(dp=2, cfg=2),
    "dp 2, frames 2": Parallel(dp=2, frames=2),
    "pp 2, cfg 2": Parallel(pp=2, cfg=2),
    "pp 2, frames 2": Parallel(pp=2, frames=2),
    "cfg 2, frames 2": Parallel(cfg=2, frames=2),
    "dp 2, tp 2": Parallel(dp=2, tp=2),
    "pp 2, tp 2": Parallel(pp=2, tp=2),
    "cfg 2, tp 2": Parallel(cfg=2, tp=2),
    "frames 2, tp 2": Parallel(frames=2, tp=2),
    "pp 2, fsdp 2": Parallel(dp=2, pp=2, fsdp=True),
    "cfg 2, fsdp": Parallel(cfg=2, fsdp=True),
    "frames 2, fsdp": Parallel(frames=2, fsdp=True),
    "dp 2, cfg 2, fsdp": Parallel(dp=2, cfg=2, fsdp=True),
}
ALSO_LARGE = (*("1 rank", *AXES, "dp 2, pp 2", "dp 2, cfg 2", "pp 2, frames 2", "cfg 2, frames 2", "frames 2, fsdp"),)
FEW_AND_MANY = 2, 8  # samples of a run with FSDP


def configs() -> list[RunConfig]:
    """All runs, those that are calibrated on first."""
    order = sorted(LAYOUTS, key=lambda name: name not in CALIBRATED)
    return [
        *(SMALL.replace(parallel=LAYOUTS[name]) for name in order),
        *(SMALL.replace(parallel=AXES["fsdp 2"], num_samples=count) for count in FEW_AND_MANY),
        *(LARGE.replace(parallel=LAYOUTS[name]) for name in ALSO_LARGE),
    ]


def record(root: Path, part: int, parts: int) -> None:
    """Run every `parts`-th configuration, each in turn."""
    if part == 1:
        launch.probe("cpu")
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # four ranks share two cores on purpose
        launch.sweep(configs()[part - 1 :: parts], root=root).wait()


def calibrating(folders: list[Path]) -> Iterator[Path]:
    """The runs to calibrate on: the first of each."""
    known = {folder: Run(folder).config for folder in folders}
    for name in CALIBRATED:
        wanted = SMALL.replace(parallel=LAYOUTS[name])
        yield next(
            folder
            for folder, config in known.items()
            if (config.layout, config.shape, config.num_samples) == (wanted.layout, wanted.shape, wanted.num_samples)
        )


def compare(root: Path, figure: Path) -> None:
    """Print and draw predictions beside the measurements of all finished runs below `root`."""
    folders = sorted(path.parent for path in root.glob("*/*/result.json"))
    known = rates.from_run(list(calibrating(folders)))
    table = accuracy.against_runs(folders, known)
    ratios = {name: table[f"predicted_{name}_s"] / table[f"{name}_s"] for name in ("makespan", "latency")}
    shown = table[["layout", "video", "samples", "calibrated on", "makespan_s", "latency_s"]]
    shown = shown.assign(**{f"{name}, predicted / measured": ratio for name, ratio in ratios.items()})
    print(tables.source(folders))
    print(known)
    print(shown.sort_values(["video", "layout"]).to_string(index=False, float_format="{:.3f}".format))
    others = table[~table["calibrated on"]]
    for name, column in {"makespan": "error", "mean latency": "latency error"}.items():
        share = float((others[column].abs() <= plan_overview.BAND).mean())
        words = f"{name} within {plan_overview.BAND:.0%}: {share:.0%} of runs; {rates.how_far_off(others[column])}"
        print(f"{'holds ' if share >= 0.9 else 'MISSED'}  {words}")
    _draw(table, others, tables.source(folders), figure)


def _draw(table: pd.DataFrame, others: pd.DataFrame, small_print: str, figure: Path) -> None:
    errors = pd.concat([others["error"], others["latency error"]]).abs()
    title = (
        f"{len(CALIBRATED)} runs predict {len(others)} others of all axes and their pairs: "
        f"{(errors <= plan_overview.BAND).mean():.0%} of makespans and latencies within {plan_overview.BAND:.0%}"
    )
    plan_overview.against_measured(table, title, small_print).savefig(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", type=Path, help="where to save the figure")
    parser.add_argument("--runs", type=Path, default=runfolder.runs_root() / "predictions", help="folder of the runs")
    parser.add_argument("--part", default="1/1", help="which part of the runs to record; 0/1: none, only compare")
    given = parser.parse_args()
    part, parts = map(int, given.part.split("/"))
    if part:
        record(given.runs, part, parts)
    if part in (0, parts):
        compare(given.runs, given.figure)


if __name__ == "__main__":
    main()
