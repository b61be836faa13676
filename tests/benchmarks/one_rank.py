"""One rank of the engine against the official pipeline on the same denoising: python -m tests.benchmarks.one_rank

Alternating in one process, for the tiny Stable Video Diffusion and a random Wan of 30 million parameters. Nothing else
should be running.
"""

import tempfile
import time
from pathlib import Path

import pandas as pd
import torch

from tests.families import PROMPT, folder
from vdpp_core import Parallel, RunConfig
from vdpp_core.engine import preflight, worker
from vdpp_core.engine.videos import Official
from vdpp_core.runs.run import Run

PAIRS = 31  # short, since the machine drifts
WAN = {"num_attention_heads": 8, "attention_head_dim": 48, "num_layers": 8, "ffn_dim": 1536}
ONE = {"total_steps": 28, "num_samples": 1, "threads": 1, "device": "cpu", "parallel": Parallel()}


def official_s(official: Official) -> float:
    """Seconds of the pipeline's denoising: from its first call of a denoiser to its return."""
    pipeline, began = official.pipeline, list[float]()
    denoiser = getattr(pipeline, "unet", None) or pipeline.transformer
    hook = denoiser.register_forward_pre_hook(lambda *_: began.append(time.perf_counter()))
    official._call(0, output_type="latent")
    hook.remove()
    return time.perf_counter() - began[0]


def ratios(config: RunConfig) -> list[float]:
    """The engine's makespan of a run's one sample over the official pipeline's, pair by pair."""
    official = Official(config, torch.device("cpu"), torch.float32)
    torch.set_num_threads(1)
    official_s(official)
    found = []
    for pair in range(PAIRS):
        seconds = {}
        for who in ("ours", "official") if pair % 2 else ("official", "ours"):
            if who == "ours":
                result = Run(worker.run(config)).result()
                assert result is not None
                seconds[who] = result["makespan_s"]
            else:
                torch.set_num_threads(1)
                seconds[who] = official_s(official)
        found.append(seconds["ours"] / seconds["official"])
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        wan = str(folder("wan", root=Path(root), **WAN))
        runs = {
            "Stable Video Diffusion": RunConfig(command="generate", **ONE),
            "Wan": RunConfig(model_id=wan, **PROMPT, num_frames=9, height=64, width=64, **ONE),
        }
        found = pd.DataFrame({name: ratios(preflight.complete(config, 1)) for name, config in runs.items()})
    print(found.agg(["median", "min", "max"]).T.to_string(float_format="{:.4f}".format))
    for name, median in found.median().items():
        print(f"{'holds ' if median <= 1.02 else 'MISSED'}  {name}: engine ≤ 1.02 × official")


if __name__ == "__main__":
    main()
