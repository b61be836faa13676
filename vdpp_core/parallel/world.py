"""This process among the ranks: its device, its process groups, and the settings of the process while a run lasts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vdpp_core.config.axes import LOCKSTEP_NAMES
from vdpp_core.config.execution import Execution
from vdpp_core.config.layout import Parallel, Place
from vdpp_core.parallel import rendezvous
from vdpp_core.parallel.devices import is_out_of_memory
from vdpp_core.parallel.process_groups import merged, mesh_of
from vdpp_core.parallel.rendezvous import PATIENCE, Ranks

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class LostRankError(RuntimeError):
    """Communication failed because another rank is gone. Always a consequence, never the first cause."""

    def __init__(self, rank: int | str, reason: str) -> None:
        self.rank = rank
        super().__init__(f"lost rank {rank}: {reason}")


@dataclass(frozen=True)
class World:
    """This rank's place, its device, and the groups it communicates with.

    Attributes:
        stages: the ranks of its replica with its member index, stage by stage and copy by copy; it receives from some
            and hands on to others.
        team: all ranks of its replica, that is, the lockstep groups of all stages.
        shards: the ranks it shares parameters with; None without sharding.
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
        """Whether this rank writes for its lockstep group what all its members know."""
        return self.place.member == 0

    def barrier(self) -> None:
        """Wait for all ranks. A rank alone returns at once.

        Raises:
            LostRankError: another rank is gone.
        """
        if self.world_size > 1:
            with communication():  # without device_ids, NCCL uses the GPU whose index is the rank
                dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def share(self, tensor: Tensor, source: int) -> None:
        """Broadcast a tensor in place from member `source` of the team to all of it. A team of one does nothing.

        Raises:
            LostRankError: another rank is gone.
        """
        if dist.get_world_size(self.team) > 1:
            with communication(dist.get_global_rank(self.team, source)):
                dist.broadcast(tensor, group=self.team, group_src=source)

    def share_object(self, made: Any, source: int) -> Any:
        """Give all of the team what member `source` made, whose tensors must be on the CPU.

        Raises:
            LostRankError: another rank is gone.
        """
        shared = [made]
        if dist.get_world_size(self.team) > 1:
            with communication(dist.get_global_rank(self.team, source)):
                dist.broadcast_object_list(shared, group=self.team, group_src=source, device=self.device)
        return shared[0]


@contextmanager
def communication(peer: int | str = "unknown") -> Iterator[None]:
    """Report failures inside as a lost rank, `peer` where it is known.

    Two kinds of failure are this rank's own and pass through: a lack of memory, and an earlier error of its accelerator
    that only shows at a later synchronisation.

    Raises:
        LostRankError: anything else went wrong.
    """
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


@contextmanager
def _settings(execution: Execution, ranks: Ranks) -> Iterator[None]:
    """Set threads, precision and network interface of the process, and restore them at the end.

    A single rank may run inside a notebook, whose child processes would inherit them. TF32 is off in fp32: convolutions
    on CUDA use it by default, with errors of 1e-3 instead of 1e-5. An interface that the user named is kept.
    """
    switches: tuple[Any, ...] = torch.backends.cudnn, torch.backends.cuda.matmul
    interface = rendezvous.interface(ranks)
    with ExitStack() as restore:
        restore.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(execution.threads)
        for switch in switches if execution.dtype == torch.float32 else ():
            restore.callback(setattr, switch, "allow_tf32", switch.allow_tf32)
            switch.allow_tf32 = False
        for name, value in zip(_INTERFACES, (interface, f"={interface}"), strict=True):
            if interface is not None and name not in os.environ:
                restore.callback(os.environ.pop, name, None)
                os.environ[name] = str(value)
        yield


def shards_of(layout: Parallel, mesh: DeviceMesh) -> DeviceMesh | None:
    """The ranks of this rank's stage that share its parameters; None without sharding. All ranks have to call it.

    Along tp, the innermost axis, each rank holds another piece.
    """
    if layout.shards == 1:
        return None
    stages = [layout.ranks_of(stage)[piece :: layout.tp] for stage in range(layout.pp) for piece in range(layout.tp)]
    own = mesh_of(stages, mesh.device_type, "shards")
    return own if own.size() > 1 else None


@contextmanager
def joined(layout: Parallel, execution: Execution, ranks: Ranks, name: str) -> Iterator[World]:
    """Join the ranks of a run, and leave them at the end. `name` keeps runs apart that follow on the same ranks."""
    device = device_of(execution, ranks.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.PrefixStore(name, rendezvous.store(ranks))
    try:
        with _settings(execution, ranks):
            # No `device_id`: NCCL would then open one communicator for all messages of a rank, in which a latent for
            # the next stage waits behind the receive that was posted ahead.
            dist.init_process_group(
                execution.backend, store=store, rank=ranks.rank, world_size=ranks.world_size, timeout=PATIENCE
            )
            mesh = layout.mesh("cuda" if device.type == "cuda" else "cpu")
            team = merged(mesh, "pp", *LOCKSTEP_NAMES).get_group()
            place, shards = layout.place(ranks.rank), shards_of(layout, mesh)
            yield World(ranks.rank, ranks.world_size, place, device, mesh, mesh.get_group("pp"), team, shards)
            dist.destroy_process_group()
    except BaseException:
        if not ranks.under_torchrun and dist.is_initialized():  # under torchrun the process ends, without waiting
            dist.destroy_process_group()
        raise
