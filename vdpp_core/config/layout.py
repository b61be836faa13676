"""How the work is spread over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pydantic import Field, model_validator

from vdpp_core.config.errors import ConfigError, Frozen

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("dp", "pp", "cfg", "frames")  # outermost first: the last one talks most
MOST_RANKS = 4096


class Place(NamedTuple):
    """Where a rank is: its replica, its stage, and its number in the lockstep group, whose member 0 speaks for it."""

    replica: int
    stage: int
    member: int


class Parallel(Frozen):
    """How the work is spread. The product of the axes is the world size; `dp` is the outermost, `frames` the innermost.

    Ranks that differ in `cfg` and `frames` alone are a lockstep group: they compute the same step of the same sample
    together. `fsdp` is no axis of its own: all ranks of one stage, in every replica, share out the parameters.
    """

    dp: int = Field(default=1, ge=1, le=MOST_RANKS, description="replicas: split the samples")
    pp: int = Field(default=1, ge=1, le=MOST_RANKS, description="stages: split the steps")
    cfg: int = Field(default=1, ge=1, le=2, description="1 or 2: split the guidance's two passes over ranks")
    frames: int = Field(default=1, ge=1, le=MOST_RANKS, description="split the frames over ranks, inside the UNet")
    fsdp: bool = Field(default=False, description="shard the parameters over all ranks of a stage")

    @model_validator(mode="after")
    def _countable(self) -> Parallel:
        if self.world_size > MOST_RANKS:
            axis = max(AXES, key=lambda axis: getattr(self, axis))
            allowed = f"{' × '.join(AXES)} must be at most {MOST_RANKS} ranks, not {self.world_size}"
            raise ConfigError(axis, getattr(self, axis), allowed)
        return self

    @property
    def lockstep(self) -> int:
        """Ranks that compute a step together."""
        return self.cfg * self.frames

    @property
    def world_size(self) -> int:
        return self.dp * self.pp * self.lockstep

    @property
    def shards(self) -> int:
        """Into how many parts the parameters are cut; 1 where every rank holds them whole."""
        return self.dp * self.lockstep if self.fsdp else 1

    def place(self, rank: int) -> Place:
        others, member = divmod(rank, self.lockstep)
        return Place(*divmod(others, self.pp), member)

    def rank(self, replica: int, stage: int, member: int = 0) -> int:
        """The rank at a place."""
        return (replica * self.pp + stage) * self.lockstep + member

    def mesh(self, device_type: str) -> DeviceMesh:
        """The mesh of this layout, outermost axis first; its groups have the default group's time limit.

        Needs an initialised process group of `world_size` ranks, all of which have to call it.
        """
        from vdpp_core.parallel.process_groups import make_mesh

        return make_mesh(device_type, [getattr(self, axis) for axis in AXES], AXES)

    def __str__(self) -> str:
        axes = [f"{axis} {size}" for axis in AXES if (size := getattr(self, axis)) > 1]
        return " × ".join(axes + ["fsdp"] * self.fsdp) if axes else "1 rank"


IN_FLIGHT = 2  # sends of a stage whose receiver is still busy with an earlier sample
