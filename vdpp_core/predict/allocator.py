"""A model of what PyTorch's CUDA caching allocator reserves. Source: PyTorch, c10/cuda/CUDACachingAllocator.cpp."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass

MIB = 2**20
GRANULE = 512  # kMinBlockSize
SMALL = MIB  # kSmallSize: requests up to this come from segments of SMALL_SEGMENT
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB  # kLargeBuffer, for requests below FROM_ITS_OWN_SIZE
FROM_ITS_OWN_SIZE = 10 * MIB  # kMinLargeAlloc; beyond it a segment is the request rounded up to ROUND_LARGE
ROUND_LARGE = 2 * MIB


class FullError(Exception):
    """The device has no room for a segment of `request` bytes, with `reserved` and `allocated` bytes in use."""

    def __init__(self, request: int, reserved: int, allocated: int) -> None:
        self.request, self.reserved, self.allocated = request, reserved, allocated
        super().__init__(f"{request} bytes requested, {reserved} reserved, {allocated} of them allocated")


@dataclass(eq=False)
class Block:
    """A block of a segment, linked to its neighbours."""

    size: int
    order: int  # number of its segment, in order of creation
    pool: tuple[bool, int]  # whether small, stream
    free: bool = False
    before: Block | None = None
    after: Block | None = None
    place: tuple[int, int, int] = (0, 0, 0)  # sort key in the cache: size, segment, turn


class CachingAllocator:
    """The allocator with default settings and `capacity` bytes of device memory.

    Segments stay reserved until a request cannot be met otherwise. Streams do not share memory.
    """

    def __init__(self, capacity: float = float("inf")) -> None:
        self.capacity = capacity
        self.reserved = self.allocated = self.peak_reserved = 0
        self.segments = 0
        self.turns = itertools.count()
        self.cached: defaultdict[tuple[bool, int], list[tuple[tuple[int, int, int], Block]]] = defaultdict(list)

    def allocate(self, size: int, stream: int = 0) -> Block:
        """Allocate `size` bytes: the smallest free block that is large enough, split if the rest is worth keeping, or
        else a new segment.

        Raises:
            FullError: there is no room, even after all free segments are released.
        """
        size = max(GRANULE, -(-size // GRANULE) * GRANULE)
        pool = size <= SMALL, stream
        cached = self.cached[pool]
        smallest = bisect_left(cached, ((size, 0, 0),))
        block = cached.pop(smallest)[1] if smallest < len(cached) else self._segment(size, pool)
        self._split(block, size)
        block.free = False
        self.allocated += block.size
        return block

    def free(self, block: Block) -> None:
        """Return a block to the cache, merged with its free neighbours."""
        self.allocated -= block.size
        block.free = True
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                cached = self.cached[block.pool]
                del cached[bisect_left(cached, (neighbour.place,))]
                block.size += neighbour.size
                if neighbour is block.before:
                    block.before = neighbour.before
                    if block.before is not None:
                        block.before.after = block
                else:
                    block.after = neighbour.after
                    if block.after is not None:
                        block.after.before = block
        self._cache(block)

    def _cache(self, block: Block) -> None:
        block.place = block.size, block.order, next(self.turns)
        insort(self.cached[block.pool], (block.place, block))

    def _segment(self, size: int, pool: tuple[bool, int]) -> Block:
        if pool[0]:
            whole = SMALL_SEGMENT
        elif size < FROM_ITS_OWN_SIZE:
            whole = LARGE_SEGMENT
        else:
            whole = -(-size // ROUND_LARGE) * ROUND_LARGE
        if self.reserved + whole > self.capacity:
            before = self.reserved
            self._release_free()
            if self.reserved + whole > self.capacity:
                raise FullError(whole, before, self.allocated)
        self.reserved += whole
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.segments += 1
        return Block(whole, self.segments, pool)

    def _split(self, block: Block, size: int) -> None:
        left = block.size - size
        if left >= GRANULE if block.pool[0] else left > SMALL:
            rest = Block(left, block.order, block.pool, free=True, before=block, after=block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            self._cache(rest)

    def _release_free(self) -> None:
        for pool, cached in self.cached.items():
            parts = [(place, block) for place, block in cached if block.before or block.after]
            self.reserved -= sum(block.size for _, block in cached) - sum(block.size for _, block in parts)
            self.cached[pool] = parts
