"""torchrun for the ranks of one machine, out of reach of other machines.

    python -m vdpp_core.cli.local_torchrun --nproc_per_node=N -m …

torchrun's own store listens on every interface, whatever address it is given; only a socket that is already bound
prevents that. Users who call torchrun themselves, or need several machines, get torchrun's own rendezvous.
"""

from __future__ import annotations

import os
import socket
import sys

from torch.distributed import PrefixStore, TCPStore, run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

ADDRESS = "127.0.0.1"
BACKEND = "loopback"


class Loopback(RendezvousHandler):
    """The rendezvous of one agent with itself, and the store that its ranks share."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        listening = socket.create_server((ADDRESS, 0))
        self.port = listening.getsockname()[1]
        self.store = TCPStore(
            ADDRESS, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(PrefixStore(self.run_id, self.store), 0, 1, RendezvousStoreInfo(ADDRESS, self.port))

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self.run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return Loopback(parameters.run_id)


rendezvous_handler_registry.register(BACKEND, _create)


def main() -> None:
    """Start the ranks and wait for them; exits with 128 + its number after a signal, as Ctrl-C is."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would do the same, with six lines about it
    try:
        run.main([f"--rdzv-backend={BACKEND}", f"--rdzv-endpoint={ADDRESS}", *sys.argv[1:]])
    except SignalException as signalled:  # the ranks received it, too
        raise SystemExit(128 + signalled.sigval) from None


if __name__ == "__main__":
    main()
