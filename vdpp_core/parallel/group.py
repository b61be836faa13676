"""The collectives of a lockstep group, with a count of the bytes sent by layer and kind."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vdpp_core.config.steps import split
from vdpp_core.parallel.fsdp import gather
from vdpp_core.parallel.world import communication

AWAKE_S = 0.02  # a CPU rank that waits for less stays awake


class Group:
    """A group of `size` ranks along one lockstep axis, as seen by member `rank`.

    This class communicates with nobody: what would come from other ranks has the right shape but undefined values. That
    is enough to trace a forward pass on the meta device and count its bytes. `Collectives` communicates.

    Attributes:
        sent: (layer, kind) -> bytes that this rank has sent to others. Kinds: positions (all-to-all), halo, statistics,
            prediction, guidance, partial sums, parameters (of tensor parallelism, gathered by `restore`).
        exchanges: number of collective operations so far.
    """

    def __init__(self, size: int, rank: int = 0) -> None:
        self.size, self.rank = size, rank
        self.sent: Counter[tuple[str, str]] = Counter()
        self.exchanges = 0

    def shares(self, count: int) -> list[slice]:
        """Each rank's share of `count` frames or positions. Sizes differ by at most one; shares may be empty."""
        cut = split(max(count, self.size), self.size)
        return [slice(min(share.start, count), min(share.stop, count)) for share in cut]

    def all_gather(self, own: Tensor, layer: str, kind: str) -> Tensor:
        """Gather a tensor that has the same shape on all ranks: (size, *own.shape), in rank order."""
        self._count(layer, kind, own.nbytes * (self.size - 1))
        gathered = own.new_empty(self.size, *own.shape)
        self._all_gather(gathered, own.contiguous())
        return gathered

    def all_to_all(self, pieces: Tensor, sizes: Sequence[int], coming: Sequence[int], layer: str) -> Tensor:
        """Send sizes[r] elements of the flat `pieces` to rank r; return coming[r] elements from each rank r, flat."""
        self._count(layer, "positions", (pieces.numel() - sizes[self.rank]) * pieces.element_size())
        arrived = pieces.new_empty(sum(coming))
        self._all_to_all(arrived, pieces, coming, sizes)
        return arrived

    def all_gather_with_edges(
        self, own: Tensor, first: Tensor, last: Tensor, layer: str
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Gather `own` from all ranks, and exchange edges with the neighbours in the same all-to-all (halo exchange).

        `first` goes to the rank before, `last` to the rank after. Shapes and types agree on all ranks.

        Returns:
            `own` of all ranks, (size, *own.shape); `last` of the rank before; `first` of the rank after. An edge is
            None where there is no such neighbour.
        """
        edges = {self.rank - 1: first, self.rank + 1: last}
        others = [rank for rank in range(self.size) if rank != self.rank]
        pieces = [_as_bytes(part) for rank in others for part in (own, *([edges[rank]] if rank in edges else []))]
        sizes = [own.nbytes + first.nbytes * (rank in edges) for rank in range(self.size)]
        sizes[self.rank] = 0
        self.sent[layer, "statistics"] += own.nbytes * len(others)
        self._count(layer, "halo", sum(sizes) - own.nbytes * len(others))
        arrived = pieces[0].new_empty(sum(sizes))
        self._all_to_all(arrived, torch.cat(pieces), sizes, sizes)
        gathered = own.new_empty(self.size, *own.shape)
        gathered[self.rank] = own
        came: dict[int, Tensor] = {}
        for rank, piece in zip(range(self.size), arrived.split(sizes), strict=True):
            if rank != self.rank:
                gathered[rank] = piece[: own.nbytes].view(own.dtype).view(own.shape)
            if rank in edges:
                came[rank] = piece[own.nbytes :].view(first.dtype).view(first.shape)
        return gathered, came.get(self.rank - 1), came.get(self.rank + 1)

    def all_reduce(self, own: Tensor, layer: str, kind: str) -> Tensor:
        """Sum a tensor of the same shape over all ranks, in place where it is contiguous. Bytes count as a ring sends
        them: 2·(N-1)/N of the tensor."""
        self._count(layer, kind, 2 * own.nbytes * (self.size - 1) // self.size)
        own = own.contiguous()
        self._all_reduce(own)
        return own

    def _count(self, layer: str, kind: str, size: int) -> None:
        self.sent[layer, kind] += size
        self.exchanges += 1

    def _all_gather(self, gathered: Tensor, own: Tensor) -> None: ...

    def _all_reduce(self, own: Tensor) -> None: ...

    def _all_to_all(self, arrived: Tensor, pieces: Tensor, coming: Sequence[int], sizes: Sequence[int]) -> None: ...


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


class Collectives(Group):
    """A group that communicates over a process group.

    Raises:
        LostRankError: in any collective, if another rank is gone.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(dist.get_world_size(group), dist.get_rank(group))
        self.group = group
        self.awake_s = AWAKE_S if _have_cores_of_their_own() else 0.0

    def _all_gather(self, gathered: Tensor, own: Tensor) -> None:
        parts = gathered.flatten(0, 1)  # gloo takes them concatenated, not stacked
        with communication():
            self._finish(gather(parts, own, group=self.group, async_op=True), own.device)

    def _all_to_all(self, arrived: Tensor, pieces: Tensor, coming: Sequence[int], sizes: Sequence[int]) -> None:
        sizes_of_both = list(coming), list(sizes)
        with communication():
            work = dist.all_to_all_single(arrived, pieces, *sizes_of_both, self.group, async_op=True)
            self._finish(work, pieces.device)

    def _all_reduce(self, own: Tensor) -> None:
        with communication():
            self._finish(dist.all_reduce(own, group=self.group, async_op=True), own.device)

    def _finish(self, work: Any, device: torch.device) -> None:
        """Wait for a collective; on a CPU, without putting the core to sleep at first.

        Waking it up again takes about a millisecond on a virtual machine, as long as a typical wait. `sched_yield`
        leaves the core to gloo's threads. Ranks that share cores sleep: awake, they would keep each other from
        computing (frames 4 on two cores took three times as long).
        """
        until = time.perf_counter() + self.awake_s
        while device.type == "cpu" and not work.is_completed() and time.perf_counter() < until:
            os.sched_yield()
        work.wait()


def _have_cores_of_their_own() -> bool:
    """Whether this machine's ranks have a core for each of their threads."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())) * torch.get_num_threads() <= cores
