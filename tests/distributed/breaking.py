"""On two ranks, with the doubles: breaks each of their rules in turn; rank 0 prints JSON.

python -m tests.distributed.forked 2 tests.distributed.breaking strict|late
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import vdpp_core

FOUR = torch.ones(4)


def in_another_type() -> None:
    """What only the comparison of both ranks shows: the rule that they do the same."""
    dist.broadcast(torch.ones(4) if dist.get_rank() == 0 else torch.ones(2, 2), 0)


def a_message_of_another_shape() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.ones(6), 1)
    else:
        dist.recv(torch.ones(2, 3), 0)


def alone() -> None:
    groups = [dist.new_group([rank], timeout=timedelta(minutes=5)) for rank in range(2)]
    dist.broadcast(FOUR, group=groups[dist.get_rank()], group_src=0)


def impatient() -> None:
    dist.all_reduce(FOUR, group=dist.new_group([0, 1]))


def born_too_late() -> None:
    """Rank 1 has posted its receive, and only then uses another group for the first time."""
    group = dist.new_group([0, 1], timeout=timedelta(minutes=5))
    dist.barrier()
    if dist.get_rank() == 0:
        dist.send(FOUR, 1)
        return
    work = dist.irecv(torch.empty(4), 0)
    try:
        dist.all_reduce(FOUR, group=group)
    finally:
        work.wait()


RULES: dict[str, Callable[[], Any]] = {
    "is on meta": lambda: dist.broadcast(torch.ones(4, device="meta"), 0),
    "is not contiguous": lambda: dist.all_reduce(torch.ones(4, 4).T[1:]),
    "ignores tags": lambda: dist.isend(FOUR, 1 - dist.get_rank(), tag=3),
    "empty message": lambda: dist.isend(torch.ones(0), 1 - dist.get_rank()),
    "peer is not named": lambda: dist.recv(FOUR),
    "communicates with nobody": alone,
    "time limit": impatient,
    "first operation of a group": lambda: dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, FOUR, 1 - dist.get_rank(), dist.new_group([0, 1], timeout=timedelta(minutes=5)))]
    ),
}


def said(act: Callable[[], Any]) -> str:
    try:
        act()
    except AssertionError as error:
        return str(error)
    return "nothing"


def strict() -> dict[str, Any]:
    first = {rule: said(act) for rule, act in RULES.items()}
    last = said(born_too_late)
    in_another_type()
    a_message_of_another_shape()
    return first | {"born while a message is outstanding": last}


def late() -> dict[str, Any]:
    """What each of two ranks sees that gloo alone would not show."""
    peer = 1 - dist.get_rank()
    dist.barrier()
    if dist.get_rank() == 0:
        sent = torch.ones(4)
        work = dist.isend(sent, peer)
        completed = work.is_completed()  # the other rank has posted nothing yet
        sent += 1  # before it is complete: the other rank gets what is there then
        dist.barrier()
        work.wait()
        return {"completed_too_soon": completed}
    dist.barrier()
    buffer = torch.zeros(4)
    work = dist.irecv(buffer, peer)
    before = buffer.isnan().all().item()
    work.wait()
    again = dist.irecv(torch.zeros(4), peer)  # for which nobody sends
    waits = threading.Thread(target=sys.modules["communicator"].installed.late.synchronise, daemon=True)
    waits.start()
    waits.join(0.5)
    assert not again.is_completed()
    return {"nan_before": before, "got": buffer.tolist(), "synchronisation_waits": waits.is_alive()}


def main() -> None:
    assert vdpp_core.__all__  # its import puts the doubles in their place
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    everyone: list[Any] = [None, None]
    found = {"strict": strict, "late": late}[sys.argv[1]]()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        print(json.dumps(everyone), flush=True)
    dist.barrier()
    os._exit(0)  # a thread still waits for a message that nobody sends


if __name__ == "__main__":
    main()
