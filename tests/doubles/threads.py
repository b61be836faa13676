"""Ranks of a lockstep group as threads of one process: the same groups, patches and numbers, no torchrun."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from vdpp_core.parallel.group import Group

T = TypeVar("T")
PATIENCE_S = 60.0


class Meeting:
    """Where the ranks of one group meet."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=PATIENCE_S)
        self.brought: list[Any] = [None] * size


class Threaded(Group):
    """A group whose ranks are threads."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(len(meeting.brought), rank)
        self.meeting = meeting

    def _swap(self, own: Any) -> list[Any]:
        self.meeting.brought[self.rank] = own
        self.meeting.barrier.wait()
        everything = list(self.meeting.brought)
        self.meeting.barrier.wait()
        return everything

    def _all_gather(self, gathered: Tensor, own: Tensor) -> None:
        gathered.copy_(torch.stack(self._swap(own.clone())))

    def _all_reduce(self, own: Tensor) -> None:
        own.copy_(torch.stack(self._swap(own.clone())).sum(0))

    def _all_to_all(self, arrived: Tensor, pieces: Tensor, coming: Sequence[int], sizes: Sequence[int]) -> None:
        came = [parts[self.rank] for parts in self._swap(pieces.clone().split(list(sizes)))]
        assert [len(part) for part in came] == list(coming)
        arrived.copy_(torch.cat(came))


def together(size: int, work: Callable[[Group], T]) -> list[T]:
    """What `work` gives each of `size` ranks, each with its end of the same group."""
    meeting = Meeting(size)

    def of_rank(rank: int) -> T:
        try:
            with torch.no_grad():
                return work(Threaded(meeting, rank))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(of_rank, range(size)))
