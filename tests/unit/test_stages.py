"""Every family and solver in stages, one after another in this process: the latents of the official pipeline."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from tests import families
from tests.families import FAMILIES
from vdpp_core import models
from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.engine import preflight
from vdpp_core.models import pipelines
from vdpp_core.models.message import Message, Packing
from vdpp_core.models.solver import Solver
from vdpp_core.models.stage import NoClock, Recording, Stage
from vdpp_core.models.stand_ins import Real, Recorder

CPU, FP32 = torch.device("cpu"), torch.float32
CASES = [(name, solver) for name, family in FAMILIES.items() for solver in family.solvers]
IN_THREE = (range(2), range(2, 6), range(6, 7))


class Stages:
    """Stages of a call, each with a pipeline of its own around the same denoisers."""

    def __init__(self, folder: Path, call: dict[str, Any], steps: int = 7) -> None:
        self.config = RunConfig(model_id=str(folder), total_steps=steps)
        self.arguments = call | {"num_inference_steps": steps}
        self.denoisers = models.load_denoisers(self.config, CPU, FP32)
        real = Real(lambda name: pipelines.load_part(self.config, name, CPU, FP32))
        encoder = self.stage()
        encoder.encode([0], Recorder(real))
        self.recording: Recording = encoder.recording

    def stage(self) -> Stage:
        official = pipelines.around(self.config, self.denoisers, CPU, FP32)
        return Stage(official, lambda _: self.arguments, lambda _: 0, NoClock())

    def run(self, parts: Sequence[range]) -> tuple[torch.Tensor, list[int]]:
        """The latents, and the bytes of each message."""
        given, sizes = None, []
        for steps in parts:
            stage = self.stage()
            stage.recording = self.recording
            if given is not None:
                packing = Packing(self.example(stage, steps), stage.solver.name)
                given = packing.unpack(packing.pack(given))
                sizes.append(packing.size)
            given = stage.denoise(0, steps, given)
        assert given is not None
        return given.latents, sizes

    def example(self, stage: Stage, steps: range) -> Message:
        predictions: list[Any] = []
        with stage.seeing(predictions):
            stage.denoise(0, steps[:1], stage.denoise(0, range(0), None))
        return stage.rehearse(0, range(steps.start), predictions[0])


@pytest.mark.parametrize(("name", "solver"), CASES)
def test_stages_give_the_official_latents(name: str, solver: str):
    """Of two calls of different size, one after the other."""
    folder = families.folder(name, solver)
    for call in (FAMILIES[name].call, FAMILIES[name].other_call):
        latents, sizes = Stages(folder, call).run(IN_THREE)
        assert torch.equal(latents, families.official(folder, call, 7, 0))
        assert min(sizes) >= latents.nbytes


@pytest.mark.parametrize(
    ("solver", "tensors"),
    [("DDIMScheduler", 1), ("EulerDiscreteScheduler", 1), ("DPMSolverMultistepScheduler", 3), ("PNDMScheduler", 4)],
)
def test_a_message_is_no_larger_than_what_the_solver_remembers(solver: str, tensors: int):
    """After four steps: the latents, and as many predictions as the solver keeps."""
    latents, (size,) = Stages(families.folder("animatediff", solver), FAMILIES["animatediff"].call).run(
        (range(4), range(4, 7))
    )
    assert size == tensors * latents.nbytes


def test_nothing_of_a_sample_is_left_in_the_next():
    """UniPC does not reset all of its attributes itself."""
    stages = Stages(families.folder("wan", "UniPCMultistepScheduler"), FAMILIES["wan"].call)
    stage = stages.stage()
    stage.recording = stages.recording
    first, again = (stage.denoise(0, range(3), None) for _ in range(2))
    assert first.memory.keys() == again.memory.keys()
    assert torch.equal(first.latents, again.latents)


def test_a_solver_that_remembers_an_object_is_refused_by_name():
    example = Message(torch.zeros(2), {"history": [torch.zeros(2), object()]})
    with pytest.raises(TypeError, match=r"^DDIMScheduler remembers a object"):
        Packing(example, "DDIMScheduler")


def test_a_message_that_differs_from_its_rehearsal_is_refused():
    packing = Packing(Message(torch.zeros(2), {"counter": 3}), "PNDMScheduler")
    with pytest.raises(RuntimeError, match="remembers something else"):
        packing.pack(Message(torch.zeros(2), {"counter": 4}))


@pytest.mark.parametrize("steps", [1, 2, 5, 7])
def test_solvers_with_more_timesteps_than_steps_report_each_step_once(steps: int):
    from diffusers import HeunDiscreteScheduler, PNDMScheduler

    for scheduler in (HeunDiscreteScheduler(), PNDMScheduler(skip_prk_steps=True)):
        solver, reported = Solver(scheduler, steps), []
        latents = torch.ones(1, 4, 2, 2)
        for part in (range(steps // 2), range(steps // 2, steps)):
            solver.show(part, solver.memory() if part.start else {}, reported.append)
            solver.scheduler.set_timesteps(steps)
            for timestep in solver.scheduler.timesteps:
                solver.scheduler.scale_model_input(latents, timestep)
                latents = solver.scheduler.step(latents, timestep, latents).prev_sample
        assert reported == list(range(steps))


def test_it_is_refused_before_any_rank_starts(monkeypatch: pytest.MonkeyPatch):
    step = diffusers.DDIMScheduler.step

    def remembering(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        scheduler.tree = object()
        return step(scheduler, *args, **kwargs)

    monkeypatch.setattr(diffusers.DDIMScheduler, "step", remembering)
    config = RunConfig(model_id=str(families.folder("animatediff")), prompt="a cat", height=32, width=32)
    with pytest.raises(ConfigError, match=r"^pp 2: DDIMScheduler remembers a object, which cannot be handed on"):
        preflight.complete(config, 2)
    assert preflight.complete(config, 1).latent_shape


def test_a_pipeline_that_cannot_be_called_with_latents_is_refused(tmp_path: Path):
    place = tmp_path / "ddpm"
    shutil.copytree(families.folder("animatediff"), place)
    index = json.loads((place / "model_index.json").read_text()) | {"_class_name": "DDPMPipeline"}
    (place / "model_index.json").write_text(json.dumps(index))
    words = r"cannot be split by steps: the call of DDPMPipeline has no latents$"
    with pytest.raises(ConfigError, match=rf"^model_id {place}: {words}"):
        preflight.complete(RunConfig(model_id=str(place)), 2)
