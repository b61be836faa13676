"""The group that talks: collectives of torch.distributed, shapes known beforehand, nothing negotiated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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

    def _swap_edges(
        self, first: Tensor, last: Tensor, before: Tensor | None, after: Tensor | None
    ) -> Callable[[], None]:
        wishes = [
            dist.P2POp(action, tensor, group=self.group, group_peer=self.rank + side)
            for side, sending, coming in ((-1, first, before), (1, last, after))
            if coming is not None
            for action, tensor in ((dist.isend, sending), (dist.irecv, coming))
        ]
        with communication():
            works = dist.batch_isend_irecv(wishes) if wishes else []

        def wait() -> None:
            with communication():
                for work in works:
                    work.wait()
            wishes.clear()  # until now it kept what was being sent

        return wait
