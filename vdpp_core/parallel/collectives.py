"""The group that talks: collectives of torch.distributed, shapes known beforehand, nothing negotiated."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from vdpp_core.mesh import communication
from vdpp_core.parallel.fsdp import gather
from vdpp_core.parallel.group import Group


class Collectives(Group):
    """Failures in here are those of a lost rank (`vdpp_core.mesh.LostRankError`)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(dist.get_world_size(group), dist.get_rank(group))
        self.group = group

    def _all_gather(self, gathered: Tensor, own: Tensor) -> None:
        with communication():
            gather(gathered.flatten(0, 1), own, group=self.group)  # gloo wants them side by side

    def _all_to_all(self, arrived: Tensor, pieces: Tensor, coming: Sequence[int], sizes: Sequence[int]) -> None:
        with communication():
            dist.all_to_all_single(arrived, pieces, list(coming), list(sizes), group=self.group)
