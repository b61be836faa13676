"""The hand-off from stage to stage (P2P): buffers of bytes.

Sizes are fixed in advance and messages are matched by order, because NCCL ignores tags.
"""

from __future__ import annotations

import time
from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from vdpp_core.config.layout import IN_FLIGHT
from vdpp_core.parallel.world import World, communication


class Handoff:
    """Both ends of one stage: it receives from the stage before and sends to the stage after.

    Raises:
        LostRankError: in any method, if the neighbour is gone.
    """

    def __init__(self, world: World) -> None:
        self.group, self.device = world.stages, world.device
        stage, stages = world.place.stage, dist.get_world_size(self.group)
        self.before = stage - 1 if stage > 0 else None
        self.after = stage + 1 if stage + 1 < stages else None
        self.ranks = [dist.get_global_rank(self.group, stage) for stage in range(stages)]
        self.expected: tuple[Tensor, dist.Work] | None = None
        self.sent: deque[tuple[Tensor, dist.Work]] = deque()

    def connect(self) -> None:
        """Exchange one value with each neighbour, so that communicators are set up before the clock starts."""
        hand = torch.zeros(1, device=self.device)
        if self.before is not None:
            with communication(self.ranks[self.before]):
                dist.recv(hand, group=self.group, group_src=self.before)
        if self.after is not None:
            with communication(self.ranks[self.after]):
                dist.send(hand, group=self.group, group_dst=self.after)

    def expect(self, size: int) -> None:
        """Post the receive of the next sample's message, of `size` bytes."""
        assert self.before is not None
        assert self.expected is None
        message = torch.empty(size, device=self.device, dtype=torch.uint8)
        with communication(self.ranks[self.before]):
            work = dist.irecv(message, group=self.group, group_src=self.before)
        assert work is not None
        self.expected = message, work

    def take(self) -> tuple[Tensor, float]:
        """Wait for the expected message; return it, and the seconds waited."""
        assert self.before is not None
        assert self.expected is not None
        message, work = self.expected
        self.expected = None
        began = time.perf_counter()
        with communication(self.ranks[self.before]):
            self._finish(work)
        return message, time.perf_counter() - began

    def pass_on(self, message: Tensor) -> float:
        """Send a message without waiting, unless the next stage is too far behind; return the seconds waited."""
        assert self.after is not None
        began = time.perf_counter()
        with communication(self.ranks[self.after]):
            while len(self.sent) >= IN_FLIGHT:
                self._finish(self.sent.popleft()[1])
            waited = time.perf_counter() - began
            work = dist.isend(message, group=self.group, group_dst=self.after)
        assert work is not None
        self.sent.append((message, work))  # the memory must outlive the transfer
        return waited

    def close(self) -> None:
        """Wait until everything that was sent has arrived."""
        while self.sent:
            with communication(self.ranks[self.after or 0]):
                self._finish(self.sent.popleft()[1])

    def _finish(self, work: dist.Work) -> None:
        work.wait()
        if self.device.type == "cuda":  # there, wait() only orders the streams
            torch.cuda.current_stream(self.device).synchronize()
