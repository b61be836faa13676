"""The background process: runs folders one after another under torchrun's agent and settles those that end badly.

python -m launch.supervisor FOLDER [FOLDER …] [--sweep FOLDER]
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import traceback
import uuid
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from launch.job import end_ranks
from launch.sweep import Sweep
from vdpp_core import loopback, results, runfolder
from vdpp_core.config import RunConfig

LAST_WORDS_S = 5.0  # after a rank's last word, for the others to have theirs


class Watchdog(threading.Thread):
    """Kills ranks that no longer move: a stopped process hears no SIGTERM, and torchrun's agent gives it 30 s more."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.timeout_s = folder, RunConfig.read(folder).timeout_s
        self.stalled: dict[int, str] = {}
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.5):
            silence = runfolder.silence_s(self.folder)
            if silence < min(LAST_WORDS_S, self.timeout_s):
                continue
            events = runfolder.read_events(self.folder)
            kinds = {event["kind"] for event in events}
            if kinds & {"error", "terminated"}:
                end_ranks(self.folder)
            elif "clock" in kinds and silence > self._patience(events):
                rank = results.stalled_rank(self.folder)
                self.stalled = {rank: f"stalled: no rank wrote an event for {silence:.0f} s (timeout_s)"}
                end_ranks(self.folder)

    def _patience(self, events: list[runfolder.Event]) -> float:
        """A little more than that of the ranks' own guards."""
        slowest = max((event["seconds"] for event in events if event["kind"] == "warm"), default=0.0)
        return max(self.timeout_s, 5 * slowest) + 2


def supervise(folder: Path) -> dict[str, Any]:
    """Run the ranks of one run folder to their end and return the result.

    Raises:
        SignalException: this process was told to end; the run is settled as stopped before.
    """
    config = RunConfig.read(folder)
    agent = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=config.layout.world_size,
        run_id=uuid.uuid4().hex,
        rdzv_backend=loopback.BACKEND,
        local_addr=loopback.ADDRESS,
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=Std.ALL),
    )
    exits: dict[int, str] = {}
    watchdog = Watchdog(folder)
    watchdog.start()
    try:
        elastic_launch(agent, sys.executable)("-m", "vdpp_core", "run", str(folder))
    except ChildFailedError as error:
        exits = {rank: _words(failure.exitcode) for rank, failure in error.failures.items()}
    except SignalException:
        end_ranks(folder)
        results.settle(folder, reason="stopped")
        raise
    except Exception as error:  # the agent itself: no port, no process; the next run of a sweep may do better
        traceback.print_exc()
        results.settle(folder, reason=f"could not start: {type(error).__name__}: {error}")
    finally:
        watchdog.over.set()
    end_ranks(folder)
    return results.settle(folder, watchdog.stalled or exits)


def _words(exitcode: int) -> str:
    if exitcode >= 0:
        return f"ended with exit code {exitcode}"
    known = {number.value: number.name for number in signal.Signals}
    return f"killed by {known.get(-exitcode, f'signal {-exitcode}')}"


def _told_to_end(number: int, _: FrameType | None) -> None:
    raise SignalException(f"signal {number}", signal.Signals(number))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--sweep", type=Path, help="renew its table.csv after each run")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _told_to_end)
    waiting = list(arguments.folders)
    try:
        while waiting:
            supervise(waiting[0])
            waiting.pop(0)
            if arguments.sweep is not None:
                Sweep(arguments.sweep).write_table()
    except SignalException:
        for folder in waiting:
            results.settle(folder, reason="stopped")


if __name__ == "__main__":
    main()
