"""Whole runs with the meta device as the other device: what stays on the CPU by accident fails, as it would on CUDA.

Of several ranks each runs alone, one after the other, on a fake backend: what comes from others has no values anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from vdpp_core import Parallel, RunConfig
from vdpp_core.config.execution import Execution, resolve
from vdpp_core.config.fields import EXAMPLE_IMAGE
from vdpp_core.config.layout import Place
from vdpp_core.engine import videos, worker
from vdpp_core.engine.worker import _Rank
from vdpp_core.models.decoding import Decoder
from vdpp_core.models.stand_ins import Player, StandIn, replaced
from vdpp_core.parallel import rendezvous, world
from vdpp_core.parallel.handoff import Handoff
from vdpp_core.parallel.rendezvous import Ranks
from vdpp_core.predict.trace import Remembering
from vdpp_core.runs import runfolder
from vdpp_core.runs.run import Run

META = torch.device("meta")
BACKEND = "nobody"
SMALL = {"total_steps": 2, "num_samples": 2, "num_frames": 4, "warmup_samples": 0, "threads": 1, "device": "cpu"}


def _nobody(common: Any, options: Any) -> Any:
    return FakeProcessGroup._create_internal(common.group_rank, common.group_size, options)


@pytest.fixture(scope="module", autouse=True)
def backend() -> None:
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _nobody, extended_api=True, devices=["cpu", "meta"])


def on_nobody(config: RunConfig, local_ranks: int = 1) -> Execution:
    return replace(resolve(config, local_ranks), backend=BACKEND)


@pytest.fixture(autouse=True)
def other_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    encode = _Rank._encode

    def of_its_own(rank: _Rank) -> None:
        """Each rank encodes for itself, because nobody sends it anything."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rank, "first", True)
            patch.setattr(Place, "member", 0)
            patch.setattr(world.World, "share_object", lambda _, made, source: made)
            encode(rank)

    monkeypatch.setattr(_Rank, "_encode", of_its_own)
    monkeypatch.setattr(world, "device_of", lambda *_: META)
    monkeypatch.setattr(worker, "resolve", on_nobody)
    monkeypatch.setattr(rendezvous, "store", lambda _: FakeStore())
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def run(config: RunConfig, folder: Path) -> None:
    """Each rank of a run, alone."""
    config = config.replace(output_dir=folder).for_ranks((config.parallel or Parallel()).world_size)
    number = config.layout.world_size
    runfolder.create(config)
    for rank in range(number):
        with Remembering():
            worker.execute(Run(folder), Ranks(rank, number, rank, number, under_torchrun=False), monitored=False)
    kinds = [event.kind for event in Run(folder).events() if event.kind in ("done", "sample")]
    assert kinds.count("done") == number
    assert kinds.count("sample") == config.num_samples


LAYOUTS = [
    Parallel(),
    Parallel(pp=2),
    Parallel(dp=2),
    Parallel(frames=2),
    Parallel(cfg=2, frames=2),
    Parallel(dp=2, pp=2, frames=2),
]


@pytest.mark.parametrize("image", [None, EXAMPLE_IMAGE], ids=["synthetic", "image"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_denoising(layout: Parallel, image: Path | None, tmp_path: Path) -> None:
    run(RunConfig(image=image, parallel=layout, **SMALL), tmp_path / "run")


@pytest.mark.parametrize(
    "options",
    [{"shortcuts": True}, {"enable_memory_opt": True}, {"dtype": "bf16"}, {"random_weights": True}, {"seed": 3}],
    ids=str,
)
def test_denoising_in_other_ways(options: dict[str, Any], tmp_path: Path) -> None:
    run(RunConfig(**SMALL, **options), tmp_path / "run")


@pytest.mark.parametrize("layout", [Parallel(), Parallel(pp=2)], ids=str)
def test_decoding(layout: Parallel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its pixels are brought to the host, which have no values here."""
    decoded: list[torch.Size] = []

    def make(
        config: RunConfig, folder: Path, share: dict[int, Tensor], device: Any, dtype: Any, log: Any, *_: Any
    ) -> None:
        decoder = Decoder(config, device, dtype, lambda: None)
        for latents in share.values():
            assert latents.device == META
            vae = decoder.pipeline.vae
            pixels = decoder.pipeline.decode_latents(latents.to(vae.dtype), decoder.num_frames, decoder.chunk_size)
            decoded.append(pixels.shape)

    monkeypatch.setattr(videos, "make", make)
    monkeypatch.setattr(videos, "write_overview", lambda *_: None)
    run(RunConfig(command="generate", parallel=layout, save_latents=False, **SMALL), tmp_path / "run")
    assert decoded == [(1, 3, 4, 64, 64)] * 2


def left_on_the_cpu(name: str) -> tuple[Any, str, Any]:
    """Something of a run that forgets to move."""

    def on_the_cpu(player: Player, asked: StandIn, *_: Any) -> Any:
        return replaced(next(player.answers[asked.name]), lambda tensor: torch.zeros(tensor.shape))

    return {
        "encoded": (Player, "__call__", on_the_cpu),
        "hand-off": (Handoff, "connect", lambda handoff: torch.zeros(1, device=handoff.device) + torch.zeros(2)),
    }[name]


@pytest.mark.parametrize("name", ["encoded", "hand-off"])
def test_what_stays_on_the_cpu_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*left_on_the_cpu(name))
    with pytest.raises((RuntimeError, ValueError), match=r"device|meta"):
        run(RunConfig(**SMALL), tmp_path / "run")
