"""Other libraries for the same job and ours, on the same samples, one after another on the same ranks.

Only the denoising (UNet and scheduler) is measured, after an untimed warm-up; never loading, encoding or decoding.

Official pipeline, and accelerate, which runs it on every rank: for each sample the time from the first call of the UNet
to the pipeline's return, summed over a rank's samples; the slowest rank counts. GPipe (Huang et al. 2019, as in
torch.distributed.pipelining): from a barrier to the last output. Ours: the makespan of the run, including what happens
between two samples, such as writing latents and events.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from vdpp_core import models
from vdpp_core.compare import peers_report
from vdpp_core.compare.first_ranks import by_first_ranks
from vdpp_core.compare.peers_report import Trial, Variant
from vdpp_core.config import RunConfig
from vdpp_core.config.execution import Execution, resolve
from vdpp_core.config.steps import split
from vdpp_core.engine import worker
from vdpp_core.engine.measure import Stopwatch, keep_freed_memory
from vdpp_core.models import pipelines
from vdpp_core.models.message import Message
from vdpp_core.models.stage import Stage
from vdpp_core.models.stand_ins import Inventor, Real, Recorder
from vdpp_core.models.svd import call_arguments
from vdpp_core.parallel.rendezvous import Ranks
from vdpp_core.parallel.world import World, communication, device_of, joined
from vdpp_core.runs import results
from vdpp_core.runs.run import Run

Denoised = tuple[dict[int, Tensor], list[float]]  # sample -> latents (B, F, C, H, W), and the seconds of each part
WARM_UP_STEPS = 2  # of the official pipeline, as many as the engine's own; GPipe's: one of each stage on every sample


def measure(config: RunConfig, trials: Sequence[Trial], ranks: Ranks) -> None:
    """Do all trials of `peers_report.plan`, prepared in the folder of `config`. Rank 0 writes the comparison."""
    keep_freed_memory(True)
    folder = config.output_dir
    assert folder is not None
    execution = resolve(config, ranks.local_world_size)
    torch.set_num_threads(execution.threads)
    device = device_of(execution, ranks.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # loading already needs it, before the first process group
    peers = Peers(config, execution, device)
    measured = []
    for number, trial in enumerate(trials, start=1):
        _tidy(device)
        variant, run = trial.variant, Run(folder / trial.run_id)
        work = partial(_ours, run) if variant.ours else partial(peers.run, run, variant)
        found = by_first_ranks(ranks, variant.layout.world_size, run.id, work)
        if ranks.rank == 0 and found is not None:
            print(f"{number}/{len(trials)}  {variant.name}: {found['makespan_s']:.3f} s", file=sys.stderr)
            measured.append(peers_report.entry(trial) | found)
    if ranks.rank == 0:
        peers_report.write(folder, peers_report.facts(config, ranks.world_size, trials[-1].repeat + 1), measured)


def _tidy(device: torch.device) -> None:
    """Free what the run before left behind, so that this one need not make room for itself."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _ours(run: Run, ranks: Ranks) -> dict[str, Any]:
    """One run of the engine, and what its result says."""
    try:
        worker.execute(run, ranks)
    except BaseException:
        results.settle(run, again=True)
        raise
    result = run.result() or {}
    return {name: result.get(name) for name in ("makespan_s", "latency_s")}


class Peers:
    """The peers on this rank: one UNet, the official pipeline around it, and the engine's stage for GPipe."""

    def __init__(self, config: RunConfig, execution: Execution, device: torch.device) -> None:
        self.config, self.execution, self.device, self.dtype = config, execution, device, execution.dtype
        self.samples = list(range(config.num_samples))
        self.unet = models.load_plain(config, device, self.dtype)
        self.stage = Stage.around(config, {"unet": self.unet}, device, self.dtype, Stopwatch(device))
        encoders = Real(lambda name: pipelines.load_part(config, name, device, self.dtype))
        self.stage.encode(self.samples, Recorder(encoders if config.encodes else Inventor(config.seed)))
        self.official = pipelines.around(config, {"unet": self.unet}, device, self.dtype)
        self.official.answer(self.stage.player)

    def run(self, run: Run, variant: Variant, ranks: Ranks) -> dict[str, Any]:
        """One run of a peer, which saves its latents: makespan and, where known, latencies in seconds."""
        denoise: dict[str, Callable[[World], Denoised]] = {
            "one rank": lambda world: self._official(world, self.samples),
            "data parallel": self._accelerate,
            "step pipeline": self._gpipe,
        }
        everyone = [[0.0]] * ranks.world_size
        with joined(variant.layout, self.execution, ranks, str(run.folder)) as world:
            latents, seconds = denoise[variant.kind](world)
            for sample, value in latents.items():
                run.save_latents(sample, value.transpose(1, 2))
            if world.world_size > 1:
                with communication():
                    dist.all_gather_object(everyone, seconds)
            else:
                everyone = [seconds]
        latencies = [] if variant.kind == "step pipeline" else [latency for own in everyone for latency in own]
        return {"makespan_s": max(map(sum, everyone)), "latency_s": latencies}

    def _accelerate(self, world: World) -> Denoised:
        state = PartialState(cpu=world.device.type == "cpu")  # uses the existing process group
        torch.set_num_threads(self.execution.threads)  # PartialState sets its own where torchrun sets none
        try:
            with state.split_between_processes(self.samples) as share:
                return self._official(world, share)
        finally:
            PartialState._reset_state()  # else it outlives the process group

    def _official(self, world: World, samples: Sequence[int]) -> Denoised:
        """One call of the official pipeline for each sample."""
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
        arguments = call_arguments(self.config) | {"num_inference_steps": steps, "output_type": "latent"}
        self.stage.player.play(self.stage.recording[sample].answers)
        generator = torch.Generator().manual_seed(self.config.seed + sample)
        latents = self.official.pipeline(**arguments, generator=generator).frames
        return latents, stopwatch.stop()

    @torch.no_grad()
    def _gpipe(self, world: World) -> Denoised:
        """A micro-batch is one sample. All are returned together at the end, so their latencies are not known."""
        number, batch = len(self.samples), self.config.shape[0]
        steps = split(self.config.total_steps, world.world_size)[world.rank]
        noise = torch.cat([self.stage.denoise(sample, range(0), None).latents for sample in self.samples])
        part, like = Part(self.stage), noise[:batch]
        pipelined = PipelineStage(part, world.rank, world.world_size, self.device, input_args=like, output_args=like)
        schedule = ScheduleGPipe(pipelined, n_microbatches=number)
        given = (noise,) if world.rank == 0 else ()
        stopwatch = Stopwatch(self.device)
        for part.steps in (steps[:1], steps):  # the first round warms up
            world.barrier()
            stopwatch.start()
            latents = schedule.eval(*given, sample=torch.tensor(self.samples))
            seconds = stopwatch.stop()
        return {} if latents is None else dict(zip(self.samples, latents.split(batch), strict=True)), [seconds]


class Part(nn.Module):
    """A stage's steps of one sample, for torch's pipelining: the engine's arithmetic in torch's schedule."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage, self.steps = stage, range(0)

    def forward(self, latents: Tensor, sample: Tensor) -> Tensor:
        """Latents (B, F, C, H, W) of a sample after the stage's steps."""
        given = Message(latents) if self.steps.start > 0 else None
        return self.stage.denoise(int(sample), self.steps, given).latents
