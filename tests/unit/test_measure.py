"""Peak memory where PyTorch counts none: on MPS, faked as its allocator works."""

from __future__ import annotations

import pytest
import torch

from vdpp_core.engine.measure import MemoryMeter


class Pools:
    """Torch's allocator on MPS: what is freed stays in pools until they are emptied; the driver knows only these."""

    def __init__(self) -> None:
        self.used = self.given = 0

    def allocate(self, size: int) -> None:
        self.used += size
        self.given = max(self.given, self.used)

    def free(self, size: int) -> None:
        self.used -= size

    def empty_cache(self) -> None:
        self.given = self.used


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Pools:
    pools = Pools()
    told = {
        "driver_allocated_memory": lambda: pools.given,
        "current_allocated_memory": lambda: pools.used,
        "empty_cache": pools.empty_cache,
        "synchronize": lambda: None,
    }
    for name, function in told.items():
        monkeypatch.setattr(torch.mps, name, function)
    return pools


def test_on_mps_the_peak_is_the_gpus(pools: Pools) -> None:
    pools.allocate(100_000_000)  # of others
    meter = MemoryMeter(torch.device("mps"))
    pools.allocate(9_000_000_000)  # encoders
    pools.free(9_000_000_000)
    pools.allocate(3_000_000_000)  # the model
    meter.reset()
    assert meter.peak() == {"allocated_gb": 3.0, "driver_gb": 3.1}
    for _ in range(2):
        pools.allocate(2_000_000_000)  # activations
        pools.free(2_000_000_000)
    assert meter.peak() == {"allocated_gb": 5.0, "driver_gb": 5.1}
    meter.set_baseline()
    assert meter.peak()["allocated_gb"] == 0
