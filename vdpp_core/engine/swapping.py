"""One expert at a time on a device too small for all: the next one is loaded when its steps begin."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from vdpp_core import models
from vdpp_core.config import RunConfig
from vdpp_core.models.stage import Stage
from vdpp_core.parallel import fsdp
from vdpp_core.runs.events import EventLog


class Swap:
    """Loads a run's experts into its pipeline, one in the place of the other: from disk, as a user would who frees one
    and loads the next, or from copies in host memory.

    Args:
        stage: around no experts yet.
        load: loads experts: device, only=[names] -> name -> module.
        skeleton: makes them on the meta device: [names] -> the same.
        prepare: called with each expert that was loaded.

    Attributes:
        resident: name -> the expert on the device.
    """

    def __init__(
        self,
        config: RunConfig,
        stage: Stage,
        device: torch.device,
        log: EventLog,
        load: Callable[..., nn.ModuleDict],
        skeleton: Callable[[Sequence[str]], nn.ModuleDict],
        prepare: Callable[[nn.Module], None],
    ) -> None:
        self.config, self.stage, self.log, self.prepare = config, stage, log, prepare
        self.resident: dict[str, nn.Module] = {}
        self.device, self.load, self.skeleton = device, load, skeleton
        names = models.denoisers(config) if config.swap == "host" else ()
        self.kept = {name: _pinned(self._loaded(name, torch.device("cpu")), device) for name in names}

    def use(self, name: str) -> None:
        """Have an expert on the device, and no other."""
        if name in self.resident:
            return
        self.log.write("swap", expert=name)
        began = time.perf_counter()
        for module in self.resident.values():
            fsdp.release(module)
        self.resident.clear()
        module = self._from_host(name) if self.kept else self._loaded(name, self.device)
        size = sum(parameter.nbytes for parameter in module.parameters())
        if self.config.swap_gb_per_s is not None:
            time.sleep(max(0.0, size / self.config.swap_gb_per_s / 1e9 - (time.perf_counter() - began)))
        self.resident[name] = module
        self.stage.official.replace(name, module)
        self.log.write("swapped", expert=name, seconds=time.perf_counter() - began, size=size)
        self.prepare(module)

    def _from_host(self, name: str) -> nn.Module:
        """A copy on the device of an expert in host memory."""
        module = self.skeleton([name])[name]
        state = {key: value.to(self.device, non_blocking=True) for key, value in self.kept[name].items()}
        module.load_state_dict(state, assign=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return module.to(self.device)

    def _loaded(self, name: str, device: torch.device) -> nn.Module:
        return self.load(device=device, only=[name])[name]


def _pinned(module: nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """A module's tensors in host memory, from which a GPU can copy them by itself."""
    state = module.state_dict()
    return {name: value.pin_memory() for name, value in state.items()} if device.type == "cuda" else state
