"""What one rank does: load, take, denoise, pass on. Data parallel is pp = 1, the step pipeline is dp = 1."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vdpp_core.config import RunConfig
from vdpp_core.config.execution import Execution, resolve
from vdpp_core.engine import collect_files, preflight, profiling
from vdpp_core.engine.exchange import Exchange
from vdpp_core.engine.measure import MemoryMeter, Stopwatch, device_use
from vdpp_core.engine.memory_limit import Device, OutOfMemoryError
from vdpp_core.engine.rank_monitor import RankMonitor
from vdpp_core.engine.swapping import Swap
from vdpp_core.models import pipelines, stand_ins
from vdpp_core.models.message import Message
from vdpp_core.models.stage import Passes, Stage
from vdpp_core.parallel import fsdp, guidance, loading
from vdpp_core.parallel.group import Collectives
from vdpp_core.parallel.parallelize import parallelize, sent
from vdpp_core.parallel.rendezvous import Ranks, agree
from vdpp_core.parallel.world import LostRankError, World, device_of, joined
from vdpp_core.runs import origin, processes, results, runfolder
from vdpp_core.runs.disturbed import Surroundings
from vdpp_core.runs.events import EventLog
from vdpp_core.runs.files import FullDiskError
from vdpp_core.runs.profiles import STEPS
from vdpp_core.runs.run import Run

if TYPE_CHECKING:
    from vdpp_core.engine import videos

Sink = Callable[[int, Tensor], None]


class Visit(NamedTuple):
    """Some steps of a sample on a rank; `turn` is the sample's number among those of the replica."""

    turn: int
    sample: int
    steps: range


def run(config: RunConfig, predict_times: results.PredictTimes | None = None) -> Path:
    """Do a run in this process, as its only rank, and return its run folder.

    Args:
        predict_times: see `results.settle`.

    Raises:
        ConfigError: this machine cannot do the run; raised before anything is loaded.
    """
    config = preflight.complete(config, 1)
    preflight.check(config, local_ranks=1)
    folder = runfolder.create(config)
    try:
        execute(Run(folder), Ranks(0, 1, 0, 1, under_torchrun=False), monitored=False, predict_times=predict_times)
    except BaseException:
        results.settle(Run(folder))
        raise
    return folder


def execute(
    run: Run,
    ranks: Ranks,
    monitored: bool = True,
    predict_times: results.PredictTimes | None = None,
    before: dict[str, Any] | None = None,
) -> None:
    """Do this rank's part of a run. Rank 0 writes result.json at the end.

    Args:
        monitored: watch for signals, a lost launcher and stalled ranks, and end this process when one occurs.
        predict_times: predicts the run's times from its warm-up; see `results.settle`.
        before: what this process spent before, `launch_s` and `import_s` of the start event.
    """
    config, began = run.config, time.perf_counter()
    execution = resolve(config, ranks.local_world_size)
    use = partial(device_use, device_of(execution, ranks.local_rank))
    surroundings = Surroundings(execution, ranks.local_rank == 0, use)
    with (
        EventLog(run.folder, ranks.rank) as log,
        RankMonitor(run, log, surroundings, ranks.under_torchrun) if monitored else nullcontext(),
    ):
        try:
            with joined(config.layout, execution, ranks, run.id) as world:
                known = (before or {}) | {"join_s": time.perf_counter() - began}
                _Rank(run, execution, ranks, world, log, surroundings, known).work()
                world.barrier()
                collect_files.finish(run, ranks, log, predict_times)
        except BaseException as error:
            log.last_word("error", **_last_words(error))
            raise
    if ranks.rank == 0 and not ranks.several_machines:
        results.write(run, "ok", predict_times=predict_times)


def _last_words(error: BaseException) -> dict[str, Any]:
    if isinstance(error, OutOfMemoryError):
        return {"error": str(error), "oom": error.facts}
    full = isinstance(error, FullDiskError)
    words = str(error) if full else f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return {"error": words, "lost_rank": error.rank if isinstance(error, LostRankError) else None}


