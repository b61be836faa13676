"""torchrun, as a person calls it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

COMMAND = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
Process = subprocess.Popen[bytes]


@pytest.fixture(scope="session")
def torchrun() -> Callable[..., subprocess.CompletedProcess[str]]:
    """torchrun(ranks, *arguments of `python -m vdpp_core`): what it printed, and its exit code."""

    def run(ranks: int, *arguments: Any, timeout: float = 480) -> subprocess.CompletedProcess[str]:
        command = [*COMMAND, f"--nproc_per_node={ranks}", "-m", "vdpp_core", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout)

    return run


@pytest.fixture
def torchrun_in_background(tmp_path: Path) -> Callable[..., Any]:
    """with torchrun_in_background(ranks, …) as process: nothing of it is left afterwards."""

    @contextmanager
    def start(ranks: int, *arguments: Any) -> Iterator[Process]:
        command = [*COMMAND, f"--nproc_per_node={ranks}", "-m", "vdpp_core", *map(str, arguments)]
        with (tmp_path / "torchrun.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        family = {}
        try:
            yield process
        finally:
            if process.poll() is None:
                family = {child.pid: child for child in psutil.Process(process.pid).children(recursive=True)}
                process.kill()
            for child in family.values():
                if child.is_running():
                    child.kill()
            process.wait()

    return start


@pytest.fixture(scope="session")
def wait_until() -> Callable[[Callable[[], Any], float], Any]:
    """wait_until(condition, seconds): what the condition returns as soon as it is true; fails after so many seconds."""

    def wait(condition: Callable[[], Any], seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        while not (answer := condition()):
            assert time.monotonic() < deadline, f"not within {seconds} s"
            time.sleep(0.05)
        return answer

    return wait


def launch_command(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m launch`, from a folder."""
    command = [sys.executable, "-m", "launch", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200)
