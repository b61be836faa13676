"""Training with the layers spread over ranks, by the schedules of torch.distributed.pipelining, timed from inside."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

from vdpp_core.lessons.bubbles import COMPUTING
from vdpp_core.lessons.data import whole
from vdpp_core.lessons.experiments import Experiment
from vdpp_core.lessons.layers import Stage, counted, cut, layers_of
from vdpp_core.lessons.measure import Span, Timeline
from vdpp_core.lessons.problems import PROBLEMS, Batch, Problem
from vdpp_core.lessons.techniques import Technique, adam, checkpointed, compute_in, refuse_unless


class TimedStage(pipelining.PipelineStage):
    """torch's pipeline stage, which records what it computes.

    A zero-bubble schedule splits the backward pass: the gradients of the stage's input, which the previous stage waits
    for, and those of its weights, for which nobody waits.
    """

    timeline: Timeline
    chunk: int

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Compute and record the forward pass of a micro-batch."""
        with self.timeline.span("forward", fwd_chunk_id, self.chunk):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Compute and record the backward pass of a micro-batch, or the part of it that gives the input's gradients."""
        with self.timeline.span("backward" if full_backward else "input gradients", bwd_chunk_id, self.chunk):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Compute and record the part of the backward pass that gives the weights' gradients."""
        with self.timeline.span("weight gradients", bwd_chunk_id, self.chunk):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)


class Pipeline(Technique):
    """Layers spread over the ranks, `chunks` stages on each: stage i is on rank i modulo the number of ranks.

    Attributes:
        schedule: torch's class.
    """

    takes: tuple[str, ...] = ("micro_batches",)
    schedule: type[Any]
    group: dist.ProcessGroup | None = None

    @classmethod
    def check(cls, experiment: Experiment) -> None:
        """Refuse what the schedule cannot run."""
        refuse_unless("ranks", experiment.ranks, experiment.ranks > 1, "must be at least 2 for a pipeline")
        parts, batch = experiment.micro_batches, experiment.batch
        refuse_unless("micro_batches", parts, batch % parts == 0, f"must divide the batch, {batch}")
        most = len(layers_of(_model(experiment.problem)))
        chunks = most // experiment.ranks
        allowed = f"must be at most {chunks}: {most} layers over {experiment.ranks} ranks, at least one in a chunk"
        refuse_unless("chunks", experiment.chunks, experiment.chunks <= chunks, allowed)

    @classmethod
    def parts(cls, experiment: Experiment) -> int:
        """The micro-batches."""
        return experiment.micro_batches

    def __init__(self, experiment: Experiment, problem: Problem, device: torch.device) -> None:
        super().__init__(experiment, problem, device)
        self.ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        model, count = problem.model(), self.ranks * experiment.chunks
        layers, cuts = layers_of(model), cut(counted(model, problem.batch(1, 0).inputs), count)
        nn.Module.to(model, device, torch.float64 if experiment.precision == "fp64" else torch.float32)
        stages = []
        for index in range(rank, count, self.ranks):
            module = Stage(copy.deepcopy(model), layers, cuts[index])
            stages.append(TimedStage(self.prepared(module), index, count, device, group=self.group))
            stages[-1].timeline, stages[-1].chunk = self.timeline, index // self.ranks
        self.modules = [stage.submod for stage in stages]
        is_single = issubclass(self.schedule, schedules.PipelineScheduleSingle)
        self.running = self.schedule(stages[0] if is_single else stages, experiment.micro_batches, self._loss)
        self.optimizer = adam(*self.modules)

    def prepared(self, stage: Stage) -> nn.Module:
        """What this rank runs of a stage."""
        if self.experiment.precision == "bf16":
            compute_in(torch.bfloat16, stage, stage.pieces())
        for piece in stage.pieces() if self.experiment.checkpointing else ():
            checkpointed(piece)
        return stage

    def _loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        with self.timeline.span("loss"):
            return self.problem.losses(prediction, target).mean()

    def step(self, batch: Batch) -> float:
        """One training step: the schedule divides the batch, and the sum of the gradients by the micro-batches."""
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        with self._messages_recorded():
            self.running.step(target=batch.target, losses=losses, return_outputs=False, **batch.inputs)
        with self.timeline.span("optimizer"):
            self.optimizer.step()
        self.timeline.spans = labelled(self.timeline.spans)
        of_last_rank = [each.item() for each in losses] or [0.0]
        loss = torch.tensor(of_last_rank, dtype=torch.float64, device=self.device).mean()
        dist.all_reduce(loss, group=self.group)
        return loss.item()

    @contextmanager
    def _messages_recorded(self) -> Iterator[None]:
        """Record when torch's schedules send and wait."""
        post, wait = schedules._batch_p2p, schedules._wait_batch_p2p

        def send(operations: list[dist.P2POp], desc: str | None = None) -> list[dist.Work]:
            is_sending = any(each.op is dist.isend for each in operations)
            with self.timeline.span("send") if is_sending else nullcontext():
                return post(operations, desc)

        def wait_for(work: list[dist.Work]) -> None:
            if work:
                with self.timeline.span("wait"):
                    wait(work)

        with mock.patch.multiple(schedules, _batch_p2p=send, _wait_batch_p2p=wait_for):
            yield

    def weights(self) -> dict[str, Tensor]:
        """All weights, on rank 0."""
        own = {
            name: whole(value).detach()
            for stage in self.modules
            for name, value in stage.get_submodule("model").named_parameters()
        }
        everyone: list[Any] | None = [None] * self.ranks if dist.get_rank(self.group) == 0 else None
        dist.gather_object(own, everyone, group=self.group, group_dst=0)
        return {name: value for part in everyone or [] for name, value in part.items()}


