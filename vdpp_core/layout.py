"""How the work is spread over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from vdpp_core.errors import Frozen

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Parallel(Frozen):
    """How the work is spread. The product of the axes is the world size; `dp` is the outermost."""

    dp: int = Field(default=1, ge=1, description="replicas: split the samples")
    pp: int = Field(default=1, ge=1, description="stages: split the steps")

    @property
    def world_size(self) -> int:
        return self.dp * self.pp

    def coordinates(self, rank: int) -> tuple[int, int]:
        """(replica, stage) of a rank."""
        return divmod(rank, self.pp)

    def mesh(self, device_type: str) -> DeviceMesh:
        """The mesh of this layout, outermost axis first. Needs an initialised process group of `world_size` ranks."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(device_type, (self.dp, self.pp), mesh_dim_names=("dp", "pp"))

    def __str__(self) -> str:
        axes = [f"{name} {size}" for name, size in (("dp", self.dp), ("pp", self.pp)) if size > 1]
        return " × ".join(axes) or "1 rank"
