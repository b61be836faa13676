"""torchrun, as a person calls it."""

from __future__ import annotations

import contextlib
import json
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
def forked_torchrun(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., psutil.Process]:
    """forked_torchrun(log, ranks, *arguments of `python -m vdpp_core`): torchrun's agent, started in the background.

    The agent and its ranks are forks of a process that has imported everything, so they start in a fraction of a
    second. They print into the log, and errors into a file .err beside it. The agent is no child of this process: its
    exit code is not known.
    """
    root, warm = tmp_path_factory.mktemp("forked"), set()

    def start(path: Path, ranks: int, *arguments: Any) -> psutil.Process:
        if (key := warm_start.key()) not in warm:  # a server for each set of doubles
            first = RunConfig(model="dummy", total_steps=1, latent_shape=(1, 4, 2, 8, 8), output_dir=root / key)
            assert launch.start(first).wait(120)["outcome"] == "ok"  # and a server stays
            warm.add(key)
        torchrun = ["vdpp_core.cli.local_torchrun", f"--nproc_per_node={ranks}", "-m", "vdpp_core"]
        agents: list[psutil.Process] = []
        with path.open("w") as log, path.with_suffix(".err").open("w") as errors:
            files = log.fileno(), errors.fileno()
            warm_start.start([*torchrun, *map(str, arguments)], *files, lambda pid: agents.append(psutil.Process(pid)))
        return agents[0]

    return start


@pytest.fixture(scope="session")
def warm_ranks(
    forked_torchrun: Callable[..., psutil.Process], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., None]:
    """warm_ranks(ranks, *run folders): forked ranks execute prepared runs one after another, in one process each."""
    root = tmp_path_factory.mktemp("warm-ranks")

    def run(ranks: int, *folders: Path, timeout: float = 480) -> None:
        log = root / f"{ranks}.log"
        forked_torchrun(log, ranks, "run", *folders).wait(timeout)
        assert all(Run(folder).result() for folder in folders), log.with_suffix(".err").read_text()

    return run


def forked_ranks(ranks: int, module: str, *arguments: str, **environment: str) -> Any:
    """The JSON that rank 0 of a test module prints, whose ranks `forked.py` starts."""
    command = [sys.executable, "-m", "tests.distributed.forked", str(ranks), module, *arguments]
    process = subprocess.run(command, capture_output=True, text=True, timeout=480, env=os.environ | environment)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.fixture
def torchrun_in_background(tmp_path: Path) -> Callable[..., Any]:
    """with torchrun_in_background(ranks, …) as process: nothing of it is left afterwards."""

    @contextlib.contextmanager
    def start(ranks: int, *arguments: Any) -> Iterator[Process]:
        command = [*COMMAND, f"--nproc_per_node={ranks}", "-m", "vdpp_core", *map(str, arguments)]
        with (tmp_path / "torchrun.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            with nothing_left(psutil.Process(process.pid)):
                yield process
        finally:
            process.wait()

    return start


@pytest.fixture
def forked_in_background(tmp_path: Path, forked_torchrun: Callable[..., psutil.Process]) -> Callable[..., Any]:
    """with forked_in_background(ranks, …) as process: the same, of ranks that are forked."""

    @contextlib.contextmanager
    def start(ranks: int, *arguments: Any) -> Iterator[psutil.Process]:
        process = forked_torchrun(tmp_path / "torchrun.log", ranks, *arguments)
        with nothing_left(process):
            yield process

    return start


@contextlib.contextmanager
def nothing_left(agent: psutil.Process) -> Iterator[None]:
    """Kill an agent and its ranks in the end, if it still runs."""
    family: list[psutil.Process] = []
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            family = agent.children(recursive=True)
            agent.kill()
        for child in family:
            if child.is_running():
                child.kill()


@pytest.fixture(scope="session")
def wait_until() -> Callable[[Callable[[], Any], float], Any]:
    """wait_until(condition, seconds): what the condition returns as soon as it is true; fails after so many seconds."""
    return patience.wait_until


def launch_command(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m launch`, from a folder."""
    command = [sys.executable, "-m", "launch", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200)
