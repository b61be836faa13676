"""Replays a trace: with whole or sharded parameters, as a sum, or on an allocator of limited capacity."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from vdpp_core.predict.allocator import MIB, Block, CachingAllocator, FullError
from vdpp_core.predict.trace import Event, Trace, Unit

PARTS = ("parameters", "activations", "gathered", "latents")
RESOLUTION = 16 * MIB
_APART = 10**9  # more than there are keys


@dataclass(frozen=True)
class Peak:
    """Bytes of a rank when most is allocated, by part, and the layer that is running then."""

    parameters: int
    activations: int
    gathered: int
    latents: int
    layer: str
    largest_unit: Unit

    @property
    def total(self) -> int:
        """Sum of all parts in bytes."""
        return self.parameters + self.activations + self.gathered + self.latents

    def in_gb(self) -> dict[str, float]:
        """parameters_gb, activations_gb, gathered_gb, latents_gb and their sum peak_gb, in 1e9 bytes."""
        parts = {f"{part}_gb": getattr(self, part) / 1e9 for part in PARTS}
        return parts | {"peak_gb": self.total / 1e9}


def peak(trace: Trace, shards: int = 1, offload: bool = False) -> Peak:
    """The moment of a trace when the live allocations are largest in sum.

    Args:
        shards: ranks that the parameters are sharded over.
        offload: whether the shards are in host memory, and so not counted.
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
    return Peak(own + best["parameters"], best["activations"], best["gathered"], best["latents"], layer, largest)


def play(trace: Trace, shards: int, offload: bool, capacity: float) -> CachingAllocator:
    """Replay loading the parameters and all events of a trace on an allocator of `capacity` bytes.

    Raises:
        FullError: a request cannot be met.
    """
    allocator = CachingAllocator(capacity)
    for rows, size in () if offload else trace.parameters.rows:
        allocator.allocate(-(-rows // shards) * size)
    alive: dict[int, Block] = {}
    for event in gathering(trace, shards, offload):
        if event.what == "alloc":
            alive[event.key] = allocator.allocate(event.size, event.stream)
        elif event.what == "free":
            allocator.free(alive.pop(event.key))
    return allocator


def room_needed(trace: Trace, shards: int, offload: bool) -> int:
    """The smallest capacity in bytes, to RESOLUTION, in which `play` succeeds: by bisection, since the allocator
    reserves more where there is more."""
    least, most = peak(trace, shards, offload).total, play(trace, shards, offload, float("inf")).peak_reserved
    while most - least > RESOLUTION:
        middle = (least + most) // 2
        try:
            play(trace, shards, offload, middle)
            most = middle
        except FullError:
            least = middle
    return most


def gathering(trace: Trace, shards: int, offload: bool = False) -> Iterator[Event]:
    """The events of a trace and, with sharded parameters, those that FSDP2 adds.

    FSDP2 gathers the next unit in advance into a buffer of the communication stream, copies each parameter out of it,
    and frees the buffer once the next unit has been copied. The root stays gathered. Source: PyTorch,
    torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (unshard, wait_for_unshard, reshard).
    """
    if shards == 1:
        yield from trace.events
        return
    keys = itertools.count(-1, -1)  # those of the trace are positive
    arriving: dict[int, int] = {}
    whole: dict[int, list[Event]] = {}
    copied_from: int | None = None

    def ask(unit: int) -> Iterator[Event]:
        if unit < len(trace.units) and unit not in arriving and unit not in whole:
            own, arriving[unit] = trace.units[unit].shard(shards), next(keys)
            if offload:  # the shard, copied from the host
                yield Event("alloc", arriving[unit] * _APART, own, "gathered", stream=1)
            yield Event("alloc", arriving[unit], shards * own, "gathered", stream=1)
            if offload:
                yield Event("free", arriving[unit] * _APART)

    for event in trace.events:
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
