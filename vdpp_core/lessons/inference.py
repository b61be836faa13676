"""Pipelines of inference: the UNet's layers spread over ranks, beside this project's pipeline of denoising steps."""

from __future__ import annotations

import copy
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from diffusers import EulerDiscreteScheduler
from torch import Tensor

import launch
from vdpp_core.config import RunConfig
from vdpp_core.config.fields import MODELS
from vdpp_core.config.layout import Parallel
from vdpp_core.lessons.layers import Stage, State, counted, cut, layers_of
from vdpp_core.lessons.measure import Span, Timeline
from vdpp_core.lessons.problems import PROBLEMS, SVDProblem
from vdpp_core.runs import event_types as kinds
from vdpp_core.runs.event_types import clock_starts
from vdpp_core.runs.results import measured_steps
from vdpp_core.runs.run import Run


@dataclass(frozen=True)
class Denoising:
    """How some ranks denoised some samples.

    Attributes:
        ranks: the spans of each; `micro_batch` is the sample and `chunk` the denoising step.
        hops: bytes of each time that a sample went from one rank to another.
    """

    ranks: list[list[Span]]
    hops: list[int]


class LayerPipeline:
    """A rank's layers of the UNet. Every step of every sample passes all ranks and goes back to the first.

    Samples are its micro-batches: with as many as ranks, a rank works on one while the others are elsewhere. torch's
    schedules end with each forward pass; here the next step follows without a pause.
    """

    def __init__(self, problem: SVDProblem, samples: int) -> None:
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.parts = problem.batch(samples, 0).parts(samples)
        model = problem.model().eval()
        layers = counted(model, self.parts[0].inputs)
        cuts = cut(layers, self.ranks)
        self.stage = Stage(model, layers_of(model), cuts[self.rank])
        self.received = layers[cuts[self.rank].start - 1].state if self.rank else (self.parts[0].target,)
        self.timeline = Timeline(torch.device("cpu"))
        self.scheduler = EulerDiscreteScheduler.from_pretrained(MODELS["tiny"], subfolder="scheduler")
        self.sending: list[Any] = []
        self.hops: list[int] = []

    @torch.no_grad()
    def denoise(self, steps: int) -> list[Tensor]:
        """The latents (1, frames, 4, H, W) of each sample, from noise; right on the last rank."""
        self.scheduler.set_timesteps(steps)
        shape = self.parts[0].target.shape
        noise = [torch.randn(shape, generator=torch.Generator().manual_seed(at)) for at in range(len(self.parts))]
        latents = [each * self.scheduler.init_noise_sigma for each in noise]
        for step in range(steps):
            for sample in range(len(self.parts)):
                latents[sample] = self._step(step, sample, latents[sample], step == steps - 1)
        for work, _ in self.sending:
            work.wait()
        self.sending.clear()
        return latents

    def _step(self, step: int, sample: int, latents: Tensor, is_last_step: bool) -> Tensor:
        """This rank's part of a step of a sample."""
        inputs, state = dict(self.parts[sample].inputs), ()
        inputs["timestep"] = self.scheduler.timesteps[step, None]
        if self.rank > 0:
            state = self._receive(sample, step)
        elif self.ranks > 1 and step > 0:
            (latents,) = self._receive(sample, step)
        with self.timeline.span("forward", sample, step):
            if self.rank == 0:
                scaled = self._scheduler_at(step).scale_model_input(latents, inputs["timestep"][0])
                inputs["sample"] = torch.cat([scaled, inputs["sample"][:, :, scaled.shape[2] :]], dim=2)
            state = self.stage(*state, **inputs)
            if self.stage.is_last:
                scheduler = self._scheduler_at(step)
                scheduler.is_scale_input_called = True
                latents = scheduler.step(state, inputs["timestep"][0], latents).prev_sample
        if not self.stage.is_last:
            self._send(state, self.rank + 1)
        elif self.ranks > 1 and not is_last_step:
            self._send((latents,), 0)
        return latents

    def _scheduler_at(self, step: int) -> Any:
        scheduler = copy.copy(self.scheduler)
        scheduler.set_begin_index(step)
        return scheduler

    def _receive(self, sample: int, step: int) -> State:
        buffers = tuple(torch.empty(each.shape, dtype=each.dtype) for each in self.received)
        with self.timeline.span("wait", sample, step):
            for buffer in buffers:
                dist.recv(buffer, (self.rank - 1) % self.ranks)
        return buffers

    def _send(self, state: State, to: int) -> None:
        self.sending += [(dist.isend(each.contiguous(), to), each) for each in state]
        self.hops.append(sum(each.nbytes for each in state))


def by_layers(ranks: int, samples: int, steps: int) -> Denoising:
    """Denoise on ranks that each have some of the UNet's layers, after an untimed step."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_be_rank, (ranks, samples, steps, Path(folder)), nprocs=ranks)
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    spans = [[Span(**span) for span in each["spans"]] for each in found]
    return Denoising(spans, [size for each in found for size in each["hops"]])


def _be_rank(rank: int, ranks: int, samples: int, steps: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    problem = PROBLEMS["svd"]
    assert isinstance(problem, SVDProblem)
    pipeline = LayerPipeline(problem, samples)
    (folder / f"{rank}.json").write_text(json.dumps(timed(pipeline, steps)))
    dist.destroy_process_group()


def timed(pipeline: LayerPipeline, steps: int) -> dict[str, Any]:
    """What a rank did, as JSON: spans and hops, after an untimed step."""
    pipeline.denoise(1)
    pipeline.hops.clear()
    dist.barrier()
    pipeline.timeline.restart()
    pipeline.denoise(steps)
    return {"spans": [asdict(span) for span in pipeline.timeline.spans], "hops": pipeline.hops}


def by_steps(ranks: int, samples: int, steps: int, **settings: Any) -> Denoising:
    """Denoise the same number of samples with this project's step pipeline: each rank has all layers and some steps.

    Args:
        settings: of the RunConfig.
    """
    problem = PROBLEMS["svd"]
    assert isinstance(problem, SVDProblem)
    shape = problem.batch(1, 0).target.shape
    latent_shape = (1, shape[2], shape[1], *shape[3:])
    sizes = {"total_steps": steps, "num_samples": samples, "latent_shape": latent_shape}
    config = RunConfig(**sizes, guidance_scale=1.0, parallel=Parallel(pp=ranks), **settings)
    job = launch.start(config)
    job.wait()
    return of_run(Run(job.folder))


def of_run(run: Run) -> Denoising:
    """What the ranks of a run of the step pipeline did."""
    events = run.events()
    zero = clock_starts(events)
    ranks: list[list[Span]] = [[] for _ in range(run.config.parallel.world_size)]
    for (rank, sample, _), steps in measured_steps(events).items():
        for each in steps:
            end = each.t - zero[rank]
            ranks[rank].append(Span("forward", end - each.seconds, end, sample, each.step, each.seconds))
    hops = [send.size or 0 for send in kinds.of(events, kinds.Send) if send.sample >= 0]
    return Denoising([sorted(spans, key=lambda span: span.begin) for spans in ranks], hops)
