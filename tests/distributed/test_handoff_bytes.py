"""Ranks hand on as many bytes as was predicted, whatever the solver remembers."""

from __future__ import annotations

from pathlib import Path

import pytest

import launch
from tests.families import FAMILIES, folder
from vdpp_core import Parallel, RunConfig
from vdpp_core.predict import messages

OF_RUN = ("prompt", "negative_prompt", "num_frames", "height", "width")


@pytest.mark.parametrize("solver", ["EulerDiscreteScheduler", "PNDMScheduler", "UniPCMultistepScheduler"])
def test_bytes_counted_are_the_bytes_predicted(solver: str, tmp_path: Path) -> None:
    call = {name: value for name, value in FAMILIES["animatediff"].call.items() if name in OF_RUN}
    model = str(folder("animatediff", solver, tmp_path))
    config = RunConfig(model_id=model, total_steps=4, threads=1, device="cpu", parallel=Parallel(pp=3), **call)
    job = launch.start(config.replace(output_dir=tmp_path / "run"))
    job.wait(90)
    predicted = messages.per_stage(job.run.config)
    assert job.result()["outcome"] == "ok"
    assert job.result()["handoff_bytes_per_rank"] == messages.per_rank(job.run.config) == [*predicted, None]
    assert (predicted[0] > messages.of(job.run.config).latents) == (solver != "EulerDiscreteScheduler")
