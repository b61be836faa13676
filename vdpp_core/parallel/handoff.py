"""The hand-off from stage to stage (P2P): buffers of bytes.

Sizes are fixed in advance and messages are matched by order, because NCCL ignores tags.
"""

from __future__ import annotations

import time
from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from vdpp_core.config.layout import IN_FLIGHT, Parallel
from vdpp_core.parallel.world import World, communication


class Handoff:
    """Both ends of a rank's stage: it receives from the stage before and sends to the stage after.

    Raises:
        LostRankError: in any method, if the neighbour is gone.
    """

    def __init__(self, world: World, layout: Parallel) -> None:
        self.group, self.device, self.layout = world.stages, world.device, layout
        _, self.stage, _, self.copy = world.place
        self.ranks = dist.get_process_group_ranks(self.group)
        self.expected: tuple[Tensor, dist.Work, int] | None = None
        self.sent: deque[tuple[Tensor, dist.Work, int]] = deque()

    def neighbours(self, stage: int) -> list[int]:
        """Indices in the group of those ranks of a neighbouring stage that this rank exchanges samples with."""
        copies = self.layout.partners(self.stage, self.copy, stage)
        return [self.layout.group(stage, copy) for copy in copies]

    def connect(self) -> None:
        """Exchange one value with each neighbour, so that communicators are set up before the clock starts."""
        hand = torch.zeros(1, device=self.device)
        for before in self.neighbours(self.stage - 1):
            with communication(self.ranks[before]):
                dist.recv(hand, group=self.group, group_src=before)
        for after in self.neighbours(self.stage + 1):
            with communication(self.ranks[after]):
                dist.send(hand, group=self.group, group_dst=after)

    def expect(self, size: int, turn: int) -> None:
        """Post the receive of the next sample's message, of `size` bytes.

        Args:
            turn: the sample's number among those of the replica, from 0: the copies of a stage take turns.
        """
        assert self.expected is None
        before = self.layout.group(self.stage - 1, turn)
        message = torch.empty(size, device=self.device, dtype=torch.uint8)
        with communication(self.ranks[before]):
            work = dist.irecv(message, group=self.group, group_src=before)
        assert work is not None
        self.expected = message, work, before

    def take(self) -> tuple[Tensor, float]:
        """Wait for the expected message; return it, and the seconds waited."""
        assert self.expected is not None
        message, work, before = self.expected
        self.expected = None
        began = time.perf_counter()
        with communication(self.ranks[before]):
            self._finish(work)
        return message, time.perf_counter() - began

    def pass_on(self, message: Tensor, turn: int) -> float:
        """Send a message without waiting, unless the next stage is too far behind; return the seconds waited.

        Args:
            turn: as of `expect`.
        """
        after, began = self.layout.group(self.stage + 1, turn), time.perf_counter()
        while len(self.sent) >= IN_FLIGHT:
            self._arrive()
        waited = time.perf_counter() - began
        with communication(self.ranks[after]):
            work = dist.isend(message, group=self.group, group_dst=after)
        assert work is not None
        self.sent.append((message, work, after))  # the memory must outlive the transfer
        return waited

    def close(self) -> None:
        """Wait until everything that was sent has arrived."""
        while self.sent:
            self._arrive()

    def _arrive(self) -> None:
        _, work, after = self.sent.popleft()
        with communication(self.ranks[after]):
            self._finish(work)

    def _finish(self, work: dist.Work) -> None:
        work.wait()
        if self.device.type == "cuda":  # there, wait() only orders the streams
            torch.cuda.current_stream(self.device).synchronize()
