"""PyTorch's caching allocator, with figures worked out by hand from its rules."""

from __future__ import annotations

import pytest

from vdpp_core.predict.allocator import MIB, CachingAllocator, FullError


def test_small_requests_share_segments_of_2_mib():
    allocator = CachingAllocator()
    allocator.allocate(1)
    assert (allocator.allocated, allocator.reserved) == (512, 2 * MIB)
    for _ in range(2):
        allocator.allocate(MIB)  # one fits beside the first, the other does not
    assert (allocator.allocated, allocator.reserved) == (512 + 2 * MIB, 4 * MIB)


@pytest.mark.parametrize(("size", "segment"), [(MIB + 1, 20), (9 * MIB, 20), (10 * MIB, 10), (11 * MIB, 12)])
def test_large_requests(size, segment):
    allocator = CachingAllocator()
    allocator.allocate(size)
    assert allocator.reserved == segment * MIB


def test_what_is_freed_is_used_again_and_its_pieces_grow_together():
    allocator = CachingAllocator()
    whole = allocator.allocate(30 * MIB)
    allocator.free(whole)
    parts = [allocator.allocate(10 * MIB) for _ in range(3)]
    assert allocator.reserved == 30 * MIB
    for part in (parts[0], parts[2], parts[1]):
        allocator.free(part)
    assert allocator.allocated == 0
    allocator.allocate(30 * MIB)
    assert allocator.peak_reserved == 30 * MIB


def test_the_smallest_free_block_that_is_large_enough_is_taken():
    allocator = CachingAllocator()
    large, kept, small = (allocator.allocate(size * MIB) for size in (40, 20, 30))
    allocator.free(large)
    allocator.free(small)
    allocator.allocate(30 * MIB)
    allocator.allocate(40 * MIB)
    assert allocator.reserved == 90 * MIB
    assert kept.size == 20 * MIB


def test_pieces_that_lie_apart_do_not_make_room():
    """Fragmentation: 40 MiB are free, but not together."""
    allocator = CachingAllocator(80 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    parts = [allocator.allocate(20 * MIB) for _ in range(3)]
    allocator.free(parts[0])
    allocator.free(parts[2])
    with pytest.raises(FullError) as full:
        allocator.allocate(30 * MIB)
    assert (full.value.request, full.value.reserved, full.value.allocated) == (30 * MIB, 60 * MIB, 20 * MIB)


def test_streams_do_not_share():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MIB))
    allocator.allocate(30 * MIB, stream=1)
    assert allocator.reserved == 60 * MIB


def test_segments_that_are_wholly_free_are_given_back_before_it_is_too_late():
    allocator = CachingAllocator(50 * MIB)
    allocator.free(allocator.allocate(30 * MIB))
    allocator.allocate(40 * MIB)
    assert (allocator.reserved, allocator.peak_reserved) == (40 * MIB, 40 * MIB)
