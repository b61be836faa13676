"""Ranks of other runs that share cores with this one."""

from __future__ import annotations

import os
from collections.abc import Mapping

import psutil

from vdpp_core.config import execution
from vdpp_core.config.execution import Execution


def in_the_way(own: Execution) -> int:
    """Count the ranks of other runs that a run shares the cores of this machine with.

    None where there are cores for all of them, or where it runs on GPUs.
    """
    if own.device_type != "cpu":
        return 0
    others = ranks_at_work()
    return others if own.local_ranks * own.threads + others > execution.cores() else 0


def ranks_of_other_runs(number: int) -> str:
    """Say how many ranks of other runs there are."""
    return "1 rank of another run" if number == 1 else f"{number} ranks of other runs"


def ranks_at_work() -> int:
    """Count the ranks of other runs, of any user, that share cores with this process."""
    ranks = (process for process in psutil.process_iter(["cmdline"]) if _is_rank(process.info["cmdline"] or []))
    return sum(map(_shares_cores, ranks))


def _shares_cores(process: psutil.Process) -> bool:
    """Whether a rank belongs to another run than this process and may use a core that this one may use."""
    try:
        if process.pid == os.getpid() or not execution.cores_of(psutil.Process()) & execution.cores_of(process):
            return False
        meeting = _meeting_place(os.environ)
        return meeting is None or _meeting_place(process.environ()) != meeting
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True  # another user's


def _meeting_place(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """The address that only the ranks of one run share; None outside torchrun."""
    found = tuple(environment.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"))
    return found if environment.get("MASTER_PORT") else None


def _is_rank(command: list[str]) -> bool:
    """Whether this is the command of a rank, and not of the torchrun that started it, which contains a rank's."""
    return "-m" in command and command[command.index("-m") + 1 :][:1] == ["vdpp_core"]
