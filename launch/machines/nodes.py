"""The machines of a run: as with torchrun, the user calls the same `launch start` or `resume` on each of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.parallel import rendezvous
from vdpp_core.predict import costs

MOST = 4096
MEETING_PATIENCE_S = 600.0  # for machines that are started by hand, one after another


@dataclass(frozen=True)
class Nodes:
    """The machines of a run; the same on each of them.

    Attributes:
        nnodes: number of machines.
        nproc: ranks on each machine.
        endpoint: host:port where they meet.
        run_id: the run's name.
    """

    nnodes: int
    nproc: int
    endpoint: str
    run_id: str

    @property
    def world_size(self) -> int:
        """Ranks on all machines together."""
        return self.nnodes * self.nproc

    def share_of(self, config: RunConfig) -> int:
        """The number of ranks of a run on each machine.

        Raises:
            ConfigError: this machine cannot take part, or the run was made for another number of ranks.
        """
        self.check()
        if self.world_size != config.layout.world_size:
            allowed = f"times {self.nnodes} (nnodes) must be the number of ranks of the run, {config.layout.world_size}"
            raise ConfigError("nproc", self.nproc, allowed)
        return self.nproc

    @property
    def place(self) -> tuple[str, int]:
        """Host and port of the endpoint.

        Raises:
            ConfigError: the endpoint is not host:port.
        """
        allowed = "must be host:port, the same on each machine"
        try:
            parts = urlsplit(f"//{self.endpoint}")
            if parts.hostname and parts.port and parts.netloc == self.endpoint and "@" not in self.endpoint:
                return parts.hostname, parts.port
        except ValueError:
            pass
        raise ConfigError("rdzv_endpoint", self.endpoint, allowed)

    @property
    def address(self) -> tuple[str, bool]:
        """This machine's address on the way to the endpoint, and whether the endpoint is this machine.

        Raises:
            ConfigError: this machine does not reach the endpoint, or other machines cannot.
        """
        host, port = self.place
        try:
            own, is_host = rendezvous.address_towards(host, port)
        except OSError as error:
            allowed = f"must be reachable from this machine ({error.strerror})"
            raise ConfigError("rdzv_endpoint", self.endpoint, allowed) from None
        if self.nnodes > 1 and rendezvous.is_loopback(own):
            allowed = f"must be an address that the other machines can reach; here it is {own}"
            raise ConfigError("rdzv_endpoint", self.endpoint, allowed)
        return own, is_host

    def check(self) -> None:
        """Check that this machine can take part.

        Raises:
            ConfigError: a number, the name or the endpoint is invalid.
        """
        for name, value in (("nnodes", self.nnodes), ("nproc", self.nproc)):
            if not 1 <= value <= MOST:
                raise ConfigError(name, value, f"must be a whole number from 1 to {MOST}")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", self.run_id):
            allowed = "must name the run, the same on each machine: letters, digits, dots, hyphens, underscores"
            raise ConfigError("rdzv_id", self.run_id, allowed)
        _ = self.address

    def rendezvous(self) -> dict[str, Any]:
        """The rendezvous arguments of torchrun's LaunchConfig."""
        own, is_host = self.address
        return {
            "min_nodes": self.nnodes,
            "max_nodes": self.nnodes,
            "nproc_per_node": self.nproc,
            "run_id": self.run_id,
            "rdzv_backend": "c10d",
            "rdzv_endpoint": self.endpoint,
            "rdzv_configs": {"is_host": is_host},
            "local_addr": own,
        }

    def as_flags(self) -> list[str]:
        """The flags of `python -m launch` that describe these machines."""
        return [
            *("--nnodes", str(self.nnodes), "--nproc", str(self.nproc)),
            *("--rdzv-endpoint", self.endpoint, "--rdzv-id", self.run_id),
        ]

    def crossings(self, config: RunConfig) -> list[str]:
        """Warnings about lockstep groups and sharded UNets whose ranks are on several machines, with the cost.

        Ranks are numbered machine by machine, and a lockstep group has consecutive ranks. So groups whose size divides
        the ranks per machine stay on one machine.
        """
        layout, found = config.layout, []
        together = 1
        for axis, size in reversed(layout.lockstep_sizes.items()):  # innermost first
            together *= size
            if self.nproc % together:
                cost = costs.cost(config)
                found.append(
                    f"{axis} {size} crosses machines: {cost.exchanges} exchanges per step, with "
                    f"{sum(cost.sent.values()) / 1e6:.3g} MB from each rank, go over the network; "
                    f"an --nproc divisible by {layout.lockstep} avoids this"
                )
                break
        stage = {layout.rank(replica, 0, member) for replica in range(layout.dp) for member in range(layout.lockstep)}
        if layout.shards > 1 and len({rank // self.nproc for rank in stage}) > 1:
            gathered = costs.gathering(config)[0]
            found.append(f"fsdp crosses machines: each rank gathers {gathered / 1e9:.3g} GB of parameters per step")
        return found
