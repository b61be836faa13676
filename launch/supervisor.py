"""The background process: runs folders one after another under torchrun's agent and settles those that end badly.

python -m launch.supervisor FOLDER [FOLDER …] [--sweep FOLDER]
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
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
from vdpp_core import results
from vdpp_core.config import RunConfig


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
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=Std.ALL),
    )
    exits: dict[int, str] = {}
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
    end_ranks(folder)
    return results.settle(folder, exits)


def _words(exitcode: int) -> str:
    return f"killed by {signal.Signals(-exitcode).name}" if exitcode < 0 else f"ended with exit code {exitcode}"


def _told_to_end(number: int, _: FrameType | None) -> None:
    raise SignalException(f"signal {number}", signal.Signals(number))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--sweep", type=Path, help="renew its table.csv after each run")
    arguments = parser.parse_args()
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "5")  # a stopped rank does not hear SIGTERM
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
