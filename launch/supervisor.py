"""The background process: executes run folders in turn under torchrun's agent and settles those that end badly.

python -m launch.supervisor FOLDER [FOLDER …] [--sweep FOLDER]
python -m launch.supervisor FOLDER --nnodes N --nproc N --rdzv-endpoint HOST:PORT --rdzv-id ID
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from launch import terminate, warm_start
from launch.machines.coordinator import Others
from launch.machines.nodes import Nodes
from launch.sweep import Sweep
from launch.terminate import end_children
from vdpp_core.cli import local_torchrun
from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError, redacted
from vdpp_core.predict import prediction
from vdpp_core.runs import events, processes, runfolder, stalls
from vdpp_core.runs.files import Place
from vdpp_core.runs.run import Run


class Watchdog(threading.Thread):
    """Names a stalled rank, and ends the run after its timeout or when its folder is gone.

    It kills ranks that ignore SIGTERM, as a stopped process does: torchrun's agent would give them 30 s more.
    """

    def __init__(self, folder: Path, place: Place, leave: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.watchdog, self.place, self.leave = stalls.Watchdog(Run(folder)), place, leave
        self.named: int | None = None  # the rank that was reported last
        self.stalled: dict[int, str] = {}
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(stalls.PERIOD_S):
            if self.place.is_gone():
                self.leave()
            with contextlib.suppress(OSError, psutil.Error):  # a file or a process that has just gone
                self._look()

    def _look(self) -> None:
        """Act on what the policy decides."""
        ended_badly = self.watchdog.ended_badly()
        if ended_badly:
            end_children()
        elif ended_badly is None and (stall := self.watchdog.look()):
            if stall.rank != self.named:
                self.named = stall.rank
                print(f"{time.strftime('%H:%M:%S')} {stall}", flush=True)
            if stall.ends_run:
                self.stalled = {stall.rank: stall.cause}
                end_children()


def supervise(folder: Path, others: Others | None = None) -> None:
    """Run the ranks of one run folder to their end and settle it; with others, this machine's ranks.

    Raises:
        SignalException: this process was told to end; the run has been settled as stopped.
    """
    with contextlib.closing(Place(folder / "events")) as place:
        leave = end_children if others is None else partial(others.end_here, "its run folder is gone")
        watchdog = Watchdog(folder, place, leave)
        settle = partial(_settle, place, folder, others)
        watchdog.start()
        predicting = threading.Thread(target=_predict, args=[folder], daemon=True)
        predicting.start()
        exits: dict[int, int] = {}
        try:
            if others is not None:
                others.meet()
            processes.begin_run()
            elastic_launch(_agent(folder, others), sys.executable)("-m", "vdpp_core", "run", str(folder))
        except ChildFailedError as error:
            exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
        except SignalException:
            end_children()
            settle(reason="stopped")
            raise
        except Exception as error:  # the agent itself: no port, no process; the next run of a sweep may do better
            print(redacted(traceback.format_exc()), file=sys.stderr, flush=True)
            what = "lost the rendezvous" if events.events_paths(folder) else "could not start"
            settle(reason=redacted(f"{what}: {type(error).__name__}: {error}"))
        finally:
            watchdog.over.set()
            watchdog.join()
            predicting.join()
        end_children()
        settle(watchdog.stalled or exits)


def _predict(folder: Path) -> None:
    """Predict what the run is compared with afterwards, while the ranks load."""
    with contextlib.suppress(ConfigError, OSError):  # its model or its folder has just been removed
        prediction.record(folder)


def _agent(folder: Path, others: Others | None) -> LaunchConfig:
    logs = folder / "logs" if others is None else runfolder.logs_path(folder)
    return LaunchConfig(
        **(_alone(Run(folder).config) if others is None else others.nodes.rendezvous()),
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle="SIGINT,SIGHUP,SIGQUIT",  # SIGTERM is handled here
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
    )


def _settle(place: Place, folder: Path, others: Others | None, *facts: Any, **reason: Any) -> None:
    """Settle a run as `results.settle` does, unless its folder is gone or cannot be read any more."""
    try:
        if not place.is_gone():
            (partial(terminate.settle, Run(folder)) if others is None else others.settle)(*facts, **reason)
            return
        print(f"{folder} is gone, and the run with it", file=sys.stderr, flush=True)
    except (ConfigError, OSError) as error:  # config.json is damaged, or the folder has just gone
        print(f"{folder}: no result could be written: {error}", file=sys.stderr, flush=True)
    if others is not None:
        others.give_up()


def _alone(config: RunConfig) -> dict[str, Any]:
    """The rendezvous of a run on this machine alone, on a free port."""
    return {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": config.layout.world_size,
        "run_id": uuid.uuid4().hex,
        "rdzv_backend": local_torchrun.BACKEND,
        "local_addr": local_torchrun.ADDRESS,
    }


def _told_to_end(number: int, _: FrameType | None) -> None:
    raise SignalException(f"signal {number}", signal.Signals(number))


def _supervise_node(folder: Path, nodes: Nodes) -> None:
    others = Others(nodes, folder)

    def told_to_end(number: int, frame: FrameType | None) -> None:
        others.say_stopped()  # before the ranks end, which the others would take for a failure
        _told_to_end(number, frame)

    signal.signal(signal.SIGTERM, told_to_end)
    with contextlib.suppress(SignalException):
        supervise(folder, others)


def _one_of(folder: Path, sweep: Path | None) -> None:
    """Execute one run; those after it get their turn whatever happens to it."""
    try:
        supervise(folder)
        if sweep is not None:
            Sweep(sweep).write_table()
    except SignalException:
        raise
    except Exception as error:  # its folder was removed, for example, or the disk is full
        print(redacted(traceback.format_exc()), file=sys.stderr, flush=True)
        with contextlib.suppress(ConfigError):  # even its configuration is gone
            terminate.settle(Run(folder), reason=redacted(f"could not be run: {type(error).__name__}: {error}"))


def main() -> None:
    """Execute the run folders named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--sweep", type=Path, help="renew its table.csv after each run")
    parser.add_argument("--nnodes", type=int, help="machines; with the following ones")
    parser.add_argument("--nproc", type=int)
    parser.add_argument("--rdzv-endpoint")
    parser.add_argument("--rdzv-id")
    arguments = parser.parse_args()
    if arguments.nnodes is not None:
        nodes = Nodes(arguments.nnodes, arguments.nproc, arguments.rdzv_endpoint, arguments.rdzv_id)
        _supervise_node(arguments.folders[0], nodes)
        return
    signal.signal(signal.SIGTERM, _told_to_end)
    waiting = list(arguments.folders)
    try:
        while waiting:
            _one_of(waiting[0], arguments.sweep)
            waiting.pop(0)
    except SignalException:
        for folder in waiting:
            with contextlib.suppress(ConfigError):  # its folder is gone, or its config.json is damaged
                terminate.settle(Run(folder), reason="stopped")


if __name__ == "__main__":
    warm_start.run()
