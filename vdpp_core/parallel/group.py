"""What ranks that compute one forward pass together tell each other, and how much of it: bytes, layer by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vdpp_core.steps import split

Edges = tuple[Tensor | None, Tensor | None]


class Group:
    """`size` ranks that share out frames or passes, seen by number `rank` of them.

    This one talks to nobody: what would come from others has the right shape and no meaning. So a forward pass can be
    rehearsed on the meta device, its memory traced and its bytes counted. `Collectives` is the one that talks.

    Attributes:
        sent: (layer, kind) -> bytes that this rank sent to others since the counter was cleared. Kinds: positions
            (all-to-all), halo, statistics, prediction.
        exchanges: how often all of the group had to meet for it.
    """

    def __init__(self, size: int, rank: int = 0) -> None:
        self.size, self.rank = size, rank
        self.sent: Counter[tuple[str, str]] = Counter()
        self.exchanges = 0

    def shares(self, count: int) -> list[slice]:
        """What each rank has of `count` frames or positions: even, the larger shares first, some empty if need be."""
        cut = split(max(count, self.size), self.size)
        return [slice(min(share.start, count), min(share.stop, count)) for share in cut]

    def own(self, count: int) -> slice:
        return self.shares(count)[self.rank]

    def all_gather(self, own: Tensor, layer: str, kind: str) -> Tensor:
        """(size, *own.shape): what all ranks have, in the order of ranks; all have the same shape."""
        self._count(layer, kind, own.nbytes * (self.size - 1))
        gathered = own.new_empty(self.size, *own.shape)
        self._all_gather(gathered, own.contiguous())
        return gathered

    def all_to_all(self, pieces: Tensor, sizes: Sequence[int], coming: Sequence[int], layer: str) -> Tensor:
        """Send sizes[r] elements of the flat `pieces` to rank r; returns, flat, what comes: coming[r] from rank r."""
        self._count(layer, "positions", (pieces.numel() - sizes[self.rank]) * pieces.element_size())
        arrived = pieces.new_empty(sum(coming))
        self._all_to_all(arrived, pieces, coming, sizes)
        return arrived

    def swap_edges(self, first: Tensor, last: Tensor, layer: str) -> Callable[[], Edges]:
        """Begin to send `first` to the rank before and `last` to the one after, which have the same shapes.

        Returns a function that waits for what these send: (the last of the rank before, the first of the rank after),
        None at the ends.
        """
        has_before, has_after = self.rank > 0, self.rank + 1 < self.size
        self._count(layer, "halo", first.nbytes * has_before + last.nbytes * has_after)
        before = torch.empty_like(first) if has_before else None
        after = torch.empty_like(last) if has_after else None
        wait = self._swap_edges(first, last, before, after)

        def arrived() -> Edges:
            wait()
            return before, after

        return arrived

    def _count(self, layer: str, kind: str, size: int) -> None:
        self.sent[layer, kind] += size
        self.exchanges += 1

    def _all_gather(self, gathered: Tensor, own: Tensor) -> None: ...

    def _all_to_all(self, arrived: Tensor, pieces: Tensor, coming: Sequence[int], sizes: Sequence[int]) -> None: ...

    def _swap_edges(
        self, first: Tensor, last: Tensor, before: Tensor | None, after: Tensor | None
    ) -> Callable[[], None]:
        return lambda: None
