"""What each rank of a training job does: the experiments of its folder, one after another.

Under torchrun: python -m vdpp_core training --folder FOLDER
"""

from __future__ import annotations

import functools
import os
import re
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from vdpp_core.compare.first_ranks import by_first_ranks
from vdpp_core.config import RunConfig
from vdpp_core.config.errors import in_one_line
from vdpp_core.config.execution import resolve
from vdpp_core.config.layout import Parallel
from vdpp_core.engine.measure import keep_freed_memory
from vdpp_core.lessons import data, training_folder
from vdpp_core.lessons.experiments import PRECISIONS, Experiment
from vdpp_core.lessons.measure import Meter
from vdpp_core.lessons.problems import PROBLEMS
from vdpp_core.lessons.techniques import Technique, technique
from vdpp_core.parallel.rendezvous import Ranks
from vdpp_core.parallel.world import joined
from vdpp_core.runs import processes
from vdpp_core.runs.events import EventLog

_PARENT_S = 1.0  # how often a rank looks whether its launcher is still there
_LOST = re.compile(r"gloo/transport|connection (closed|reset)", re.I)  # another rank is gone
_TERMINATED = 128 + signal.SIGTERM


def main(folder: Path, ranks: Ranks) -> None:
    """Carry out all experiments of a folder as one of its ranks. Rank 0 writes what they found."""
    keep_freed_memory(True)
    with EventLog(folder, ranks.rank) as log:
        pid = os.getpid()
        log.write("start", pid=pid, created=processes.created_s(pid), host=socket.gethostname())
        _watch(log)
        for number, experiment in enumerate(training_folder.experiments(folder)):
            try:
                by_first_ranks(
                    ranks,
                    experiment.ranks,
                    f"experiment-{number}",
                    functools.partial(_one, folder, number, experiment, log),
                )
            except BaseException as error:
                traceback.print_exc()
                sys.stderr.flush()
                lost = isinstance(error, dist.DistError) or bool(_LOST.search(str(error)))
                cause = in_one_line(f"{type(error).__name__}: {error}")
                log.last_word("error", experiment=number, error=cause, lost=lost)
                os._exit(1)  # a communicator that lost its peer may never let the interpreter end
        log.last_word("end")
    os._exit(0)  # to take apart all that was imported takes seconds


def _watch(log: EventLog) -> None:
    """End this rank on SIGTERM or when its launcher is gone, even while it waits for another rank."""
    parent, (told, wakeup) = os.getppid(), os.pipe()
    os.set_blocking(wakeup, False)
    signal.signal(signal.SIGTERM, lambda *_: None)  # the thread reads the pipe: a rank that waits runs no handlers
    signal.set_wakeup_fd(wakeup)

    def watch() -> None:
        while not select.select([told], [], [], _PARENT_S)[0] and os.getppid() == parent:
            pass
        log.last_word("terminated", orphaned=os.getppid() != parent)
        os._exit(_TERMINATED)

    threading.Thread(target=watch, daemon=True).start()


def _one(folder: Path, number: int, experiment: Experiment, log: EventLog, ranks: Ranks) -> dict[str, Any]:
    """One experiment, by the ranks that it needs."""
    execution = resolve(RunConfig(device="cpu", threads=1), ranks.local_world_size)
    torch.set_num_threads(execution.threads)
    with joined(Parallel(dp=experiment.ranks), execution, ranks, f"experiment-{number}") as world:
        own, weights = carry_out(
            experiment, world.device, lambda step: log.write("step", None, step, experiment=number)
        )
        everyone: list[Any] = [None] * experiment.ranks
        dist.all_gather_object(everyone, own)
    _forget_meshes()
    if ranks.rank == 0:  # the others wait without using a core
        expected = of_one_rank(*same_for(experiment))
        training_folder.write_result(folder, number, compared(experiment, everyone, weights, *expected))
    return {}


def _forget_meshes() -> None:
    """Empty torch's caches of DTensors. A mesh of the next experiment may equal one of this, whose groups are gone."""
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()


