"""The libraries people would otherwise use and ours, on the same samples, one after another on the same ranks.

Measured is the denoising, UNet and scheduler, after an untimed warm-up; never loading, encoding or decoding. Of the
official pipeline, and of accelerate, which has it on every rank: for each sample the time from the first call of the
UNet to the pipeline's return, summed over a rank's samples, of the slowest rank. Of GPipe: from a barrier to the last
output. Of ours: the run's makespan, with all that comes between two samples, such as writing latents and events.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from diffusers import StableVideoDiffusionPipeline
from diffusers.utils.torch_utils import randn_tensor
from PIL import Image
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from vdpp_core import models
from vdpp_core.compare import peers_report
from vdpp_core.compare.peers_report import Run
from vdpp_core.config import RunConfig
from vdpp_core.config.execution import Execution, resolve
from vdpp_core.config.steps import split
from vdpp_core.engine import worker
from vdpp_core.engine.measure import Stopwatch, keep_freed_memory
from vdpp_core.engine.videos import official_arguments
from vdpp_core.models import conditioning
from vdpp_core.models.conditioning import Conditioning
from vdpp_core.models.denoising import Denoiser
from vdpp_core.models.images import read_image
from vdpp_core.models.svd import load_pipeline
from vdpp_core.parallel.rendezvous import Ranks, first_ones
from vdpp_core.parallel.world import World, communication, device_of, joined
from vdpp_core.runs import results, runfolder, saved_latents

Denoised = tuple[dict[int, Tensor], list[float]]  # sample -> latents (B, F, C, H, W), and the seconds of each part
WARM_UP_STEPS = 2  # of the official pipeline, as many as the engine's own; GPipe's: one of each stage on every sample


def measure(config: RunConfig, runs: Sequence[Run], ranks: Ranks) -> None:
    """Do all runs, of `peers_report.plan` and prepared in the folder of `config`; rank 0 writes what came out."""
    keep_freed_memory(True)
    folder = config.output_dir
    assert folder is not None
    execution = resolve(config, ranks.local_world_size)
    torch.set_num_threads(execution.threads)
    device = device_of(execution, ranks.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # already for loading, which is before the first process group
    peers = Peers(config, execution, device)
    measured = []
    for number, run in enumerate(runs):
        _tidy(device)
        variant, work = run.variant, partial(_ours if run.variant.ours else peers.run, folder / run.run_id, run)
        found = first_ones(ranks, variant.layout.world_size, run.run_id, work)
        if ranks.rank == 0 and found is not None:
            print(f"{number + 1}/{len(runs)}  {variant.name}: {found['makespan_s']:.3f} s", file=sys.stderr)
            measured.append(peers_report.entry(run) | found)
    if ranks.rank == 0:
        peers_report.write(folder, peers_report.facts(config, ranks.world_size, runs[-1].repeat + 1), measured)


def _tidy(device: torch.device) -> None:
    """The run before leaves nothing behind for which this one would have to make room."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _ours(folder: Path, run: Run, ranks: Ranks) -> dict[str, Any]:
    """One run of the engine; what rank 0 reads of its result."""
    try:
        worker.execute(folder, ranks)
    except BaseException:
        results.settle(folder, again=True)
        raise
    result = runfolder.read_result(folder) or {}
    return {name: result.get(name) for name in ("makespan_s", "latency_s")}


