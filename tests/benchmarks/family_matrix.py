"""Every family, solver and layout of stages and replicas under torchrun, two calls in each process, compared with the
official pipeline: python -m tests.benchmarks.family_matrix

For each layout, the ranks are started once and do all runs one after another. A cell of the table is how many samples
of both calls are bit-equal.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd
import torch

from tests.distributed.test_families import LAYOUTS, SAMPLES, STEPS, arguments, official
from tests.families import FAMILIES
from vdpp_core import Parallel, RunConfig
from vdpp_core.engine import preflight
from vdpp_core.runs import runfolder
from vdpp_core.runs.run import Run

CASES = [
    (name, solver, which)
    for name, family in FAMILIES.items()
    for solver in family.solvers
    for which in ("call", "other_call")
]


def equal_samples(layout: Parallel, weights: tuple[float, ...] | None, root: Path) -> dict[tuple[str, str, str], int]:
    """(family, solver, call) -> samples that are bit-equal to the official pipeline's."""
    root.mkdir()
    folders = {}
    for number, (name, solver, which) in enumerate(CASES):
        config = RunConfig(
            total_steps=STEPS, num_samples=SAMPLES, warmup_samples=0, threads=1, save_latents=True, device="cpu",
            parallel=layout, stage_weights=weights, output_dir=root / str(number),
            **arguments(name, which, root, solver),
        )  # fmt: skip
        folders[name, solver, which] = runfolder.create(preflight.complete(config, layout.world_size))
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc_per_node={layout.world_size}", "-m", "vdpp_core"]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", *torchrun, "run", *map(str, folders.values())], check=True, env=one_thread)
    return {
        (name, solver, which): sum(
            torch.equal(Run(folder).load_latents(sample), official(name, which, sample, solver))
            for sample in range(SAMPLES)
        )
        for (name, solver, which), folder in folders.items()
    }


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as root:
        for name, (layout, weights) in {"two stages": (Parallel(pp=2), None), **LAYOUTS}.items():
            caption = f"{layout} {weights}" if weights else str(layout)
            found[caption] = equal_samples(layout, weights, Path(root) / name)
    table = pd.DataFrame(found).groupby(level=[0, 1]).sum()
    print((table.astype(str) + f" of {2 * SAMPLES}").rename_axis(["family", "solver"]).to_string())


if __name__ == "__main__":
    main()
