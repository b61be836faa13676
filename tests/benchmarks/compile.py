"""What `torch.compile` buys on a CPU: python -m tests.benchmarks.compile [model] [frames rows columns]

The UNet as published against the same compiled, and against the engine's, pass by pass in one process. Nothing else
should be running.
"""

import copy
import sys
import time
from statistics import median
from typing import Any

import torch

from tests.benchmarks.one_rank import alternate, conditioning
from vdpp_core import Parallel, RunConfig, models
from vdpp_core.engine.measure import keep_freed_memory

ROUNDS = 15


@torch.no_grad()
def main(model: str = "tiny", *shape: str) -> None:
    keep_freed_memory(True)
    torch.set_num_threads(1)
    config = RunConfig(model=model, random_weights=model != "tiny", device="cpu", parallel=Parallel())
    plain = models.load_plain(config, torch.device("cpu"), torch.float32)
    sizes = [*map(int, shape)] or [14, 8, 8]
    given = conditioning(plain, *sizes)
    unets: dict[str, Any] = {
        "plain": plain,
        "default": models.ready(config, copy.deepcopy(plain)),
        "shortcuts": models.ready(config.replace(shortcuts=True), copy.deepcopy(plain)),
        "compiled": torch.compile(copy.deepcopy(plain)),
    }
    expected = plain(**given)[0]
    began = time.perf_counter()
    difference = ((unets["compiled"](**given)[0] - expected).norm() / expected.norm()).item()
    to_compile = time.perf_counter() - began
    seconds = alternate(unets, given, ROUNDS)
    print(f"{model}, {sizes}: compiling took {to_compile:.0f} s; relative difference {difference:.1e}")
    for name, took in seconds.items():
        ratios = sorted(one / other for one, other in zip(took, seconds["plain"], strict=True))
        print(
            f"{name:10}{median(took):8.4f} s a pass, {median(ratios):.3f} ({ratios[0]:.3f} – {ratios[-1]:.3f}) of plain"
        )
    saved = median(seconds["plain"]) - median(seconds["compiled"])
    print(f"compiling pays after {to_compile / saved:.0f} passes" if saved > 0 else "compiling does not pay")


if __name__ == "__main__":
    main(*sys.argv[1:])
