"""The figures that the user's documents publish, and the runs that they are about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vdpp_core.config import RunConfig
from vdpp_core.config.layout import Parallel


def figures() -> dict[str, Any]:
    """The figures of the user's own experiment on seven A5000, under the documents' definitions."""
    return json.loads((Path(__file__).parent / "reference" / "a5000x7.json").read_bytes())


def memory_rows() -> dict[int, dict[str, Any]]:
    return {row["id"]: row for row in figures()["memory_cfg3_28steps_1sample"]}


PUBLISHED_STEPS = 28


def memory_config(row: dict[str, Any]) -> RunConfig:
    """The run of a row of the published memory experiment."""
    sharded = row["mode"] == "fsdp"
    return RunConfig(
        model="svd",
        random_weights=True,
        device="cuda",
        dtype="fp16",
        total_steps=PUBLISHED_STEPS,
        latent_shape=(1, 4, row["frames"], *row["latent_hw"]),
        guidance_mode="sequential",
        fsdp_same_sample=sharded,
        parallel=Parallel(dp=row["gpus"], fsdp=True) if sharded else Parallel(pp=row["gpus"]),
    )
