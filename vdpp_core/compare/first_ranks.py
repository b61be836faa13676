"""Work for some of the ranks of a job, while the others wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vdpp_core.parallel.rendezvous import Ranks, store

POLL_S = 0.05


def by_first_ranks(
    ranks: Ranks, number: int, subject: str, work: Callable[[Ranks], dict[str, Any]]
) -> dict[str, Any] | None:
    """Have the first `number` ranks work as a world of their own, while the others sleep until rank 0 is done.

    Unlike a barrier this needs no process group, so that the work may make one, and costs those who wait no core.

    Returns:
        The work's result on this rank; None on a rank that only waited.
    """
    shared, result = store(ranks), None
    if ranks.rank < number:
        result = work(replace(ranks, world_size=number, local_world_size=min(number, ranks.local_world_size)))
    if ranks.rank == 0:
        shared.set(subject, "done")
    while not shared.check([subject]):
        time.sleep(POLL_S)
    return result
