"""A UNet before, while and after it is split over the ranks; rank 0 prints JSON.

python -m tests.distributed.forked N tests.distributed.lockstep [--all] LAYOUT…
with each LAYOUT the JSON of a Parallel of N ranks. For each, in one process, fp32 and fp64: num_frames 5, 14, 25 at
latents of 9 × 16 or 8 × 8, with --all at both; of those that combine axes one case. On two ranks, also the official
pipeline (`official.py`) around a UNet that is split by frames.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from diffusers import UNetSpatioTemporalConditionModel

import vdpp_core
from tests.distributed import dtensors, official
from vdpp_core import Parallel
from vdpp_core.config.fields import MODELS

TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12}
ALL = [(frames, size) for frames in (5, 14, 25) for size in ((9, 16), (8, 8))]
SOME = [(5, (9, 16)), (14, (9, 16)), (25, (8, 8))]


def inputs(frames: int, size: tuple[int, int], dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(frames)
    return {
        "sample": torch.randn(2, frames, 8, *size, generator=generator, dtype=dtype),
        "timestep": torch.tensor(1.3),
        "encoder_hidden_states": torch.randn(2, 1, 32, generator=generator, dtype=dtype),
        "added_time_ids": torch.tensor([[6, 127, 0.02]] * 2, dtype=dtype),
    }


def tiny(dtype: torch.dtype) -> Any:
    unet = UNetSpatioTemporalConditionModel.from_pretrained(MODELS["tiny"], subfolder="unet").eval()
    return torch.nn.Module.to(unet, dtype)


@functools.cache
def of_rank_0(frames: int, size: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Computed by one rank alone, known to all."""
    given = inputs(frames, size, dtype)
    prediction = tiny(dtype)(**given).sample if dist.get_rank() == 0 else given["sample"][:, :, :4].contiguous()
    dist.broadcast(prediction, 0)
    return prediction


def is_refused(network: Any, mesh: Any) -> bool:
    """Whether it is said that a network cannot be split, or not again, before anything was changed."""
    before = dict(network.__dict__)
    try:
        vdpp_core.parallelize(network, mesh)
    except ValueError:
        return network.__dict__ == before
    vdpp_core.restore(network)
    return False


def errors(layout: Parallel, dtype: torch.dtype, several: list[tuple[int, tuple[int, int]]]) -> dict[str, Any]:
    """Relative error of each case, and whether the UNet is afterwards what it was."""
    unet = tiny(dtype)
    combined = layout.fsdp or layout.world_size > max(layout.frames, layout.cfg, layout.tp)
    cases = several[1:2] if combined else several
    alone = [of_rank_0(*case, dtype) for case in cases]
    mesh = layout.mesh("cpu")
    assert is_refused(torch.nn.Linear(1, 1), mesh) == (layout.frames * layout.tp > 1)
    assert vdpp_core.parallelize(unet, mesh, fsdp=layout.fsdp) is unet
    assert is_refused(unet, mesh)  # a second time
    found = {}
    for (frames, size), expected in zip(cases, alone, strict=True):
        prediction = unet(**inputs(frames, size, dtype), return_dict=False)[0]
        assert prediction.shape == expected.shape
        found[f"{frames} × {size[0]} × {size[1]}"] = ((prediction - expected).norm() / expected.norm()).item()
    if layout.fsdp and layout.tp > 1:
        try:
            vdpp_core.restore(unet)
        except ValueError as error:
            return {"errors": found, "same_afterwards": "stays in pieces" in str(error)}
    vdpp_core.restore(unet)
    again = unet(**inputs(*several[0], dtype)).sample
    return {"errors": found, "same_afterwards": torch.equal(again, of_rank_0(*several[0], dtype))}


def main() -> None:
    several = ALL if sys.argv[1] == "--all" else SOME
    layouts = [argument for argument in sys.argv[1:] if argument != "--all"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with torch.no_grad():
        results: dict[str, Any] = {
            argument: {str(dtype): errors(Parallel(**json.loads(argument)), dtype, several) for dtype in TOLERANCES}
            for argument in layouts
        }
    if dist.get_world_size() == 2:
        results["official"] = official.compare(Parallel(frames=2))
        with torch.no_grad():
            results["dtensors"] = dtensors.compare(Parallel(tp=2).mesh("cpu")["tp"])
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, results)
    if dist.get_rank() == 0:
        print(json.dumps(everyone))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
