"""How the work is spread over ranks."""

from __future__ import annotations

import bisect
import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import Field, model_validator

from vdpp_core.config.axes import AXES, AXIS_NAMES, FSDP, LOCKSTEP_NAMES, MOST_RANKS
from vdpp_core.config.errors import ConfigError, Frozen

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

IN_FLIGHT = 2  # sends of a stage whose receiver is still busy with an earlier sample


class Place(NamedTuple):
    """A rank's position.

    Attributes:
        member: its index in the lockstep group; member 0 writes for the group.
        copy: which of the lockstep groups that run its stage within the replica.
    """

    replica: int
    stage: int
    member: int
    copy: int = 0


def _size(name: str) -> Any:
    axis = AXES[AXIS_NAMES.index(name)]
    return Field(default=1, ge=1, le=axis.most, description=axis.splits)


class Parallel(Frozen):
    """A layout: the size of every axis (`vdpp_core.config.axes`). Their product is the world size.

    Ranks that differ only in lockstep axes form a lockstep group: they compute the same step of the same sample
    together. With `fsdp`, all ranks of one stage, in every replica, share the parameters; with tp, those that hold the
    same piece of them. With `stage_ranks`, several lockstep groups run a stage: copies of it, which take the replica's
    samples in turn.

    Raises:
        ConfigError: a size out of range, or more than `MOST_RANKS` ranks.
    """

    dp: int = _size("dp")
    pp: int = _size("pp")
    cfg: int = _size("cfg")
    frames: int = _size("frames")
    tp: int = _size("tp")
    fsdp: bool = Field(default=False, description=FSDP.splits)
    stage_ranks: tuple[int, ...] | None = Field(
        default=None, description="ranks (or lockstep groups) of each stage, which share its samples: 1 3"
    )

    @model_validator(mode="before")
    @classmethod
    def _as_many_stages(cls, data: Any) -> Any:
        ranks = data.get("stage_ranks") if isinstance(data, dict) else None
        return {"pp": len(ranks)} | data if isinstance(ranks, list | tuple) and ranks else data

    @model_validator(mode="after")
    def _copied(self) -> Parallel:
        ranks = self.stage_ranks
        if ranks is not None and (len(ranks) != self.pp or min(ranks) < 1):
            numbers = f"{self.pp} whole number{'s' * (self.pp > 1)}, each at least 1"
            raise ConfigError("stage_ranks", ranks, f"must be {numbers}, one for each of the pp stages")
        return self

    @model_validator(mode="after")
    def _countable(self) -> Parallel:
        if self.world_size > MOST_RANKS:
            axis, size = max(self.sizes.items(), key=lambda item: item[1])
            allowed = f"{' × '.join(AXIS_NAMES)} must be at most {MOST_RANKS} ranks, not {self.world_size}"
            if self.stage_ranks is not None and self.groups > size:
                raise ConfigError("stage_ranks", self.stage_ranks, allowed)
            raise ConfigError(axis, size, allowed)
        return self

    @property
    def copies(self) -> tuple[int, ...]:
        """Number of lockstep groups that run each stage, within a replica."""
        return self.stage_ranks or (1,) * self.pp

    @property
    def groups(self) -> int:
        """Number of lockstep groups in a replica."""
        return sum(self.stage_ranks or (self.pp,))

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name -> size, outermost axis first."""
        return {name: getattr(self, name) for name in AXIS_NAMES}

    @property
    def lockstep_sizes(self) -> dict[str, int]:
        """`sizes` of the lockstep axes alone."""
        return {name: getattr(self, name) for name in LOCKSTEP_NAMES}

    @property
    def lockstep(self) -> int:
        """Number of ranks in a lockstep group."""
        return math.prod(self.lockstep_sizes.values())

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.groups * self.lockstep

    def shards_of(self, stage: int) -> int:
        """Number of ranks that FSDP shards a stage's parameters over, or of tp's pieces of them; 1 without."""
        return self.dp * self.copies[stage] * self.lockstep // self.tp if self.fsdp else 1

    @property
    def shards(self) -> int:
        """`shards_of` the stage with most ranks."""
        return max(map(self.shards_of, range(self.pp)))

    def place(self, rank: int) -> Place:
        """The place of a rank."""
        outer, member = divmod(rank, self.lockstep)
        replica, group = divmod(outer, self.groups)
        if self.stage_ranks is None:
            return Place(replica, group, member)
        ends = list(itertools.accumulate(self.stage_ranks))
        stage = bisect.bisect(ends, group)
        return Place(replica, stage, member, group - ends[stage] + self.stage_ranks[stage])

    def rank(self, replica: int, stage: int, member: int = 0, copy: int = 0) -> int:
        """The rank at a place."""
        return (replica * self.groups + self.group(stage, copy)) * self.lockstep + member

    def group(self, stage: int, copy: int) -> int:
        """Index of a lockstep group within its replica. `copy` may be a sample's turn: the copies take turns."""
        if self.stage_ranks is None:
            return stage
        return sum(self.stage_ranks[:stage]) + copy % self.stage_ranks[stage]

    def ranks_of(self, stage: int, replica: int | None = None, member: int | None = None) -> list[int]:
        """All ranks of a stage: of all replicas and members, or only of one."""
        return [
            self.rank(one, stage, each, copy)
            for one in (range(self.dp) if replica is None else (replica,))
            for copy in range(self.copies[stage])
            for each in (range(self.lockstep) if member is None else (member,))
        ]

    def partners(self, stage: int, copy: int, other: int) -> list[int]:
        """The copies of another, neighbouring stage that a copy of a stage exchanges samples with; none of no stage."""
        if not 0 <= other < self.pp:
            return []
        period = math.gcd(self.copies[stage], self.copies[other])
        return [each for each in range(self.copies[other]) if (each - copy) % period == 0]

    def coordinates(self, member: int) -> dict[str, int]:
        """Lockstep axis -> the index of a group's member along it."""
        sizes, found = self.lockstep_sizes, {}
        for name in reversed(sizes):
            member, found[name] = divmod(member, sizes[name])
        return {name: found[name] for name in sizes}

    def mesh(self, device_type: str) -> DeviceMesh:
        """Build the device mesh of this layout, outermost axis first, with all copies of all stages along pp. All ranks
        have to call it.

        Needs an initialised process group of `world_size` ranks, whose time limit the mesh's groups inherit.
        """
        from vdpp_core.parallel.process_groups import make_mesh

        return make_mesh(device_type, list((self.sizes | {"pp": self.groups}).values()), AXIS_NAMES)

    @property
    def slug(self) -> str:
        """The layout in the names of files: `dp2-pp4`."""
        return str(self).replace(" × ", "-").replace(" ", "")

    def __str__(self) -> str:
        sizes = self.sizes | ({"pp": "+".join(map(str, self.stage_ranks))} if self.stage_ranks else {})
        axes = [f"{name} {size}" for name, size in sizes.items() if size != 1]
        return " × ".join(axes + ["fsdp"] * self.fsdp) if axes else "1 rank"
