"""training: ways to split training, run on CPU ranks and compared with one rank and with their formulas."""

from __future__ import annotations

import itertools
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from vdpp_core.cli import arguments, progress_bar
from vdpp_core.cli.arguments import N, Switch, shown, whole_number
from vdpp_core.cli.progress_bar import Far
from vdpp_core.cli.run import carry_out
from vdpp_core.config.errors import ConfigError
from vdpp_core.parallel.rendezvous import Ranks

if TYPE_CHECKING:
    from vdpp_core.lessons.experiments import Experiment
    from vdpp_core.lessons.training import Job

POLL_S = 0.2
TECHNIQUES = (  # imported with torch's modules: only when the command runs
    "ways to split: one rank, DDP, FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD, NO_SHARD, TP, TP × FSDP, PP × TP × FSDP, "
    "GPipe, 1F1B, Interleaved 1F1B, Zero bubble; spelled in any way, as full-shard"
)
PROBLEMS = "what is trained: transformer, small (a smaller transformer) or svd (a UNet)"


@dataclass(frozen=True)
class Training:
    """Train small models split in several ways on CPU ranks; compare each with one rank and with its formulas."""

    techniques: Annotated[tuple[str, ...], shown("NAME [NAME ...]", TECHNIQUES, "all that fit")] = ()
    problems: Annotated[tuple[str, ...], shown("NAME [NAME ...]", PROBLEMS, "transformer svd")] = ("transformer", "svd")
    ranks: Annotated[str, N] = "4"  # processes of each technique but one rank
    batch: Annotated[tuple[str, ...], shown("N [N ...]")] = ("8",)  # samples of a step; several sizes, several runs
    steps: Annotated[str, N] = "3"  # training steps
    precision: Annotated[tuple[str, ...], shown("fp32|bf16|fp64 [...]")] = ("fp32",)  # of the computation
    micro_batches: Annotated[str, N] = "4"  # of pipelines
    chunks: Annotated[str, N] = "2"  # pieces of the model on a rank of an interleaved pipeline
    checkpointing: Switch = False  # recompute activations in the backward pass; each technique without and with
    folder: Annotated[str | None, shown("FOLDER")] = None  # under torchrun: be a rank of a job that was prepared
    json: Switch = False  # print JSON

    def __call__(self, ranks: Ranks, _: Sequence[str]) -> None:
        if self.folder is not None:
            from vdpp_core.lessons import rank

            carry_out(partial(rank.main, Path(self.folder), ranks), ranks)
            return
        arguments.quiet()
        from vdpp_core.lessons import compared, training  # takes seconds to import

        experiments = self._experiments()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _end)
        job = training.start(experiments)
        try:
            with progress_bar.following(lambda: _far(job)):
                _follow(job)
        except BaseException:  # Ctrl-C, a signal, or nobody who reads the output
            job.stop()
            raise
        if (failure := job.failure()) is not None:
            print(f"failed: {failure}; see {job.folder / 'launcher.log'}", file=sys.stderr)
            if left := job.experiments[len(job.results()) + 1 :]:
                print(f"not run: {'; '.join(each.name for each in left)}", file=sys.stderr)
        results = job.results()
        if self.json:
            print(json.dumps(results, indent=2))
        elif results:
            print(*compared.in_words(results), sep="\n")
        if job.outcome() != "ok":
            raise SystemExit(1)

    def _experiments(self) -> list[Experiment]:
        """All combinations; those that do not fit are left out with a line, unless their technique was named."""
        from vdpp_core.lessons import techniques
        from vdpp_core.lessons.experiments import MOST, MOST_RANKS, PRECISIONS, Experiment
        from vdpp_core.lessons.problems import PROBLEMS

        names = [techniques.named(name) for name in self.techniques] or list(techniques.PLACES)
        allowed = {"problems": list(PROBLEMS), "precision": list(PRECISIONS)}
        for argument, known in allowed.items():
            for value in getattr(self, argument) or [""]:
                if value not in known:
                    raise ConfigError(argument, value, f"must be {', '.join(known[:-1])} or {known[-1]}")
        ranks = whole_number("ranks", self.ranks, most=MOST_RANKS)
        steps, made = whole_number("steps", self.steps, most=MOST), list[Experiment]()
        batches = [whole_number("batch", size) for size in self.batch]
        switches = (False, True) if self.checkpointing else (False,)
        for problem, batch, precision, recompute, name in itertools.product(
            self.problems, batches, self.precision, switches, names
        ):
            takes = techniques.technique(name).takes
            try:
                parts = {each: whole_number(each, getattr(self, each)) for each in takes}
                own = 1 if name == "one rank" else ranks
                made.append(Experiment(name, problem, own, batch, steps, precision, recompute, **parts))
            except ConfigError as error:
                if self.techniques:
                    raise
                arguments.warn([f"left out: {name}, {problem}, batch {batch}, {precision}: {error}"])
        return made


def _end(number: int, _: Any) -> NoReturn:
    print(f"stopped by {signal.Signals(number).name}", file=sys.stderr)
    raise SystemExit(128 + number)


def _far(job: Job) -> Far:
    """The current experiment of a job, for the bar."""
    far, names = job.progress(), [each.name for each in job.experiments]
    now = f"experiment {min(far['finished'] + 1, len(names))} of {len(names)}"
    return Far(now, far["share"], names[min(far["finished"], len(names) - 1)])


def _follow(job: Job) -> None:
    """Print a line for each experiment that ends."""
    shown_so_far = 0
    while True:
        outcome = job.outcome()
        for result in job.results()[shown_so_far:]:
            shown_so_far += 1
            name, seconds = job.experiments[shown_so_far - 1].name, result["step_s"]
            line = f"{shown_so_far}/{len(job.experiments)}  {name}: {seconds:.2f} s a step"
            progress_bar.say(line, sys.stderr)
        if outcome is not None:
            return
        time.sleep(POLL_S)
