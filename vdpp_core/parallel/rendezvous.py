"""How ranks find each other before any process group exists. The only place that reads torchrun's variables."""

from __future__ import annotations

import functools
import ipaddress
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import psutil
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from vdpp_core.config.errors import ConfigError

# Of every group and the store: waiting for a slow stage is normal and may take hours. What ends a run that hangs is the
# guard (vdpp_core/engine/monitor.py).
PATIENCE = timedelta(days=7)


_POLL_S = 0.05  # of those who wait for the work of a few


T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """Which rank this process is, before any group exists. Alone without torchrun."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    under_torchrun: bool

    @property
    def several_machines(self) -> bool:
        """Whether there are ranks on other machines; each machine has as many."""
        return self.world_size > self.local_world_size

    @classmethod
    def from_environment(cls) -> Ranks:
        def number(name: str, alone: int) -> int:
            return int(os.environ.get(name, alone))

        sizes = number("RANK", 0), number("WORLD_SIZE", 1), number("LOCAL_RANK", 0), number("LOCAL_WORLD_SIZE", 1)
        return cls(*sizes, under_torchrun="RANK" in os.environ and "WORLD_SIZE" in os.environ)


def agree(ranks: Ranks, decide: Callable[[], str], subject: str = "run folder") -> str:
    """What rank 0 decides, known to all ranks before any process group exists.

    Raises:
        ConfigError: on every rank, if rank 0's decision raised one.
    """
    if not ranks.under_torchrun:
        return decide()
    store = _store(ranks)
    if ranks.rank == 0:
        try:
            store.set(subject, json.dumps({"decided": decide()}))
        except ConfigError as error:
            store.set(subject, json.dumps({"error": [error.argument, str(error.value), error.allowed]}))
            raise
    answer = json.loads(store.get(subject))
    if "error" in answer:
        raise ConfigError(*answer["error"])
    return answer["decided"]


def first_ones(ranks: Ranks, number: int, subject: str, work: Callable[[Ranks], T]) -> T | None:
    """Have the first `number` ranks work as a world of their own; the others sleep until rank 0 is done.

    Unlike a barrier this needs no process group, so that the work may make one, and no core of those who wait.

    Returns:
        What the work gave this rank; None to a rank that had none.
    """
    store, given = _store(ranks), None
    if ranks.rank < number:
        some = replace(ranks, world_size=number, local_world_size=min(number, ranks.local_world_size))
        given = work(some)
    if ranks.rank == 0:
        store.set(subject, "done")
    while not store.check([subject]):
        time.sleep(_POLL_S)
    return given


@functools.cache
def _store(ranks: Ranks) -> dist.Store:
    """torchrun's store; a private one for a rank alone."""
    if not ranks.under_torchrun:
        return dist.HashStore()
    store = next(rendezvous("env://"))[0]
    store.set_timeout(PATIENCE)
    return store


def address_towards(host: str, port: int) -> tuple[str, bool]:
    """This machine's address on the way to a host, and whether this machine is that host.

    Raises:
        OSError: there is no such host, or no way to it.
    """
    family, kind, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as datagrams:
        datagrams.connect(place)
        own = str(datagrams.getsockname()[0])
    return own, own == place[0]


def is_loopback(address: str) -> bool:
    """Whether no other machine reaches this address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_of(address: str) -> str | None:
    """The name of this machine's network interface with that address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    return None
