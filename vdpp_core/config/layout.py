"""How the work is spread over ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import Field, model_validator

from vdpp_core.config.axes import AXES, AXIS_NAMES, FSDP, LOCKSTEP_NAMES, MOST_RANKS
from vdpp_core.config.errors import ConfigError, Frozen

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

IN_FLIGHT = 2  # sends of a stage whose receiver is still busy with an earlier sample


class Place(NamedTuple):
    """A rank's position: its replica, its stage, and its index in the lockstep group. Member 0 writes for the group."""

    replica: int
    stage: int
    member: int


def _size(name: str) -> Any:
    axis = AXES[AXIS_NAMES.index(name)]
    return Field(default=1, ge=1, le=axis.most, description=axis.splits)


class Parallel(Frozen):
    """A layout: the size of every axis (`vdpp_core.config.axes`). Their product is the world size.

    Ranks that differ only in lockstep axes form a lockstep group: they compute the same step of the same sample
    together. With `fsdp`, all ranks of one stage, in every replica, share the parameters.

    Raises:
        ConfigError: a size out of range, or more than `MOST_RANKS` ranks.
    """

    dp: int = _size("dp")
    pp: int = _size("pp")
    cfg: int = _size("cfg")
    frames: int = _size("frames")
    fsdp: bool = Field(default=False, description=FSDP.splits)

    @model_validator(mode="after")
    def _countable(self) -> Parallel:
        if self.world_size > MOST_RANKS:
            axis, size = max(self.sizes.items(), key=lambda item: item[1])
            allowed = f"{' × '.join(AXIS_NAMES)} must be at most {MOST_RANKS} ranks, not {self.world_size}"
            raise ConfigError(axis, size, allowed)
        return self

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
        return math.prod(self.sizes.values())

    @property
    def shards(self) -> int:
        """Number of parts the parameters are cut into; 1 where every rank holds them whole."""
        return self.dp * self.lockstep if self.fsdp else 1

    def place(self, rank: int) -> Place:
        """The place of a rank."""
        outer, member = divmod(rank, self.lockstep)
        return Place(*divmod(outer, self.pp), member)

    def rank(self, replica: int, stage: int, member: int = 0) -> int:
        """The rank at a place."""
        return (replica * self.pp + stage) * self.lockstep + member

    def coordinates(self, member: int) -> dict[str, int]:
        """Lockstep axis -> the index of a group's member along it."""
        sizes, found = self.lockstep_sizes, {}
        for name in reversed(sizes):
            member, found[name] = divmod(member, sizes[name])
        return {name: found[name] for name in sizes}

    def mesh(self, device_type: str) -> DeviceMesh:
        """Build the device mesh of this layout, outermost axis first. All ranks have to call it.

        Needs an initialised process group of `world_size` ranks, whose time limit the mesh's groups inherit.
        """
        from vdpp_core.parallel.process_groups import make_mesh

        return make_mesh(device_type, list(self.sizes.values()), AXIS_NAMES)

    @property
    def slug(self) -> str:
        """The layout in the names of files: `dp2-pp4`."""
        return str(self).replace(" × ", "-").replace(" ", "")

    def __str__(self) -> str:
        axes = [f"{name} {size}" for name, size in self.sizes.items() if size > 1]
        return " × ".join(axes + ["fsdp"] * self.fsdp) if axes else "1 rank"
