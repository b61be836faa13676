"""Layouts of many ranks without their processes: what one sends to another is what that one expects of it.

Groups are made on torch's fake backend, one rank after the other; forward passes run on the meta device with groups
that note what is asked of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from vdpp_core import Parallel, RunConfig, models
from vdpp_core.config.axes import AXIS_NAMES, LOCKSTEP_NAMES
from vdpp_core.parallel import parallelize
from vdpp_core.parallel.group import Group
from vdpp_core.parallel.handoff import Handoff
from vdpp_core.parallel.process_groups import merged
from vdpp_core.parallel.world import World, shards_of
from vdpp_core.predict.planner import layouts
from vdpp_core.predict.trace import Remembering

WORLDS = (7, 8, 16)
FRAMES = 25  # which none of them divides
UNEVEN = [
    Parallel(stage_ranks=(1, 6)),
    Parallel(stage_ranks=(4, 3)),
    Parallel(stage_ranks=(2, 4, 2), fsdp=True),
    Parallel(dp=2, stage_ranks=(1, 3), cfg=2, fsdp=True),
]
META = torch.device("meta")
LOCKSTEP = sorted({(layout.cfg, layout.frames) for world in WORLDS for layout in layouts(world)} - {(1, 1)})


@contextmanager
def rank_of(layout: Parallel, rank: int) -> Iterator[World]:
    """This process as one of the ranks, who talks to nobody."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        mesh = layout.mesh("cpu")
        team = merged(mesh, "pp", *LOCKSTEP_NAMES).get_group()
        shards, place, cpu = shards_of(layout, mesh), layout.place(rank), torch.device("cpu")
        yield World(rank, layout.world_size, place, cpu, mesh, mesh.get_group("pp"), team, shards)
    finally:
        dist.destroy_process_group()


def groups_of(world: World) -> dict[str, list[int]]:
    """The ranks of each group that a rank is in, in their order."""
    groups = {axis: world.mesh.get_group(axis) for axis in AXIS_NAMES} | {"team": world.team}
    if world.shards is not None:
        groups["shards"] = world.shards.get_group()
    return {name: dist.get_process_group_ranks(group) for name, group in groups.items()}


@pytest.mark.parametrize("size", WORLDS)
def test_all_members_of_a_group_agree_on_it(size: int) -> None:
    even = [layout for layout in layouts(size) if layout.fsdp == (layout.dp * layout.lockstep > 1)]
    for layout in [*even, *UNEVEN]:
        if layout.world_size != size:
            continue
        found: list[dict[str, list[int]]] = []
        neighbours: list[dict[str, list[int]]] = []
        for rank in range(size):
            with rank_of(layout, rank) as world:
                found.append(groups_of(world))
                handoff, stage = Handoff(world, layout), world.place.stage
                around = {"before": stage - 1, "after": stage + 1}
                neighbours.append({k: [handoff.ranks[one] for one in handoff.neighbours(v)] for k, v in around.items()})
        for rank, own in enumerate(found):
            place = layout.place(rank)
            for name, ranks in own.items():
                assert rank in ranks
                assert all(found[other][name] == ranks for other in ranks), f"{layout}: {name} of {rank}"
            assert {layout.place(other).replica for other in own["team"]} == {place.replica}
            assert len(own["team"]) == layout.groups * layout.lockstep
            if "shards" in own:
                assert {layout.place(other).stage for other in own["shards"]} == {place.stage}
                assert len(own["shards"]) == layout.shards_of(place.stage)
            after = neighbours[rank]["after"]
            assert bool(after) == (place.stage < layout.pp - 1)
            for other in after:
                assert rank in neighbours[other]["before"]
                assert layout.place(other)[:3] == place._replace(stage=place.stage + 1)[:3]
            if layout.stage_ranks is None:
                assert len(after) <= 1


class Noting(Group):
    """Notes what a member asks of its group: operations, with what goes to each and what is expected of each."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__(size, rank)
        self.notes: list[tuple[str, Any, Sequence[int], Sequence[int]]] = []

    def _all_gather(self, gathered: Tensor, own: Tensor) -> None:
        assert own.is_contiguous()
        assert gathered.shape == (self.size, *own.shape)
        self.notes.append(("all_gather", (own.shape, own.dtype), (), ()))

    def _all_to_all(self, arrived: Tensor, pieces: Tensor, coming: Sequence[int], sizes: Sequence[int]) -> None:
        assert pieces.is_contiguous()
        assert (arrived.shape, pieces.shape) == ((sum(coming),), (sum(sizes),))
        self.notes.append(("all_to_all", pieces.dtype, sizes, coming))


class Unfair(Noting):
    """Its second member shares out as nobody else does."""

    def shares(self, count: int) -> list[slice]:
        fair = super().shares(count)
        if self.rank != 1:
            return fair
        sizes = [share.stop - share.start for share in reversed(fair)]
        ends = list(itertools.accumulate(sizes))
        return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


Members = dict[tuple[int, int], dict[str, Noting]]  # (number in cfg, number in frames) -> its groups


def after_a_forward_pass(cfg: int, frames: int, kind: type[Noting] = Noting) -> Members:
    """The groups of each member of a lockstep group."""
    found = {}
    config = RunConfig(parallel=Parallel())
    for one, another in itertools.product(range(cfg), range(frames)):
        groups = {"cfg": kind(cfg, one), "frames": kind(frames, another)}
        unet = models.ready(config, models.on_meta(config, torch.float16))
        patches = parallelize.split_forward(unet, {axis: group for axis, group in groups.items() if group.size > 1})
        given = {
            "sample": torch.empty(2, FRAMES, 8, 5, 9, device=META, dtype=torch.float16),
            "timestep": torch.tensor(1.0),
            "encoder_hidden_states": torch.empty(2, 1, 32, device=META, dtype=torch.float16),
            "added_time_ids": torch.empty(2, 3, device=META, dtype=torch.float16),
        }
        with torch.no_grad(), Remembering():
            unet(**given)
        patches.undo()
        found[one, another] = groups
    return found


def disagreements(found: Members, cfg: int, frames: int) -> list[str]:
    """Where ranks of one group do not do the same, or one expects what another does not send."""
    lines = [[found[one, another]["frames"] for another in range(frames)] for one in range(cfg)]
    lines += [[found[one, another]["cfg"] for one in range(cfg)] for another in range(frames)]
    words = []
    for line in lines:
        if len({len(group.notes) for group in line}) > 1 or bool(line[0].notes) != (len(line) > 1):
            words.append("not as many operations")
        for number, same in enumerate(zip(*(group.notes for group in line), strict=False)):
            if len({(operation, looks) for operation, looks, _, _ in same}) > 1:
                words.append(f"operation {number} is not the same")
            for (member, mine), (other, theirs) in itertools.permutations(enumerate(same), 2):
                going, coming = mine[2], theirs[3]
                if (going[other] if going else None) != (coming[member] if coming else None):
                    words.append(f"operation {number}: {member} gives {other} what it does not expect")
    return words


@pytest.mark.parametrize(("cfg", "frames"), LOCKSTEP)
def test_what_one_sends_is_what_the_other_expects(cfg: int, frames: int) -> None:
    assert disagreements(after_a_forward_pass(cfg, frames), cfg, frames) == []


def test_a_rank_that_shares_out_differently_is_found() -> None:
    assert disagreements(after_a_forward_pass(1, 3, Unfair), 1, 3)
