"""What a run's process groups, and the process around them, are set to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from vdpp_core import Parallel, RunConfig
from vdpp_core.config.axes import LOCKSTEP_NAMES
from vdpp_core.config.execution import resolve
from vdpp_core.engine import worker
from vdpp_core.parallel import rendezvous
from vdpp_core.parallel import world as world_module
from vdpp_core.parallel.process_groups import merged, time_limit
from vdpp_core.parallel.rendezvous import PATIENCE, Ranks
from vdpp_core.parallel.world import World, joined

ALONE = Ranks(0, 1, 0, 1, under_torchrun=False)
CONFIG = RunConfig(device="cpu", threads=1)
CALLS = (
    "barrier",
    "broadcast",
    "all_reduce",
    "all_gather_single",
    "all_to_all_single",
    "send",
    "recv",
    "isend",
    "irecv",
)


@pytest.fixture
def world() -> Iterator[World]:
    with joined(Parallel(), resolve(CONFIG), ALONE, "test") as joined_world:
        yield joined_world


def test_a_rank_alone_communicates_with_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo has no kernels for MPS, where a rank is always alone."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("No backend type associated with device type mps")

    for name in CALLS:
        monkeypatch.setattr(dist, name, refuse)
    small = {"total_steps": 2, "num_frames": 2, "num_samples": 2, "threads": 1, "device": "cpu"}
    worker.run(RunConfig(command="generate", output_dir=tmp_path / "run", **small))


def test_the_groups_and_the_store_have_the_patience_of_the_run(world: World) -> None:
    assert timedelta(hours=1) < PATIENCE
    assert {time_limit(group) for group in c10d._world.pg_map} == {PATIENCE}


def test_torchruns_store_has_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    facts = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.port, "RANK": 1, "WORLD_SIZE": 2}
    for name, value in (facts | {"TORCHELASTIC_USE_AGENT_STORE": True}).items():
        monkeypatch.setenv(name, str(value))
    assert rendezvous.store(Ranks(1, 2, 1, 2, under_torchrun=True)).timeout == PATIENCE


@pytest.mark.parametrize("minutes", [3, 3000])
def test_groups_have_the_default_groups_time_limit(minutes: int) -> None:
    """Those that a mesh makes, and merged ones: PyTorch's own would have 30 minutes, or 10."""
    limit = timedelta(minutes=minutes)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=limit)
    try:
        made = Parallel().mesh("cpu")
        own = [made.get_group(axis) for axis in made.mesh_dim_names or ()]
        assert {time_limit(group) for group in [*own, merged(made, "dp", *LOCKSTEP_NAMES).get_group()]} == {limit}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("device", "named"), [("cuda:0", [0]), ("cuda:1", [1]), ("cuda:5", [5]), ("cpu", None), ("meta", None)]
)
def test_a_barrier_names_its_device(
    device: str, named: list[int] | None, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(dist, "barrier", lambda **given: seen.append(given["device_ids"]))
    replace(world, device=torch.device(device), world_size=2).barrier()
    assert seen == [named]


@pytest.fixture
def tf32() -> Iterator[tuple[Any, ...]]:
    """The switches of TF32, on."""
    switches: tuple[Any, ...] = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [switch.allow_tf32 for switch in switches]
    for switch in switches:
        switch.allow_tf32 = True
    yield switches
    for switch, allowed in zip(switches, before, strict=True):
        switch.allow_tf32 = allowed


@pytest.mark.parametrize(("dtype", "allowed"), [("fp32", False), ("bf16", True)])
def test_no_tf32_in_fp32_runs_and_the_callers_setting_afterwards(dtype: str, allowed: bool, tf32: Any) -> None:
    with joined(Parallel(), resolve(CONFIG.replace(dtype=dtype)), ALONE, "test"):
        assert [switch.allow_tf32 for switch in tf32] == [allowed] * 2
    assert [switch.allow_tf32 for switch in tf32] == [True] * 2


def test_on_one_machine_gloo_and_nccl_stay_on_the_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in world_module._INTERFACES:
        monkeypatch.delenv(name, raising=False)
    with joined(Parallel(), resolve(CONFIG), ALONE, "test"):
        gloo, nccl = (os.environ[name] for name in world_module._INTERFACES)
        assert "127.0.0.1" in {each.address for each in psutil.net_if_addrs()[gloo]}
        assert nccl == f"={gloo}"  # the one of exactly that name
    assert not set(world_module._INTERFACES) & set(os.environ)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    with joined(Parallel(), resolve(CONFIG), ALONE, "test"):
        assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"
