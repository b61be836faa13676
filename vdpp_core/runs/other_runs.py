"""Ranks of other runs that share cores with this one."""

from __future__ import annotations

import os
from collections.abc import Mapping

import psutil

from vdpp_core.config import execution
from vdpp_core.config.execution import Execution


def in_the_way(own: Execution) -> int:
    """How many ranks of other runs a run has to share cores with on this machine.

    0 where there are cores for all of them, and on GPUs.
    """
    if own.device_type != "cpu":
        return 0
    others = busy_ranks()
    return others if own.local_ranks * own.threads + others > execution.cores() else 0


def ranks_of_other_runs(number: int) -> str:
    """Their number in words."""
    return "1 rank of another run" if number == 1 else f"{number} ranks of other runs"


def busy_ranks() -> int:
    """The number of ranks of other runs, of any user, that may use a core that this process may use."""
    ranks = (process for process in psutil.process_iter(["cmdline"]) if _is_rank(process.info["cmdline"] or []))
    return sum(map(_shares_cores, ranks))


def _shares_cores(process: psutil.Process) -> bool:
    """Whether a rank belongs to another run than this process and may use one of the same cores."""
    try:
        if process.pid == os.getpid() or not execution.cores_of(psutil.Process()) & execution.cores_of(process):
            return False
        own = _rendezvous(os.environ)
        return own is None or _rendezvous(process.environ()) != own
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True  # another user's


def _rendezvous(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """What only the ranks of one run have in common; None outside torchrun."""
    found = tuple(environment.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"))
    return found if environment.get("MASTER_PORT") else None


def _is_rank(command: list[str]) -> bool:
    """Whether a command starts a rank. torchrun's own command contains that of its ranks, but does not start one."""
    return "-m" in command and command[command.index("-m") + 1 :][:1] == ["vdpp_core"]
