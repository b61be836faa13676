"""End the processes of a run on this machine: supervisor and ranks."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import psutil

from launch import warm_start
from vdpp_core.config.errors import ConfigError
from vdpp_core.predict import schedule
from vdpp_core.runs import processes, results
from vdpp_core.runs.event_types import Start, of
from vdpp_core.runs.run import Run

settle = partial(results.settle, predict_times=schedule.run_times)

STOP_PATIENCE_S = 12.0
LAST_WORD_S = 2.0
_POLL_S = 0.05


def end(folder: Path) -> None:
    """End the supervisor of a run and with it the ranks, forcibly if they do not react.

    Raises:
        ConfigError: that process is on another machine.
    """
    run = Run(folder)
    launcher = run.launcher()
    if launcher is None:
        end_by_name(folder)
        return
    if not run.launcher_alive():
        return
    if launcher["host"] != socket.gethostname():
        raise ConfigError("run", folder.name, f"has no part on this machine: stop it on {launcher['host']}")
    with contextlib.suppress(psutil.NoSuchProcess):
        _end_launchers([psutil.Process(launcher["pid"])])
    end_ranks(folder)


def end_ranks(folder: Path) -> None:
    """End what is left of a run's ranks on this machine: LAST_WORD_S for a last event, then by force."""
    starts = of(Run(folder).events(), Start)
    left = []
    for start in starts:
        with contextlib.suppress(psutil.Error):  # it has ended, or belongs to another user
            if processes.is_rank(start):
                left.append(psutil.Process(start.pid))
    _end(left, LAST_WORD_S)


def end_children() -> None:
    """End the ranks of this supervisor, whatever has become of their files."""
    _end([child for child in psutil.Process().children() if child.pid != warm_start.nursery()], LAST_WORD_S)


def end_by_name(folder: Path) -> bool:
    """End the processes of a run or sweep by their command lines, which works for a removed folder, too.

    A supervisor with other runs to execute is left alone.

    Returns:
        Whether there were any.
    """
    watching = launchers(folder)
    _end_launchers(watching)
    ranks = _ranks(folder)
    _end(ranks, LAST_WORD_S)
    return bool(watching or ranks)


def end_started_by(mark: str) -> None:
    """End what goes on in the background of all that was started with `warm_start.STARTED_BY` set to `mark`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it has ended, or belongs to another user
            leads = _is_own(process) and os.getsid(process.pid) == process.pid
            if leads and process.environ().get(warm_start.STARTED_BY) == mark and not _is_warm(process):
                found.append(process)
    _end_launchers(found)


def launchers(folder: Path) -> list[psutil.Process]:
    """This user's supervisors of this run alone, or of this sweep."""
    found = []
    for process, words in _called("launch.supervisor"):
        places = _folders(process, itertools.takewhile(lambda word: not word.startswith("--"), words))
        sweep = _folders(process, words[words.index("--sweep") + 1 :][:1] if "--sweep" in words else ())
        if _real(folder) in (*sweep, *(places if len(places) == 1 else ())):
            found.append(process)
    return found


def _ranks(folder: Path) -> list[psutil.Process]:
    """This user's ranks of this run alone."""
    called = _called("vdpp_core")
    return [
        process for process, words in called if words[:1] == ["run"] and _folders(process, words[1:]) == [_real(folder)]
    ]


def _called(module: str) -> Iterator[tuple[psutil.Process, list[str]]]:
    """This user's processes `python -m module`, each with the arguments that follow."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or belongs to another user
            words = process.cmdline()
            at = words.index("-m") if "-m" in words else len(words)
            is_python = bool(words) and "python" in Path(words[0]).name
            is_called = all(word.startswith("-") and word != "-c" for word in words[1:at])  # and no argument of others
            if is_python and is_called and words[at + 1 : at + 2] == [module] and _is_own(process):
                yield process, words[at + 2 :]


def _is_warm(process: psutil.Process) -> bool:
    return "launch.warm_start" in process.cmdline()


def _is_own(process: psutil.Process) -> bool:
    return process.uids().real == os.getuid()


def _folders(process: psutil.Process, words: Iterable[str]) -> list[str]:
    """The real paths of folders among a process's arguments; they need not exist any more."""
    try:
        here = process.cwd()
    except psutil.Error:  # it has just ended
        here = os.sep
    return [_real(Path(here, word)) for word in words]


def _real(folder: Path) -> str:
    return os.path.realpath(folder)


def _end_launchers(watching: Sequence[psutil.Process]) -> None:
    """End supervisors, which end their ranks and settle; kill those that do not react, and their ranks."""
    family = [child for process in watching for child in _children(process)]
    _end(watching, STOP_PATIENCE_S)
    _end(family, LAST_WORD_S)


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children()
    except psutil.Error:  # it has just ended
        return []


def _end(targets: Sequence[psutil.Process], patience_s: float) -> None:
    """Send SIGTERM, and SIGKILL to those that are still there after `patience_s` seconds.

    Exit codes are not collected: those of ranks belong to torchrun's agent.
    """
    for process in targets:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    deadline = time.monotonic() + patience_s
    while any(map(_lives, targets)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    for process in targets:
        if _lives(process):
            with contextlib.suppress(psutil.Error):
                process.kill()


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
