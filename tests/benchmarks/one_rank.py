"""One rank of the engine against the official pipeline on the same denoising: python -m tests.benchmarks.one_rank

Arguments: names of LIMITS, if not all. Alternating in one process: whole runs of the tiny Stable Video Diffusion and of
a random Wan of 30 million parameters; single passes of the medium UNet, which has no pipeline. Nothing else should be
running.
"""

import copy
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from tests.families import PROMPT, folder
from vdpp_core import Parallel, RunConfig, models
from vdpp_core.engine import preflight, worker
from vdpp_core.engine.measure import keep_freed_memory
from vdpp_core.engine.videos import Official
from vdpp_core.runs.run import Run

PAIRS = 15  # short, since the machine drifts
CPU = torch.device("cpu")
WAN = {"num_attention_heads": 8, "attention_head_dim": 48, "num_layers": 8, "ffn_dim": 1536}
ONE: dict[str, Any] = {"threads": 1, "device": "cpu", "parallel": Parallel()}
RUN = ONE | {"command": "generate", "total_steps": 28, "num_samples": 1}
LIMITS = {"tiny": 0.97, "tiny, shortcuts": 0.85, "medium": 0.97, "medium, shortcuts": 0.85, "wan": 1.02}


def official_s(official: Official) -> tuple[float, torch.Tensor]:
    """Seconds of the pipeline's denoising, from its first call of a denoiser to its return, and the latents."""
    pipeline, began = official.pipeline, list[float]()
    denoiser = getattr(pipeline, "unet", None) or pipeline.transformer
    hook = denoiser.register_forward_pre_hook(lambda *_: began.append(time.perf_counter()))
    latents = official._call(0, output_type="latent")
    hook.remove()
    return time.perf_counter() - began[0], latents


def run_ratios(config: RunConfig) -> tuple[list[float], float]:
    """The engine's makespan of one sample over the official pipeline's, pair by pair, and the latents' difference."""
    config = config.replace(save_latents=True)
    official = Official(config, CPU, torch.float32)
    torch.set_num_threads(1)
    _, expected = official_s(official)
    found, difference = [], 0.0
    for pair in range(PAIRS):
        seconds = {}
        for who in ("ours", "official") if pair % 2 else ("official", "ours"):
            if who == "ours":
                run = Run(worker.run(config))
                result = run.result()
                assert result is not None
                seconds[who] = result["makespan_s"]
                latents = run.load_latents(0)
            else:
                torch.set_num_threads(1)
                seconds[who], _ = official_s(official)
        aligned = expected if latents.shape == expected.shape else expected.transpose(1, 2)
        difference = max(difference, ((latents - aligned).norm() / aligned.norm()).item())
        found.append(seconds["ours"] / seconds["official"])
    return found, difference


def conditioning(unet: Any, frames: int, rows: int, columns: int) -> dict[str, Any]:
    """Arguments of a forward pass of both guidance passes."""
    generator = torch.Generator().manual_seed(0)
    return {
        "sample": torch.randn(2, frames, 8, rows, columns, generator=generator),
        "timestep": torch.tensor(0.7),
        "encoder_hidden_states": torch.randn(2, 1, unet.config.cross_attention_dim, generator=generator),
        "added_time_ids": torch.tensor([[6, 127, 0.02]] * 2),
        "return_dict": False,
    }


@torch.no_grad()
def alternate(unets: dict[str, Any], given: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Seconds of each UNet's forward passes, in turns, after one that is not timed."""
    seconds: dict[str, list[float]] = {name: [] for name in unets}
    for number in range(rounds + 1):
        for name in list(unets) if number % 2 else reversed(unets):
            began = time.perf_counter()
            unets[name](**given)
            seconds[name].append(time.perf_counter() - began)
    return {name: took[1:] for name, took in seconds.items()}


@torch.no_grad()
def pass_ratios(config: RunConfig, rounds: int = PAIRS) -> tuple[list[float], float]:
    """A forward pass with what a run applies over one of the UNet as published, pair by pair."""
    plain = models.load_plain(config, CPU, torch.float32)
    unets = {"plain": plain, "ours": models.ready(config, copy.deepcopy(plain))}
    given = conditioning(plain, *config.shape[2:])
    torch.set_num_threads(1)
    seconds = alternate(unets, given, rounds)
    expected, found = (unet(**given)[0] for unet in unets.values())
    ratios = [ours / theirs for ours, theirs in zip(seconds["ours"], seconds["plain"], strict=True)]
    return ratios, ((found - expected).norm() / expected.norm()).item()


def main(*names: str) -> None:
    keep_freed_memory(True)
    medium = RunConfig(model="medium", random_weights=True, latent_shape=(1, 4, 8, 16, 16), **ONE)
    rows = {}
    with tempfile.TemporaryDirectory() as root:
        wan = str(folder("wan", root=Path(root), **WAN))
        runs = {
            "tiny": RunConfig(**RUN),
            "medium": medium,
            "wan": RunConfig(model_id=wan, **PROMPT, num_frames=9, height=64, width=64, **RUN),
        }
        runs |= {f"{name}, shortcuts": runs[name].replace(shortcuts=True) for name in ("tiny", "medium")}
        for name, config in runs.items():
            if not names or name in names:
                measure = pass_ratios if config.command == "benchmark" else run_ratios
                ratios, difference = measure(preflight.complete(config, 1))
                rows[name] = {**pd.Series(ratios).agg(["median", "min", "max"]), "difference": difference}
    print(pd.DataFrame(rows).T.to_string(float_format="{:.3g}".format))
    for name, row in rows.items():
        print(f"{'holds ' if row['median'] <= LIMITS[name] else 'MISSED'}  {name} ≤ {LIMITS[name]} × official")


if __name__ == "__main__":
    main(*sys.argv[1:])