class Peers:
    """The peers on this rank: one UNet, the official pipeline around it, and what GPipe's stages need to know."""

    def __init__(self, config: RunConfig, execution: Execution, device: torch.device) -> None:
        self.config, self.execution, self.device, self.dtype = config, execution, device, execution.dtype
        self.samples = list(range(config.num_samples))
        self.unet = models.load(config, device, self.dtype)
        draws = conditioning.generators(config, self.samples)
        scheduler, own_scheduler = (models.load_scheduler(config, device) for _ in range(2))  # they count their steps
        if config.image_path is None:
            told = Conditioning.empty(config, self.unet, config.num_samples, device, self.dtype)
            told = conditioning.synthetic(config, told, self.samples)
            self.pipeline: Any = WithoutEncoders.around(self.unet, scheduler, told)
        else:
            self.pipeline = load_pipeline(config, self.unet, scheduler, device, self.dtype)
            told = conditioning.encode(config, self.pipeline, draws)
        self.denoiser = Denoiser(config, self.unet, own_scheduler, told)
        self.noise = torch.cat([self.denoiser.noise(generator) for generator in draws])

    def run(self, folder: Path, run: Run, ranks: Ranks) -> dict[str, Any]:
        """One run of a peer: makespan, and latencies where they are known. The latents go into `folder`."""
        denoise: dict[str, Callable[[World], Denoised]] = {
            "one rank": lambda world: self._official(world, self.samples),
            "data parallel": self._accelerate,
            "step pipeline": self._gpipe,
        }
        kind, everyone = run.variant.kind, [[0.0]] * ranks.world_size
        with joined(run.variant.layout, self.execution, ranks, str(folder)) as world:
            latents, seconds = denoise[kind](world)
            for sample, value in latents.items():
                saved_latents.save_latents(folder, sample, value.transpose(1, 2))
            if world.world_size > 1:
                with communication():
                    dist.all_gather_object(everyone, seconds)
            else:
                everyone = [seconds]
        latencies = [] if kind == "step pipeline" else [latency for own in everyone for latency in own]
        return {"makespan_s": max(map(sum, everyone)), "latency_s": latencies}

    def _accelerate(self, world: World) -> Denoised:
        state = PartialState(cpu=world.device.type == "cpu")  # takes the process group that is there
        torch.set_num_threads(self.execution.threads)  # it sets a number of its own where torchrun has set none
        try:
            with state.split_between_processes(self.samples) as share:
                return self._official(world, share)
        finally:
            PartialState._reset_state()  # else it outlives the process group

    def _official(self, world: World, samples: Sequence[int]) -> Denoised:
        """One call of the official pipeline a sample."""
        steps = self.config.total_steps
        for warm_up_steps in (min(WARM_UP_STEPS, steps), *[steps] * self.config.warmup_samples):
            self._call(0, warm_up_steps)
        world.barrier()
        latents, seconds = {}, []
        for sample in samples:
            latents[sample], latency = self._call(sample, steps)
            seconds.append(latency)
        return latents, seconds

    def _call(self, sample: int, steps: int) -> tuple[Tensor, float]:
        """A sample's latents by the official pipeline, and the seconds from its first UNet call to its return."""
        stopwatch = Stopwatch(self.device)

        def start(*_: Any) -> None:
            hook.remove()
            stopwatch.start()

        hook = self.unet.register_forward_pre_hook(start)
        arguments = official_arguments(self.config) | {"num_inference_steps": steps, "output_type": "latent"}
        latents = self.pipeline(**self._of_sample(sample), **arguments).frames
        return latents, stopwatch.stop()

    def _of_sample(self, sample: int) -> dict[str, Any]:
        """What the official pipeline is called with for a sample alone."""
        config, generator = self.config, conditioning.generators(self.config, [sample])[0]
        if config.image_path is not None:
            return {"image": read_image(config.image_path, config.image_size), "generator": generator}
        self.pipeline.sample = sample
        shape = self.denoiser.latent_shape  # given, since the pipeline would draw noise for an image before it
        noise = randn_tensor(shape, generator=generator, device=self.device, dtype=self.dtype)
        return {"image": Image.new("RGB", config.image_size), "latents": noise}

    @torch.no_grad()
    def _gpipe(self, world: World) -> Denoised:
        """A micro-batch is one sample. All come out at the end, so that the latency of each is not known."""
        number, batch = len(self.samples), self.config.shape[0]
        steps = split(self.config.total_steps, world.world_size)[world.rank]
        stage, like = Stage(self.denoiser), self.noise[:batch]
        pipelined = PipelineStage(stage, world.rank, world.world_size, self.device, input_args=like, output_args=like)
        schedule = ScheduleGPipe(pipelined, n_microbatches=number)
        given = (self.noise,) if world.rank == 0 else ()
        stopwatch = Stopwatch(self.device)
        for stage.steps in (steps[:1], steps):  # the first round warms up
            world.barrier()
            stopwatch.start()
            latents = schedule.eval(*given, sample=torch.tensor(self.samples))
            seconds = stopwatch.stop()
        return {} if latents is None else dict(zip(self.samples, latents.split(batch), strict=True)), [seconds]


class Stage(nn.Module):
    """A stage's steps of one sample, for torch's pipelining: the engine's arithmetic in a schedule of others."""

    def __init__(self, denoiser: Denoiser) -> None:
        super().__init__()
        self.denoiser, self.steps = denoiser, range(0)

    def forward(self, latents: Tensor, sample: Tensor) -> Tensor:
        trajectory = self.denoiser.begin(int(sample), self.steps[0])
        for step in self.steps:
            latents = trajectory.step(latents, step)
        return latents


class WithoutEncoders(StableVideoDiffusionPipeline):
    """The official pipeline where there are no encoders: its own loop, told what the engine is told without an image.

    Its image is only looked at for its size.
    """

    told: Conditioning
    sample = 0

    @classmethod
    def around(cls, unet: Any, scheduler: Any, told: Conditioning) -> WithoutEncoders:
        pipeline = cls(vae=None, image_encoder=None, unet=unet, scheduler=scheduler, feature_extractor=None)
        pipeline.vae = SimpleNamespace(dtype=told.dtype, config=SimpleNamespace(force_upcast=False))  # it asks for both
        pipeline.told = told
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def _encode_image(self, *_: Any) -> Tensor:
        return self.told.image_embeddings

    def _encode_vae_image(self, *_: Any, **__: Any) -> Tensor:
        return self.told.image_latents[self.sample]
