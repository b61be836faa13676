"""Point-to-point messages as NCCL's: a send completes only against a posted receive, a receive's buffer means nothing
before its `wait`, and messages of one communicator queue up behind each other.

On gloo as it is, a send completes as soon as the system has taken it, data may lie in a buffer before anybody waits,
and nothing waits for anything else; a program can rely on any of that without its author's knowledge.
"""

from __future__ import annotations

import functools
import os
import random
import threading
from collections.abc import Callable, Hashable
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

POSTED = 1  # gloo's tag for the word of a receiver that its buffer is there
OFTEN = 0.05  # of the calls of modules are preceded by a synchronisation of the device


class LateWork:
    """What `isend` and `irecv` return."""

    def __init__(self, act: Callable[[], None], finish: Callable[[], Any]) -> None:
        self.act, self.finish = act, finish
        self.done = threading.Event()
        self.error: RuntimeError | None = None

    def wait(self, timeout: Any = None) -> bool:
        """Until the message has arrived; then, and not before, it is in the receiver's tensor."""
        self.done.wait()
        if self.error is not None:
            raise self.error
        self.finish()
        self.finish = lambda: None
        return True

    def is_completed(self) -> bool:
        return self.done.is_set()


class Queue(threading.Thread):
    """One communicator's stream: what is enqueued happens in that order, each after the one before is complete."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.works: SimpleQueue[LateWork] = SimpleQueue()
        self.last: LateWork | None = None
        self.start()

    def enqueue(self, work: LateWork) -> LateWork:
        self.last = work
        self.works.put(work)
        return work

    def run(self) -> None:
        while True:
            work = self.works.get()
            try:
                work.act()
            except RuntimeError as error:  # the peer is gone: whoever waits is told
                work.error = error
            work.done.set()

    def drain(self) -> None:
        if self.last is not None:
            self.last.done.wait()


class Late:
    """Send and receive on gloo's own, late.

    Args:
        one_queue: all messages of a group in one queue, as with communicators that NCCL makes eagerly; else one for
            each pair of ranks.
    """

    def __init__(self, one_queue: bool) -> None:
        self.one_queue = one_queue
        self.queues: dict[Hashable, Queue] = {}

    def _queue(self, group: Any, peer: int) -> Queue:
        name = group.group_name if self.one_queue else (group.group_name, peer)
        if name not in self.queues:
            self.queues[name] = Queue()
        return self.queues[name]

    def isend(self, tensor: Tensor, group: Any, peer: int) -> LateWork:
        """The tensor is read when its receiver is there."""

        def act() -> None:
            group.recv([torch.zeros(1)], peer, POSTED).wait()
            group.send([tensor], peer, 0).wait()

        return self._queue(group, peer).enqueue(LateWork(act, lambda: None))

    def irecv(self, tensor: Tensor, group: Any, peer: int) -> LateWork:
        """The tensor holds nothing of use until somebody has waited."""
        arrived = torch.empty_like(tensor)
        tensor.fill_(float("nan") if tensor.is_floating_point() else 99)

        def act() -> None:
            group.send([torch.zeros(1)], peer, POSTED).wait()
            group.recv([arrived], peer, 0).wait()

        return self._queue(group, peer).enqueue(LateWork(act, lambda: tensor.copy_(arrived)))

    def before_collective(self, group: Any) -> None:
        """A collective comes behind the messages of its communicator."""
        if self.one_queue and group.group_name in self.queues:
            self.queues[group.group_name].drain()

    def synchronise(self) -> None:
        """Wait for all that is enqueued, as cudaFree does, also for a receive that is posted ahead."""
        for queue in list(self.queues.values()):
            queue.drain()

    def synchronise_at_random(self) -> None:
        """From now on before calls of modules, here and there; on each rank elsewhere."""

        @functools.cache
        def chance() -> random.Random:  # made by the first call: a rank may be a fork
            return random.Random(os.environ.get("RANK"))

        def hook(*_: Any) -> None:
            if chance().random() < OFTEN:
                self.synchronise()

        torch.nn.modules.module.register_module_forward_pre_hook(hook)
