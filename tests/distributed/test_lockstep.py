"""A UNet split over ranks predicts what it predicts alone, and is afterwards what it was."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.distributed.conftest import forked_ranks
from tests.distributed.lockstep import TOLERANCES
from vdpp_core import Parallel

LAYOUTS = [
    Parallel(frames=2),
    Parallel(cfg=2),
    Parallel(tp=2),
    Parallel(frames=2, fsdp=True),
    Parallel(frames=3),
    Parallel(tp=3),
    Parallel(frames=4),
    Parallel(cfg=2, frames=2),
    Parallel(pp=2, frames=2),
    Parallel(dp=2, cfg=2),
    Parallel(pp=2, cfg=2, fsdp=True),
    Parallel(cfg=2, tp=2),
    Parallel(pp=2, tp=2),
    Parallel(frames=2, tp=2),
    Parallel(dp=2, tp=2, fsdp=True),
]


@functools.cache
def of_ranks(ranks):
    """What the ranks found, for all layouts of so many of them."""
    layouts = [layout.model_dump_json() for layout in LAYOUTS if layout.world_size == ranks]
    return forked_ranks(ranks, "tests.distributed.lockstep", *layouts)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_prediction_is_that_of_one_rank(layout, dtype):
    for rank, found in enumerate(of_ranks(layout.world_size)):
        errors = found[layout.model_dump_json()][str(dtype)]["errors"]
        assert len(errors) in (1, 3)
        assert max(errors.values()) <= TOLERANCES[dtype], f"rank {rank}: {errors}"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_unet_that_was_split_is_what_it_was(layout):
    for found in of_ranks(layout.world_size):
        assert all(one["same_afterwards"] for one in found[layout.model_dump_json()].values())


def test_the_tolerances_are_those_of_the_promise():
    assert {torch.float32: 1e-5, torch.float64: 1e-12} == TOLERANCES


def test_the_official_pipeline_takes_a_split_unet():
    """A whole generation of 25 steps: latents within 1e-4, frames within one grey level."""
    for rank in of_ranks(2):
        assert len(rank["official"]) == 2  # images, one after the other in one process
        for found in rank["official"]:
            assert found["latents"] <= 1e-4
            assert found["grey_levels"] <= 1


def test_a_block_is_cut_as_torchs_own_styles_cut_it():
    assert all(rank["dtensors"] < 1e-6 for rank in of_ranks(2))
