"""The UNet's memory is given back before videos are decoded: by reference count, without the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from vdpp_core import Parallel, RunConfig, models
from vdpp_core.engine import worker
from vdpp_core.models import attention, exact, shortcuts
from vdpp_core.parallel import fsdp, loading, parallelize
from vdpp_core.parallel.group import Group
from vdpp_core.parallel.process_groups import merged

CPU = torch.device("cpu")
TINY = RunConfig(device="cpu", parallel=Parallel())


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def memory_of(unet: Any) -> Callable[[], int]:
    """The bytes that are still held of what its parameters and buffers hold now."""
    tensors = [*unet.parameters(), *unet.buffers()]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = [weakref.ref(tensor.untyped_storage()) for tensor in local]
    return lambda: sum(storage.nbytes() for each in storages if (storage := each()) is not None)


def inputs() -> dict[str, torch.Tensor]:
    return {
        "sample": torch.randn(2, 3, 8, 8, 8),
        "timestep": torch.tensor(1.3),
        "encoder_hidden_states": torch.randn(2, 1, 32),
        "added_time_ids": torch.ones(2, 3),
    }


@pytest.mark.parametrize(
    "patch",
    [
        lambda unet: None,
        exact.take,
        shortcuts.take,
        attention.take_turns,
        lambda unet: parallelize.split_forward(unet, {"frames": Group(2)}),
        lambda unet: parallelize.split_forward(unet, {"frames": Group(2), "cfg": Group(2)}),
    ],
)
def test_a_whole_unet_however_it_is_patched(patch: Callable[[Any], Any]) -> None:
    unet = models.load(TINY, CPU, torch.float32)
    patch(unet)
    with torch.no_grad():
        unet(**inputs())
    held = memory_of(unet)
    assert held() > 1e7
    fsdp.release(unet)
    assert held() == 0


def test_a_sharded_unet() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = merged(Parallel(dp=2, fsdp=True).mesh("cpu"), "dp")
        denoisers = loading.structure(TINY, torch.float32, mesh=mesh)
        loading.materialise(denoisers, TINY, CPU, torch.float32, mesh)
        unet = denoisers["unet"]
        with torch.no_grad():
            unet(**inputs())
        shards, gathered = (
            memory_of(unet),
            weakref.ref(unet.conv_in.weight.untyped_storage()),
        )  # the root stays gathered
        assert shards() > 5e6
        assert gathered().nbytes() > 0
        fsdp.release(denoisers)
        assert shards() == 0
        assert gathered() is None or gathered().nbytes() == 0
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"shortcuts": True}, {"enable_memory_opt": True}], ids=str)
def test_nothing_of_it_is_held_while_videos_are_made(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vdpp_core.engine import videos

    held: list[Callable[[], int]] = []
    load, make = models.load, videos.make

    def loading(*arguments: Any) -> Any:
        unet = load(*arguments)
        held.append(memory_of(unet))
        return unet

    def making(*arguments: Any) -> None:
        assert [bytes_() for bytes_ in held] == [0]
        make(*arguments)

    monkeypatch.setattr(models, "load", loading)
    monkeypatch.setattr(videos, "make", making)
    small = {"total_steps": 2, "num_frames": 2, "num_samples": 2, "threads": 1, "device": "cpu"}
    worker.run(RunConfig(command="generate", output_dir=tmp_path / "run", **small, **options))
    assert len(held) == 1