@dataclass(eq=False)
class _Rank:
    """One rank's part of a run, top to bottom in the order in which it happens."""

    run: Run
    execution: Execution
    ranks: Ranks
    world: World
    log: EventLog
    surroundings: Surroundings
    before: dict[str, Any] = field(default_factory=dict)  # facts of the start event

    def __post_init__(self) -> None:
        config, world, self.todo = self.run.config, self.world, self.run.work
        self.config, self.dtype = config, self.execution.dtype
        self.steps = config.steps_of(world.rank)
        self.samples = config.samples(world.place.replica, self.todo.latents)  # its replica's
        self.padding = config.padding(world.place, self.todo.latents)
        self.busy = bool(self.samples or self.padding)
        self.ahead = config.rows is not None  # each row is encoded when its turn comes
        self.first, self.last = self.steps[0] == 0, self.steps[-1] == config.total_steps - 1
        self.stopwatch, self.meter = Stopwatch(world.device), MemoryMeter(world.device)
        self.phase = "loading"
        self.denoisers = nn.ModuleDict()
        self.swap: Swap | None = None  # where not all denoisers fit at once
        self.encoders: stand_ins.Recorder | None = None  # while rows may have to be encoded
        self.finished: dict[int, Tensor] = {}
        self.maker: videos.Maker | None = None  # of videos, while samples are denoised
        self._write_start()
        if config.model != "dummy":
            from vdpp_core.engine import videos

            self.videos = videos

    def _write_start(self) -> None:
        self.log.write(
            "start",
            pid=os.getpid(),
            created=processes.created_s(os.getpid()),
            host=socket.gethostname(),
            device=str(self.world.device),
            dtype=self.execution.dtype_name,
            backend=dist.get_backend(),
            threads=self.execution.threads,
            steps=[self.steps.start, self.steps.stop],
            **self.before,
        )

    def work(self) -> None:
        """Do everything, within the memory that the run allows.

        Raises:
            OutOfMemoryError: the memory did not suffice.
        """
        device = Device(self.world.device, self.config.memory_limit_gib)
        with device.limited():
            try:
                self._work()
            except (RuntimeError, MemoryError, OSError) as error:
                if full := device.explain(error, self.denoisers, self.phase):
                    raise full from error
                raise

    def _work(self) -> None:
        self.meter.set_baseline()
        if self.busy:
            self._load()
            self.meter.reset()
        self.world.barrier()
        self.origin = self._origin() if self.config.save_latents else ""
        self.phase = "warming up"
        if self.busy:
            self._warm_up()
            if self.config.decode == "as-ready" and self.last and self.world.speaks:
                self._keep_decoder()
        around = self.surroundings.begin()
        self.world.barrier()
        self.log.write("clock", **around)
        self.phase = "running"
        if self.busy:
            self._denoise(self.samples, self.padding, self._finish)
        facts: dict[str, Any] = {"memory": self.meter.peak(), **self.surroundings.so_far()}
        if self.config.profile:
            self.phase = "profiling"
            self._profile()
        if self.config.command == "generate":
            self.phase = "decoding"
            self._make_videos()
            facts["decode_memory"] = self.meter.peak()
        self.log.write("done", **facts)

    def _load(self) -> None:
        """Load the denoisers of this stage's steps, and encode; the encoders are freed when this returns, unless rows
        are encoded later."""
        config, world = self.config, self.world
        names, given = config.experts_of(world.place.stage), (world.device, self.dtype)
        tp = Collectives(world.mesh.get_group("tp")) if config.layout.tp > 1 else None
        load = partial(loading.load, config, dtype=self.dtype, mesh=world.shards, tp=tp)
        if config.swap is None:
            # some 15 MB of Python objects of FSDP are no memory of the model
            self.denoisers = load(device=world.device, only=names, structured=self.meter.set_baseline)
        self.stage = Stage.around(config, dict(self.denoisers), *given, self.stopwatch)
        began = time.perf_counter()
        self._encode()
        encode_s = time.perf_counter() - began
        self.passes = Passes(1, 1)
        if config.layout.cfg > 1 or config.sequential:
            self.passes = self.stage.loop(self.example).passes
        for denoiser in self.denoisers.values():
            self._split_steps(denoiser)
        if config.swap is not None:
            skeleton = partial(loading.structure, config, self.dtype, tp=tp)
            self.swap = Swap(config, self.stage, world.device, self.log, load, skeleton, self._split_steps)
            self._use_expert(self.steps)
        self.log.write("loaded", encode_s=encode_s)

    def _split_steps(self, denoiser: nn.Module) -> None:
        """Split a denoiser's forward pass over the lockstep group, and the guidance as the pipeline does it."""
        if self.config.layout.lockstep > 1:
            parallelize(denoiser, self.world.mesh, calls_per_step=self.passes.calls)
        if self.config.sequential and self.passes.stacked == 2:
            guidance.one_after_the_other(denoiser)

    def _use_expert(self, steps: range) -> None:
        """Have the expert of the first of these steps on the device, where experts are swapped."""
        if self.swap is not None:
            (name, _), *_ = self.config.segments(steps)
            assert name is not None
            self.swap.use(name)
            self.denoisers = nn.ModuleDict(self.swap.resident)

    def _encode(self) -> None:
        """Encode the replica's samples on its first rank, and send what the encoders returned to the others.

        Of a manifest, which may have many rows, only one sample of each form; see `_prepare`.
        """
        samples, encoders = list(self.samples) or [0], self._encoders()
        if self.ahead:
            samples = list({self._form_of(sample): sample for sample in samples}.values())
        if self.first and self.world.speaks:
            self.stage.encode(samples, encoders)
        self.stage.recording = self.world.share_object(self.stage.recording, source=0)
        self.example, self.kept = samples[0], {*samples, *self._to_decode()}
        self.encoders = encoders if self.ahead else None

    def _encoders(self) -> stand_ins.Recorder:
        """The encoders themselves, loaded when they are asked; where nothing is encoded, what they might return."""
        config = self.config
        if not (config.encodes and self.samples):
            return stand_ins.Recorder(stand_ins.Inventor(config.seed))
        load = partial(pipelines.load_part, config, device=self.world.device, dtype=self.dtype)
        return stand_ins.Recorder(stand_ins.Real(load))

    def _form_of(self, sample: int) -> Any:
        """What the messages of a sample depend on: which columns its row has, and further arguments of its call."""
        rows = self.config.rows
        return frozenset(rows[sample] if rows else ()), self.config.of_sample(sample).call

    def _origin(self) -> str:
        """The digest of rank 0's origin record, after each other machine has compared its own with it.

        Called when everything is loaded: by then a hub model's revision is known.
        """
        config, folder, execution = self.config, self.run.folder, self.execution
        subject = f"origin of {folder.name}"
        text = agree(self.ranks, lambda: origin.begin(folder, config, execution).to_json(), subject)
        record = origin.Origin.model_validate_json(text)
        if self.ranks.local_rank == 0 and self.ranks.rank > 0:
            origin.begin(folder, config, execution, record)
        return record.digest

    def _warm_up(self) -> None:
        """Run one of its own steps twice (the first one sets up), on all ranks at once; then the warm-up samples."""
        sample, predictions = self.example, list[Any]()
        self.stage.make_room(sample)
        with self.stage.seeing(predictions):
            cold_s = self._once(self.stage.denoise(sample, range(0), None))
        layout = self.config.layout
        self.exchange = Exchange(self.world, layout, self.stage, self.steps, self._form_of, with_encodings=self.ahead)
        self.made = self.exchange.learn(predictions[0])
        before = self._sent()
        seconds = self._once(self.exchange.example(sample))
        self.log.write("warm", seconds=seconds, cold_s=cold_s, sent_bytes=self._sent() - before)
        warm_ups = range(-self.config.warmup_samples, 0)
        own, most = (
            len(warm_ups[copy :: layout.copies[self.world.place.stage]]) for copy in (self.world.place.copy, 0)
        )
        self._denoise(warm_ups, most - own if layout.fsdp else 0, lambda *_: None)
        self._use_expert(self.steps)

    def _once(self, given: Message) -> float:
        """Run the first of its own steps on the example, and return its seconds."""
        seconds: list[float] = []
        self.stage.denoise(self.example, self.steps[:1], given, lambda _, step_s: seconds.append(step_s))
        return seconds[0]

    def _profile(self) -> None:
        """Trace some more steps, after the clock, so that neither times nor peaks of the run contain the profiler."""
        self.world.barrier()
        if self.busy:
            self._use_expert(self.steps)
            given = [self.exchange.example(self.example) for _ in range(STEPS)]
            with profiling.traced(self.denoisers, self.world.device, self.run.folder, self.ranks.rank):
                for message in given:
                    self._once(message)
        self.world.barrier()

    def _sent(self) -> int:
        return sum(sum(sent(denoiser).values()) for denoiser in self.denoisers.values())

    def _finish(self, sample: int, latents: Tensor) -> None:
        if not self.world.speaks:
            return
        if self.config.save_latents:
            if not torch.isfinite(latents).all():
                raise FloatingPointError(f"sample {sample}: latents are not finite; try fp32 or bf16, or less guidance")
            self.run.save_latents(sample, self._turned(latents), self.origin)
        self.log.write("sample", sample)
        if self.maker is not None:
            self.phase = "decoding"
            self.maker.make(sample, latents)
            self.phase = "running"
        elif self.config.command == "generate":
            self.finished[sample] = latents

    def _turned(self, latents: Tensor) -> Tensor:
        """From B C F H W of files to (B, F, C, H, W) of SVD's pipeline, or back. Other pipelines' stay as they are."""
        return latents.transpose(1, 2) if self.config.is_svd else latents

    def _keep_decoder(self) -> None:
        """Load what decodes samples while others are denoised."""
        given = self.world.device, self.dtype, self.log, self.stage.recording
        self.maker = self.videos.Maker(self.config, self.run.folder, (), *given)

    def _make_videos(self) -> None:
        """Free the UNet, and make this rank's share of the videos that are not made yet."""
        recording = None
        if self.busy:
            fsdp.release(self.denoisers)
            self.denoisers = nn.ModuleDict()
            recording = self.stage.recording
            del self.stage, self.exchange, self.swap
            self.encoders = None
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()
        as_ready = self.config.decode == "as-ready"
        if not as_ready:
            self.meter.reset()
        share = {} if as_ready else self._share_of_latents()
        for sample in self.todo.videos[self.world.rank :: self.world.world_size]:
            share[sample] = self._turned(self.run.load_latents(sample)).to(self.world.device)
        if self.maker is not None:
            self.maker.compare()
            self.maker = None
        if share:
            self.videos.make(self.config, self.run.folder, share, self.world.device, self.dtype, self.log, recording)
        self.world.barrier()
        if self.world.rank == 0:
            self.videos.write_overview(self.config, self.run.folder)

    def _share_of_latents(self) -> dict[int, Tensor]:
        """Sample -> latents, (B, F, 4, H, W), of every n-th sample of the replica, n being its number of ranks.

        They come from member 0 of the replica's last stage, of the copy that had the sample: only it kept them.
        """
        layout, own, share = self.config.layout, self._to_decode(), {}
        for turn, sample in enumerate(self.samples):
            latents = self.finished.pop(sample, None)
            if latents is None:
                latents = torch.empty_like(self.made, device=self.world.device)
            latents = latents.contiguous()
            self.world.share(latents, source=layout.rank(0, layout.pp - 1, copy=turn))
            if sample in own:
                share[sample] = latents
        return share

    def _to_decode(self) -> Sequence[int]:
        """The samples that this rank decodes when all are denoised."""
        team, config = self.world.team, self.config
        if config.command != "generate" or config.decode == "as-ready":
            return ()
        return self.samples[dist.get_rank(team) :: dist.get_world_size(team)]

    def _denoise(self, samples: Sequence[int], padding: int, sink: Sink) -> None:
        """Denoise this rank's share of a replica's samples one after another, posting the receive of the next before
        computing the current one.

        Then padding: the example once more, because the shard group's other ranks need this rank's parameters.
        """
        visits = self._visits(samples)
        computed = [sample if sample >= 0 else self.example for _, sample, _ in visits]
        unfinished: dict[int, Message] = {}  # samples that wait for the next expert
        if visits and not self.first:
            self.exchange.expect(computed[0], visits[0].turn)
        for position, (turn, sample, steps) in enumerate(visits):
            own, given, waited = computed[position], unfinished.pop(sample, None), 0.0
            if not self.first:
                given, waited = self.exchange.take(own)
                if position + 1 < len(visits):
                    self.exchange.expect(computed[position + 1], visits[position + 1].turn)
            self._use_expert(steps)
            self.log.write("take", sample, seconds=waited)
            self._prepare(own, given)
            made = self.stage.denoise(own, steps, given, partial(self._report, sample))
            if steps.stop < self.steps.stop:
                unfinished[sample] = made
                continue
            if not self.last:
                size, waited = self.exchange.pass_on(own, turn, made)
                self.log.write("send", sample, seconds=waited, size=size)
            else:
                sink(sample, made.latents)
            if self.ahead and own not in self.kept:
                del self.stage.recording[own]
        for _ in range(padding):
            given = None if self.first else self.exchange.example(self.example)
            self.stage.denoise(self.example, self.steps, given, partial(self._report, None))
        self.exchange.close()

    def _visits(self, samples: Sequence[int]) -> list[Visit]:
        """What this rank does of a replica's samples, in order: all its steps of one after the other; where experts are
        swapped, as many samples as the run says with one of them, then the same ones with the next."""
        config, place = self.config, self.world.place
        own = [*enumerate(samples)][place.copy :: config.layout.copies[place.stage]]
        if self.swap is None:
            return [Visit(turn, sample, self.steps) for turn, sample in own]
        batches = [own[begin : begin + config.swap_batch] for begin in range(0, len(own), config.swap_batch)]
        return [Visit(*each, steps) for batch in batches for _, steps in config.segments(self.steps) for each in batch]

    def _prepare(self, sample: int, given: Message | None) -> None:
        """Learn what a row's encoders return: on the first stage from them, while later stages denoise the rows before;
        on others from the message."""
        recording = self.stage.recording
        if given is not None and given.encoding is not None:
            recording[sample] = given.encoding
        elif sample not in recording:
            assert self.encoders is not None
            began = time.perf_counter()
            self.stage.encode([sample], self.encoders)
            self.log.write("encode", sample, seconds=time.perf_counter() - began)

    def _report(self, sample: int | None, step: int, seconds: float) -> None:
        if sample is None:
            self.log.write("pad", step=step, seconds=seconds)
        else:
            self.log.write("step", sample, step, seconds=seconds)
