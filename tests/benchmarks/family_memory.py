"""Peak memory of other pipelines on this machine's CPU against the prediction: python -m tests.benchmarks.family_memory

Random weights, with widths at which the denoiser's parameters and activations are most of what a rank holds. Every run
has a limit that it does not meet, as in `tests.benchmarks.memory`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

import launch
from tests.benchmarks.memory import row, within_a_limit
from tests.families import PROMPT, folder
from vdpp_core import Parallel, RunConfig
from vdpp_core.engine import preflight

SIZES: dict[str, dict[str, Any]] = {  # of the denoiser
    "wan": {"num_attention_heads": 8, "attention_head_dim": 96, "num_layers": 8, "ffn_dim": 3072},
    "animatediff": {"widths": (192, 512), "layers": 2},
}
VIDEOS = {
    "wan": [{"num_frames": 9, "height": 128, "width": 128}, {"num_frames": 17, "height": 256, "width": 256}],
    "animatediff": [{"num_frames": 4, "height": 128, "width": 128}, {"num_frames": 8, "height": 192, "width": 192}],
}


def configurations(root: Path, names: list[str]) -> dict[tuple[str, str], RunConfig]:
    """(family, video) -> the run of one rank and one step."""
    found = {}
    for name in names:
        model = str(folder(name, root=root, **SIZES[name]))
        for video in VIDEOS[name]:
            config = RunConfig(
                model_id=model, **PROMPT, **video, total_steps=2, device="cpu", threads=1, parallel=Parallel()
            )
            found[name, " × ".join(map(str, video.values()))] = within_a_limit(preflight.complete(config, 1))
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        configs = configurations(Path(root), sys.argv[1:] or list(SIZES))
        sweep = launch.sweep(list(configs.values()))
        sweep.wait()
        rows = [row(config, job.result()) for config, job in zip(configs.values(), sweep.jobs, strict=True)]
    table = pd.DataFrame(rows, index=pd.MultiIndex.from_tuples(configs, names=["family", "video"]))
    table["measured / predicted"] = table["measured_gb"] / table["predicted_gb"]
    print(table.reset_index().round(3).to_string(index=False))


if __name__ == "__main__":
    main()
