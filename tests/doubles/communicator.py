"""torch.distributed with NCCL's rules on gloo: whoever breaks one fails, and what all ranks did is kept to be compared.

Of one call: tensors are on the rank's device and contiguous; messages have no tag, an explicit peer and some content;
a rank alone communicates with nobody; a group has the default group's time limit. Of communicators (a group's own, or
one for each pair of ranks that send and receive): none is born while a message is outstanding, and a batch of messages
is no group's first operation. Between ranks (`checking.py`, afterwards): all members of a group did the same operations
on the same shapes and types in the same order, and what one sent is what the other expected.

Kept apart from the package, which does not know of it: `site/sitecustomize.py` installs it.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import uuid
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

DEVICE = "cpu"
COLLECTIVES = {  # name -> which of its arguments are tensors
    "broadcast": ("tensor",),
    "all_reduce": ("tensor",),
    "all_gather_single": ("output_tensor", "input_tensor"),
    "all_gather_into_tensor": ("output_tensor", "input_tensor"),
    "all_to_all_single": ("output", "input"),
    "barrier": (),
}
MESSAGES = ("send", "recv", "isend", "irecv")


class BrokenRuleError(AssertionError):
    """One of NCCL's rules was broken."""


class Communicators:
    """What this process does with its communicators."""

    def __init__(self, late: Any) -> None:
        self.late = late
        self.run = ""
        self.born: set[Hashable] = set()
        self.outstanding: list[Any] = []

    @functools.cached_property
    def log(self) -> int:
        """Opened by the first note: a rank may be a fork of the process that the doubles were installed in."""
        path = Path(os.environ["VDPP_DOUBLES_LOG"]) / f"{os.getpid()}.jsonl"
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, group: Any, **facts: Any) -> None:
        ranks = c10d._world.pg_group_ranks[group]
        where = {"run": self.run, "group": group.group_name, "size": len(ranks), "member": ranks[dist.get_rank()]}
        os.write(self.log, (json.dumps(where | facts) + "\n").encode())

    def insist(self, holds: bool, rule: str, group: Any, operation: str) -> None:
        if not holds:
            words = f"{operation} of rank {dist.get_rank()} in group {group.group_name}: {rule}"
            self.note(group, broken=words)
            raise BrokenRuleError(words)

    def begin(self, key: Hashable, group: Any, operation: str) -> None:
        """The first use of a communicator makes it, and waits for all of its members."""
        if key not in self.born:
            self.outstanding = [work for work in self.outstanding if not work.waited]
            self.insist(not self.outstanding, "a communicator is born while a message is outstanding", group, operation)
            self.born.add(key)

    def check(self, operation: str, group: Any, tensors: Sequence[Tensor]) -> None:
        self.insist(dist.get_world_size(group) > 1, "a rank alone communicates with nobody", group, operation)
        limits = [_limit(one) for one in (group, dist.group.WORLD)]
        self.insist(
            limits[0] == limits[1], f"its time limit is {limits[0]}, the run's is {limits[1]}", group, operation
        )
        for tensor in tensors:
            self.insist(tensor.device.type == DEVICE, f"a tensor is on {tensor.device}", group, operation)
            self.insist(tensor.is_contiguous(), "a tensor is not contiguous", group, operation)


def _limit(group: Any) -> Any:
    options = group._get_backend(torch.device(DEVICE)).options
    return options and options._timeout


class Watched:
    """A message under way, which knows whether somebody waited for it."""

    def __init__(self, work: Any) -> None:
        self.work, self.waited = work, False

    def wait(self, *arguments: Any) -> Any:
        self.waited = True
        return self.work.wait(*arguments)

    def is_completed(self) -> bool:
        return self.work.is_completed()


def _looks(tensor: Tensor) -> list[Any]:
    return [list(tensor.shape), str(tensor.dtype)]


def _collective(state: Communicators, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        group = given.get("group") or dist.group.WORLD
        tensors = [given[argument] for argument in COLLECTIVES[name]]
        state.check(name, group, tensors)
        state.begin(group.group_name, group, name)
        if name == "all_to_all_single":
            even = [len(tensors[0]) // dist.get_world_size(group)] * dist.get_world_size(group)
            sizes = [list(given.get(f"{side}_split_sizes") or even) for side in ("output", "input")]
            state.note(group, op=name, looks=str(tensors[0].dtype), coming=sizes[0], going=sizes[1])
        else:
            source = given.get("src"), given.get("group_src")
            state.note(group, op=name, looks=[_looks(tensor) for tensor in tensors], source=source)
        if state.late is not None:
            state.late.before_collective(group)
        return function(*args, **kwargs)

    return wrapped


def _message(state: Communicators, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    signature, sends = inspect.signature(function), name.endswith("send")
    ahead = name.startswith("i")

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        group, tensor = given.get("group") or dist.group.WORLD, given["tensor"]
        state.check(name, group, [tensor])
        state.insist(given.get("tag", 0) == 0, "NCCL ignores tags", group, name)
        state.insist(tensor.numel() > 0, "an empty message", group, name)
        side = "dst" if sends else "src"
        peer, globally = given.get(f"group_{side}"), given.get(side)
        state.insist(peer is not None or globally is not None, "the peer is not named", group, name)
        peer = dist.get_group_rank(group, globally) if peer is None else peer
        state.begin((group.group_name, peer), group, name)
        state.note(group, op="send" if sends else "recv", peer=peer, looks=_looks(tensor))
        if state.late is not None:
            work = Watched((state.late.isend if sends else state.late.irecv)(tensor, group, peer))
        else:
            work = Watched((group.send if sends else group.recv)([tensor], peer, 0))
        if not ahead:
            work.wait()
            return None if sends else peer
        state.outstanding = [each for each in state.outstanding if not each.waited]
        state.outstanding.append(work)
        return work

    return wrapped


def _batch(state: Communicators, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(operations: Sequence[Any]) -> Any:
        group = operations[0].group or dist.group.WORLD
        known = group.group_name in state.born
        state.insist(known, "a batch of messages is the first operation of a group", group, "batch_isend_irecv")
        return function(operations)

    return wrapped


def _init(state: Communicators, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)
        state.born.clear()
        state.outstanding.clear()
        store = c10d._get_default_store()
        if dist.get_rank() == 0:
            store.set("run of the doubles", uuid.uuid4().hex)
        state.run = store.get("run of the doubles").decode()
        eager = kwargs.get("device_id") is not None
        state.insist(not eager, "a device_id makes communicators eagerly", dist.group.WORLD, "init_process_group")

    return wrapped


installed: Communicators


def install(names: Sequence[str]) -> None:
    """Put the doubles in the place of torch.distributed's functions, for the rest of this process.

    Args:
        names: strict; late (and what is in `late.py`); one-queue and sync, with late.
    """
    late = None
    if "late" in names:
        late = sys.modules["late"].Late(one_queue="one-queue" in names)
        if "sync" in names:
            late.synchronise_at_random()
    global installed
    state = installed = Communicators(late)
    doubles = {name: _collective(state, name, getattr(dist, name)) for name in COLLECTIVES if hasattr(dist, name)}
    doubles |= {name: _message(state, name, getattr(dist, name)) for name in MESSAGES}
    doubles["batch_isend_irecv"] = _batch(state, dist.batch_isend_irecv)
    doubles["init_process_group"] = _init(state, dist.init_process_group)
    for name, double in doubles.items():
        for module in (dist, c10d):
            if hasattr(module, name):
                setattr(module, name, double)
