"""torchrun, as a person calls it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import launch
from launch import warm_start
from tests import patience
from tests.doubles.checking import CALLS, check
from vdpp_core import RunConfig
from vdpp_core.runs.run import Run

DOUBLES = Path(__file__).parents[1] / "doubles"
COMMAND = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
Process = subprocess.Popen[bytes]


def with_doubles(log: Path, *names: str) -> dict[str, str]:
    """The environment in which ranks have these doubles (`tests/doubles`), and note what they do in a folder."""
    paths = [str(DOUBLES / "site"), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "VDPP_DOUBLES": ",".join(names),
        "VDPP_DOUBLES_LOG": str(log),
    }


@pytest.fixture(scope="session", autouse=True)
def doubles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """All ranks of this folder's tests have a strict communicator; with VDPP_DOUBLES=strict,late late messages, too."""
    log, before = tmp_path_factory.mktemp("doubles"), dict(os.environ)
    os.environ.update(with_doubles(log, *os.environ.get("VDPP_DOUBLES", "strict").split(",")))
    yield log
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def nothing_is_broken(doubles: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """No rank that was started since the last test broke a rule."""
    yield
    verdict = check(doubles)
    request.config.stash[CALLS] = request.config.stash.get(CALLS, 0) + verdict.calls
    assert verdict.problems == []


@pytest.fixture(scope="session")
def torchrun() -> Callable[..., subprocess.CompletedProcess[str]]:
    """torchrun(ranks, *arguments of `python -m vdpp_core`): what it printed, and its exit code."""

    def run(ranks: int, *arguments: Any, timeout: float = 480) -> subprocess.CompletedProcess[str]:
        command = [*COMMAND, f"--nproc_per_node={ranks}", "-m", "vdpp_core", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout)

    return run


@pytest.fixture(scope="session")
def warm_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """warm_ranks(ranks, *run folders): forked ranks execute prepared runs one after another, in one process each."""
    root = tmp_path_factory.mktemp("warm-ranks")
    first = RunConfig(model="dummy", total_steps=1, latent_shape=(1, 4, 2, 8, 8), output_dir=root / "first")
    assert launch.start(first).wait(120)["outcome"] == "ok"  # and a server stays

    def run(ranks: int, *folders: Path, timeout: float = 480) -> None:
        torchrun = ["vdpp_core.cli.local_torchrun", f"--nproc_per_node={ranks}", "-m", "vdpp_core"]
        with (root / f"{ranks}.log").open("w") as log:
            agent = warm_start.start([*torchrun, "run", *map(str, folders)], log.fileno(), log.fileno())
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(agent).wait(timeout)
        assert all(Run(folder).result() for folder in folders), (root / f"{ranks}.log").read_text()

    return run


@pytest.fixture
def torchrun_in_background(tmp_path: Path) -> Callable[..., Any]:
    """with torchrun_in_background(ranks, …) as process: nothing of it is left afterwards."""

    @contextlib.contextmanager
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
    return patience.wait_until


def launch_command(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m launch`, from a folder."""
    command = [sys.executable, "-m", "launch", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200)
