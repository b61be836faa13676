"""How ranks find each other before any process group exists. The only place that reads torchrun's variables."""

from __future__ import annotations

import functools
import ipaddress
import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from vdpp_core.config.errors import ConfigError

# Time limit of every group and of the store: waiting for a slow stage is normal and may take hours. A run that hangs is
# ended by the ranks' monitors (vdpp_core/engine/rank_monitor.py).
PATIENCE = timedelta(days=7)
# The store is there before any rank starts; if it is not, its launcher was killed. By default a rank would try for half
# an hour.
TO_CONNECT = timedelta(seconds=60)


@dataclass(frozen=True)
class Ranks:
    """Which rank this process is, known before any group exists. Rank 0 of 1 without torchrun."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    under_torchrun: bool

    @property
    def several_machines(self) -> bool:
        """Whether the ranks are on several machines, with equally many on each."""
        return self.world_size > self.local_world_size

    @classmethod
    def from_environment(cls) -> Ranks:
        """Read torchrun's variables."""

        def number(name: str, alone: int) -> int:
            return int(os.environ.get(name, alone))

        sizes = number("RANK", 0), number("WORLD_SIZE", 1), number("LOCAL_RANK", 0), number("LOCAL_WORLD_SIZE", 1)
        return cls(*sizes, under_torchrun="RANK" in os.environ and "WORLD_SIZE" in os.environ)


@functools.cache
def store(ranks: Ranks) -> dist.Store:
    """torchrun's key-value store; a private one without torchrun."""
    if not ranks.under_torchrun:
        return dist.HashStore()
    shared = next(rendezvous("env://", timeout=TO_CONNECT))[0]
    shared.set_timeout(PATIENCE)
    return shared


def agree(ranks: Ranks, decide: Callable[[], str], subject: str = "run folder") -> str:
    """Have rank 0 decide, and tell all ranks its decision on the subject.

    Raises:
        ConfigError: on every rank, if rank 0's decision raised one.
    """
    if not ranks.under_torchrun:
        return decide()
    shared = store(ranks)
    if ranks.rank == 0:
        try:
            shared.set(subject, json.dumps({"decided": decide()}))
        except ConfigError as error:
            shared.set(subject, json.dumps({"error": [error.argument, str(error.value), error.allowed]}))
            raise
    answer = json.loads(shared.get(subject))
    if "error" in answer:
        raise ConfigError(*answer["error"])
    return answer["decided"]


def address_towards(host: str, port: int) -> tuple[str, bool]:
    """This machine's address on the way to a host, and whether this machine is that host.

    Raises:
        OSError: the host is unknown or cannot be reached.
    """
    family, kind, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as datagrams:
        datagrams.connect(place)
        own = str(datagrams.getsockname()[0])
    return own, own == place[0]


def is_loopback(address: str) -> bool:
    """Whether no other machine can reach this address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface(ranks: Ranks) -> str | None:
    """The network interface that gloo and NCCL should use, or None to leave the choice to them.

    Between machines that is the one on the way to the others: gloo alone looks up this machine's name, which often
    resolves to loopback. On one machine it is loopback, which no other machine reaches: alone, gloo listens where the
    machine's name leads, and NCCL on all interfaces but loopback.
    """
    address = "127.0.0.1"
    if ranks.several_machines:
        address, _ = address_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        if is_loopback(address):
            return None
    found = psutil.net_if_addrs().items()
    return next((name for name, addresses in found if any(each.address == address for each in addresses)), None)