def carry_out(
    experiment: Experiment, device: torch.device, after_step: Callable[[int], None] = lambda _: None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Train on this rank: what it found, as JSON, and the weights afterwards. All ranks of a group have to call it."""
    kind = technique(experiment.technique)
    return train(kind(experiment, PROBLEMS[experiment.problem], device), after_step)


def train(
    made: Technique, after_step: Callable[[int], None] = lambda _: None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Do the steps of an experiment; the last one is measured, which takes time, the others are timed."""
    experiment, steps = made.experiment, list[dict[str, Any]]()
    meter, losses = Meter(made.modules, made.optimizer, made.timeline), list[float]()
    for step in range(experiment.steps):
        batch = made.problem.batch(experiment.batch, step).to(PRECISIONS[experiment.precision])
        if dist.is_initialized():
            dist.barrier()
        made.timeline.restart()
        with meter.measuring() if step == experiment.steps - 1 else nullcontext():
            losses.append(made.step(batch))
        seconds, spans = made.timeline.now(), made.timeline.spans
        steps.append({"began": made.timeline.began, "seconds": seconds, "events": [asdict(span) for span in spans]})
        after_step(step)
    found = {
        "losses": losses,
        "memory": asdict(meter.memory),
        "sent": [asdict(one) for one in meter.sent],
        "steps": steps,
    }
    return found, made.weights()


def same_for(experiment: Experiment) -> tuple[str, int, int, str, int]:
    """What the experiment's result depends on, however it is split."""
    parts = technique(experiment.technique).parts(experiment) if experiment.precision == "bf16" else 1
    return experiment.problem, experiment.batch, experiment.steps, experiment.precision, parts


@functools.lru_cache(maxsize=4)
def of_one_rank(
    problem: str, batch: int, steps: int, precision: str, parts: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights after training on one rank, which takes the batch in `parts`."""
    experiment = Experiment("one rank", problem, 1, batch, steps, precision)
    made = data.OneRank(experiment, PROBLEMS[problem], torch.device("cpu"), parts)
    losses = [made.step(made.problem.batch(batch, step).to(PRECISIONS[precision])) for step in range(steps)]
    return losses, made.weights()


def compared(
    experiment: Experiment,
    ranks: list[dict[str, Any]],
    weights: dict[str, Tensor],
    losses: list[float],
    expected: dict[str, Tensor],
) -> dict[str, Any]:
    """The result of an experiment as JSON, with the events of the step whose time is the median."""
    steps = list(zip(*(rank.pop("steps") for rank in ranks), strict=True))  # each: of all ranks
    seconds = [max(one["seconds"] for one in step) for step in steps]
    timed = range(len(steps))[1:-1] or range(1)  # the first one prepares, the last one is measured
    chosen = sorted(timed, key=lambda step: seconds[step])[(len(timed) - 1) // 2]
    first = min(one["began"] for one in steps[chosen])
    for rank, own in zip(ranks, steps[chosen], strict=True):
        later = own["began"] - first  # ranks of one machine share the clock
        moved = ({"begin": span["begin"] + later, "end": span["end"] + later} for span in own["events"])
        rank["events"] = [span | times for span, times in zip(own["events"], moved, strict=True)]
    return {
        "experiment": asdict(experiment),
        "losses": ranks[0]["losses"],
        "losses_of_one_rank": losses,
        **differences(ranks[0]["losses"], losses, weights, expected),
        "formula": technique(experiment.technique).formula(experiment),
        "seconds": seconds,
        "step_s": seconds[chosen],
        "ranks": ranks,
    }


def differences(
    losses: list[float], expected_losses: list[float], weights: dict[str, Tensor], expected: dict[str, Tensor]
) -> dict[str, float]:
    """How far two trainings are apart: losses, relative; weights, as the relative L2 norm and the largest difference.

    Raises:
        ValueError: the weights have other names.
    """
    if weights.keys() != expected.keys():
        raise ValueError(f"weights differ in name: {sorted(weights.keys() ^ expected.keys())[:4]}")
    apart = [weights[name].double() - value.double() for name, value in expected.items()]
    norm, whole = (sum(one.square().sum().item() for one in many) ** 0.5 for many in (apart, expected.values()))
    found, alone = (torch.tensor(each, dtype=torch.float64) for each in (losses, expected_losses))
    return {  # NaN where one of them is: torch's maximum does not skip it, as Python's does
        "loss_difference": (found / alone - 1).abs().max().item(),
        "weights_difference": norm / whole,
        "largest_difference": torch.stack([one.abs().max() for one in apart]).max().item(),
    }
