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
    others = busy_ranks() if own.device_type == "cpu" else 0
    return others if own.local_ranks * own.threads + others > execution.cores() else 0


def ranks_of_other_runs(number: int) -> str:
    """Their number in words."""
    return "1 rank of another run" if number == 1 else f"{number} ranks of other runs"


def busy_ranks() -> int:
    """The number of ranks of other runs, of any user, that may use a core that this process may use."""
    return sum(_shares_cores(one) for one in psutil.process_iter(["cmdline"]) if _is_rank(one.info["cmdline"] or []))


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
    """Whether a command starts a rank. Those of torchrun and `timeout` contain that of a rank, but start none."""
    at = command.index("-m") if "-m" in command else 0
    is_python = "python" in "".join(command[:1]).rpartition("/")[2] and all(word[:1] == "-" for word in command[1:at])
    return is_python and command[at : at + 2] == ["-m", "vdpp_core"]
