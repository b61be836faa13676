"""This process among the ranks: process group, device, threads. The only place that acts on torchrun's variables."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vdpp_core.config.axes import LOCKSTEP_NAMES
from vdpp_core.config.execution import Execution
from vdpp_core.config.layout import Parallel, Place
from vdpp_core.parallel import rendezvous
from vdpp_core.parallel.devices import is_out_of_memory
from vdpp_core.parallel.process_groups import merged
from vdpp_core.parallel.rendezvous import PATIENCE, Ranks, _store

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class LostRankError(RuntimeError):
    """Communication failed: another rank is gone. A consequence, never the first cause."""

    def __init__(self, rank: int | str, reason: str) -> None:
        self.rank = rank
        super().__init__(f"lost rank {rank}: {reason}")


@dataclass(frozen=True)
class World:
    """This rank's place: its device, and the ranks that it has to do with.

    stages: those of its replica with its number in their lockstep groups; it takes from one and hands on to another.
    team: all of its replica, the lockstep groups of all stages.
    shards: those that it shares parameters with, if any.
    """

    rank: int
    world_size: int
    place: Place
    device: torch.device
    mesh: DeviceMesh
    stages: dist.ProcessGroup
    team: dist.ProcessGroup
    shards: DeviceMesh | None

    @property
    def speaks(self) -> bool:
        """Whether it writes for its lockstep group what all of that know."""
        return self.place.member == 0

    def barrier(self) -> None:
        """All ranks meet, each on its own device: without its number, NCCL takes that of the rank."""
        if self.world_size > 1:
            with communication():
                dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def share(self, tensor: Tensor, source: int) -> None:
        """Give a tensor of number `source` of the team to all of it, in place. A team of one shares nothing."""
        if dist.get_world_size(self.team) > 1:
            with communication(dist.get_global_rank(self.team, source)):
                dist.broadcast(tensor, group=self.team, group_src=source)


@contextmanager
def communication(peer: int | str = "unknown") -> Iterator[None]:
    """Failures in here are those of a lost rank, `peer` where it is known. A lack of memory is this rank's own, and so
    is what its accelerator did wrong before, which it says only when it is waited for."""
    try:
        yield
    except torch.AcceleratorError:
        raise
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise LostRankError(peer, (str(error).splitlines() or [type(error).__name__])[0]) from error


def device_of(execution: Execution, local_rank: int) -> torch.device:
    """The device of a local rank; on CUDA one GPU each."""
    if execution.device_type == "cuda":
        return torch.device("cuda", execution.cards[local_rank])
    return torch.device(execution.device_type)


def _name_interface() -> None:
    """Have gloo and NCCL take the network interface towards the other machines, unless somebody named another one.

    By itself gloo looks up this machine's name, which many a machine resolves to its loopback address.
    """
    address, _ = rendezvous.address_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    interface = None if rendezvous.is_loopback(address) else rendezvous.interface_of(address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def _stay_inside() -> None:
    """Have gloo and NCCL take the interface that no other machine reaches, unless somebody named another one.

    By themselves gloo listens where the machine's name leads, NCCL on all interfaces but this one.
    """
    interfaces = psutil.net_if_addrs().items()
    loopback = next(name for name, addresses in interfaces if any(each.address == "127.0.0.1" for each in addresses))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={loopback}")


@contextmanager
def _full_precision(dtype: torch.dtype) -> Iterator[None]:
    """No TF32 in a run in fp32: convolutions on CUDA take it by default, which is 1e-3 off and not 1e-5."""
    switches: tuple[Any, ...] = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [switch.allow_tf32 for switch in switches]
    if dtype == torch.float32:
        for switch in switches:
            switch.allow_tf32 = False
    try:
        yield
    finally:
        for switch, allowed in zip(switches, before, strict=True):
            switch.allow_tf32 = allowed


@contextmanager
def _settings(execution: Execution, ranks: Ranks) -> Iterator[None]:
    """Set network interfaces, precision and threads for the process of a run, and restore them at the end.

    A single rank may run inside a notebook, whose child processes would inherit them.
    """
    interfaces_before = {name: os.environ.get(name) for name in _INTERFACES}
    threads_before = torch.get_num_threads()
    torch.set_num_threads(execution.threads)
    (_name_interface if ranks.several_machines else _stay_inside)()
    try:
        with _full_precision(execution.dtype):
            yield
    finally:
        torch.set_num_threads(threads_before)
        for variable, value in interfaces_before.items():
            os.environ.pop(variable, None)
            if value is not None:
                os.environ[variable] = value


@contextmanager
def joined(layout: Parallel, execution: Execution, ranks: Ranks, name: str) -> Iterator[World]:
    """Join the ranks of a run and leave them at the end. One rank without torchrun makes a group of its own.

    No `device_id` for the group: NCCL would then open one communicator for all of a rank's messages, where a latent to
    the next stage waits behind the receive that is posted ahead.
    """
    device = device_of(execution, ranks.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.PrefixStore(name, _store(ranks))
    try:
        with _settings(execution, ranks):
            dist.init_process_group(
                execution.backend, store=store, rank=ranks.rank, world_size=ranks.world_size, timeout=PATIENCE
            )
            mesh = layout.mesh("cuda" if device.type == "cuda" else "cpu")
            yield World(
                ranks.rank,
                ranks.world_size,
                layout.place(ranks.rank),
                device,
                mesh,
                stages=mesh.get_group("pp"),
                team=merged(mesh, "pp", *LOCKSTEP_NAMES).get_group(),
                shards=merged(mesh, "dp", *LOCKSTEP_NAMES) if layout.shards > 1 else None,
            )
            dist.destroy_process_group()
    except BaseException:
        if not ranks.under_torchrun and dist.is_initialized():  # under torchrun the process ends, without waiting
            dist.destroy_process_group()
        raise
