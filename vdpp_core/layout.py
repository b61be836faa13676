"""How the work is spread over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from vdpp_core.errors import Frozen

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Parallel(Frozen):
    """How the work is spread. The product of the axes is the world size; `dp` is the outermost.

    `fsdp` is no axis of its own: the ranks of one stage, one in each replica, share out the parameters and compute in
    lockstep, each a sample of its own.
    """

    dp: int = Field(default=1, ge=1, description="replicas: split the samples")
    pp: int = Field(default=1, ge=1, description="stages: split the steps")
    fsdp: bool = Field(default=False, description="shard the parameters over the replicas' ranks of the same stage")

    @property
    def world_size(self) -> int:
        return self.dp * self.pp

    @property
    def shards(self) -> int:
        """Into how many parts the parameters are cut; 1 where every rank holds them whole."""
        return self.dp if self.fsdp else 1

    def coordinates(self, rank: int) -> tuple[int, int]:
        """(replica, stage) of a rank."""
        return divmod(rank, self.pp)

    def mesh(self, device_type: str) -> DeviceMesh:
        """The mesh of this layout, outermost axis first. Needs an initialised process group of `world_size` ranks."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(device_type, (self.dp, self.pp), mesh_dim_names=("dp", "pp"))

    def __str__(self) -> str:
        axes = [f"{name} {size}" for name, size in (("dp", self.dp), ("pp", self.pp)) if size > 1]
        return " × ".join(axes + ["fsdp"] * self.fsdp) if axes else "1 rank"