@functools.cache
def _model(problem: str) -> nn.Module:
    return PROBLEMS[problem].model()


def labelled(spans: Iterable[Span]) -> list[Span]:
    """Give messages and losses the micro-batch that they belong to: a wait comes before its work, the others after."""
    labelled: list[Span] = []
    for kinds, ordered in ((("loss", "send"), list(spans)), (("wait",), None)):
        last = Span("", 0, 0)
        ordered = labelled[::-1] if ordered is None else ordered
        labelled = []
        for span in ordered:
            if span.kind in kinds:
                span = replace(span, micro_batch=last.micro_batch, chunk=last.chunk)
            elif span.kind in COMPUTING:
                last = span
            labelled.append(span)
    return labelled[::-1]


class GPipe(Pipeline):
    """All forward passes, then all backward passes (Huang et al. 2019)."""

    schedule: type[Any] = pipelining.ScheduleGPipe


class OneForwardOneBackward(GPipe):
    """A backward pass as soon as there is one: no stage keeps more than P micro-batches (Narayanan et al. 2019)."""

    schedule = pipelining.Schedule1F1B

    @classmethod
    def check(cls, experiment: Experiment) -> None:
        """Refuse fewer micro-batches than stages."""
        super().check(experiment)
        enough = experiment.micro_batches >= experiment.ranks
        refuse_unless(
            "micro_batches", experiment.micro_batches, enough, f"must be at least {experiment.ranks}, the ranks"
        )


class Interleaved(Pipeline):
    """1F1B with several shorter stages a rank, so that the fill is shorter (Narayanan et al. 2021)."""

    takes = ("micro_batches", "chunks")
    schedule: type[Any] = pipelining.ScheduleInterleaved1F1B
    least_chunks = 2

    @classmethod
    def check(cls, experiment: Experiment) -> None:
        """Refuse an incomplete round of micro-batches, and too few chunks."""
        super().check(experiment)
        parts, ranks = experiment.micro_batches, experiment.ranks
        refuse_unless("micro_batches", parts, parts % ranks == 0, f"must be a multiple of the ranks, {ranks}")
        enough = experiment.chunks >= cls.least_chunks
        refuse_unless("chunks", experiment.chunks, enough, f"must be at least {cls.least_chunks}")


class ZeroBubble(Interleaved):
    """1F1B whose ranks compute gradients of weights where they would wait: ZB-H1 of Qi et al. 2023.

    torch counts the first stage's whole backward pass as gradients of weights: nobody waits for those of its input.
    """

    schedule = pipelining.ScheduleInterleavedZeroBubble
    least_chunks = 1

    @classmethod
    def check(cls, experiment: Experiment) -> None:
        """Refuse checkpointing: either half of the backward pass would compute everything again."""
        super().check(experiment)
        refuse_unless("checkpointing", True, not experiment.checkpointing, "must be off with Zero bubble")
