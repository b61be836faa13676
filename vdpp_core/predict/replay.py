"""A trace played again: with parameters whole or sharded, summed up, or on an allocator of limited capacity."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from vdpp_core.predict.allocator import MIB, Block, CachingAllocator, FullError
from vdpp_core.predict.trace import Event, Trace, Unit

PARTS = ("parameters", "activations", "gathered", "latents")
STEPS = 3  # fragmentation has settled then
RESOLUTION = 16 * MIB
_APART = 10**9  # more than there are keys


@dataclass(frozen=True)
class Peak:
    """Bytes of a rank at the moment when most is allocated, by part, and the layer that was at work then."""

    parameters: int
    activations: int
    gathered: int
    latents: int
    layer: str
    largest_unit: Unit

    @property
    def total(self) -> int:
        return self.parameters + self.activations + self.gathered + self.latents

    def in_gb(self) -> dict[str, float]:
        """parameters_gb, activations_gb, gathered_gb, latents_gb and peak_gb, their sum."""
        parts = {f"{part}_gb": getattr(self, part) / 1e9 for part in PARTS}
        return parts | {"peak_gb": self.total / 1e9}


def peak(trace: Trace, shards: int = 1, offload: bool = False) -> Peak:
    """Where the sum of all that is alive is greatest.

    Args:
        shards: ranks that the parameters are cut over.
        offload: the shards are in the host's memory, and so in no sum.
    """
    alive: dict[int, Event] = {}
    now: Counter[str] = Counter()
    best, most, layer = Counter[str](), -1, ""
    for event in gathering(trace, shards, offload):
        if event.what == "alloc":
            alive[event.key] = event
            now[event.part] += event.size
            if (total := now.total()) > most:
                best, most, layer = now.copy(), total, event.layer
        elif event.what == "free":
            gone = alive.pop(event.key)
            now[gone.part] -= gone.size
    own = 0 if offload else trace.parameters.shard(shards)
    largest = max(trace.units, key=lambda unit: unit.shard(1))
    return Peak(own, best["activations"], best["gathered"], best["latents"], layer, largest)


def play(trace: Trace, shards: int, offload: bool, capacity: float) -> CachingAllocator:
    """Load the parameters, then take STEPS steps. What a step leaves, its latents, lives until the next one is done.

    Raises:
        FullError: a request cannot be met in so many bytes.
    """
    allocator = CachingAllocator(capacity)
    for rows, size in () if offload else trace.parameters.rows:
        allocator.allocate(-(-rows // shards) * size)
    left: list[Block] = []
    for step in range(STEPS):
        alive: dict[int, Block] = {}
        for event in gathering(trace, shards, offload, again=step > 0):
            if event.what == "alloc":
                alive[event.key] = allocator.allocate(event.size, event.stream)
            elif event.what == "free":
                allocator.free(alive.pop(event.key))
        for block in left:
            allocator.free(block)
        left = list(alive.values()) if step > 0 else []  # conditioning and root, which came with the first, stay
    return allocator


def room_needed(trace: Trace, shards: int, offload: bool) -> int:
    """The smallest capacity, to RESOLUTION, in which `play` comes to its end; it takes more where there is more."""
    least, most = peak(trace, shards, offload).total, play(trace, shards, offload, float("inf")).peak_reserved
    while most - least > RESOLUTION:
        middle = (least + most) // 2
        try:
            play(trace, shards, offload, middle)
            most = middle
        except FullError:
            least = middle
    return most


def gathering(trace: Trace, shards: int, offload: bool = False, again: bool = False) -> Iterator[Event]:
    """The events, and where parameters are sharded those of FSDP2: the next unit's are asked for beforehand; a unit's
    are copied out of the buffer they came in, each into a tensor; the buffer is freed when the next unit's have been
    copied. The root's stay. Buffers belong to the stream that gathers.

    See torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py: unshard, wait_for_unshard, reshard.

    Args:
        again: a later step, without the prelude; the root is gathered already.
    """
    events = trace.events[trace.prelude if again else 0 :]
    if shards == 1:
        yield from events
        return
    keys = itertools.count(-1, -1)  # those of the trace are positive
    arriving: dict[int, int] = {}
    whole: dict[int, list[Event]] = {0: []} if again else {}
    copied_from: int | None = None

    def ask(unit: int) -> Iterator[Event]:
        if unit < len(trace.units) and unit not in arriving and unit not in whole:
            own, arriving[unit] = trace.units[unit].shard(shards), next(keys)
            if offload:  # on its way from the host
                yield Event("alloc", arriving[unit] * _APART, own, "gathered", stream=1)
            yield Event("alloc", arriving[unit], shards * own, "gathered", stream=1)
            if offload:
                yield Event("free", arriving[unit] * _APART)

    for event in events:
        if event.what == "enter":
            unit = event.key
            yield from ask(unit)
            if unit in arriving:
                if copied_from is not None:
                    yield Event("free", copied_from)
                copied_from, name = arriving.pop(unit), trace.units[unit].name
                sizes = (shards * -(-rows // shards) * size for rows, size in trace.units[unit].rows)
                whole[unit] = [Event("alloc", next(keys), size, "gathered", name) for size in sizes]
                yield from whole[unit]
            yield from ask(unit + 1)
        elif event.what == "leave":
            if event.key != 0:
                yield from (Event("free", part.key) for part in whole.pop(event.key))
            elif copied_from is not None:
                yield Event("free", copied_from)
                copied_from = None
        else:
            yield event
