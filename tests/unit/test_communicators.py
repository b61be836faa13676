"""How many communicators of NCCL a rank opens, and where their memory is predictor."""

from __future__ import annotations

import pytest

from vdpp_core import Parallel, RunConfig
from vdpp_core.__main__ import main
from vdpp_core.parallel.devices import GIB
from vdpp_core.predict import communicators, memory
from vdpp_core.predict.predictor import Predictor

CUDA = RunConfig(device="cuda", dtype="fp16", latent_shape=(1, 4, 8, 8, 8))
EACH = communicators.ASSUMED_GIB


@pytest.fixture(autouse=True)
def nothing_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(communicators, "MEASURED", tmp_path)


@pytest.mark.parametrize(
    ("layout", "of_each_rank"),
    [
        (Parallel(), [0]),
        (Parallel(fsdp=True), [0]),
        (Parallel(dp=3), [1, 1, 1]),  # all ranks
        (Parallel(dp=2, fsdp=True), [1, 1]),  # which are the shard group
        (Parallel(pp=2), [2, 2]),  # all ranks, a neighbour
        (Parallel(pp=4), [2, 3, 3, 2]),  # two neighbours in the middle
        (Parallel(dp=2, pp=3), [3, 4, 3] * 2),  # and the replica
        (Parallel(cfg=2), [1, 1]),
        (Parallel(cfg=2, frames=2), [3] * 4),
        (Parallel(pp=3, cfg=2, frames=2, fsdp=True), [5] * 4 + [6] * 4 + [5] * 4),
    ],
    ids=str,
)
def test_how_many_a_rank_opens(layout, of_each_rank):
    assert [communicators.opened(layout, rank) for rank in range(layout.world_size)] == of_each_rank
    assert communicators.most(CUDA.replace(parallel=layout)) == max(of_each_rank)


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_without_nccl_there_are_none(device):
    config = RunConfig(device=device, parallel=Parallel(pp=3))
    assert communicators.most(config) == 0
    assert communicators.most(CUDA.replace(parallel=Parallel(pp=3), backend="gloo")) == 0
    assert memory.outside(config) == (0 if device == "cpu" else int(memory.CONTEXT_GIB * GIB))


def test_they_are_in_what_a_rank_needs():
    alone, stages = (CUDA.replace(parallel=Parallel(pp=size)) for size in (1, 3))
    more = 3 * EACH * GIB
    assert memory.predict(stages) == memory.predict(alone)
    assert memory.needed(stages) - memory.needed(alone) == pytest.approx(more, abs=2)
    enough = memory.needed(alone) + more
    assert memory.fit(stages, enough + 2**20).fits
    assert not memory.fit(stages, enough - 32 * 2**20).fits
    assert memory.fit(alone, enough - 32 * 2**20).fits


def test_what_the_planner_counts_once_for_all_layouts_has_those_of_each():
    predictor = Predictor()
    rooms = [predictor.room(CUDA.replace(parallel=Parallel(pp=size))) for size in (1, 2, 3)]
    assert len(predictor.rooms) == 1
    assert [(room.needed - rooms[0].needed) / GIB for room in rooms] == pytest.approx([0, 2 * EACH, 3 * EACH])
    assert len({room.peak for room in rooms}) == 1


def test_a_limit_is_the_allocators_whatever_the_layout(capsys):
    """`memory` and `plan` play the same device."""
    limit = 0.001
    flags = ["--memory-limit-gib", str(limit), "--num-samples", "2", "--latent-shape", "1", "4", "8", "8", "8"]
    main(["plan", "--gpus", "2", "--tflops", "1", "--link-gb-per-s", "1", *flags])
    said = " ".join(capsys.readouterr().out.split())
    for number in (0, 1, 2):
        assert f"of {limit + memory.CONTEXT_GIB + number * EACH:g} GiB usable" in said


def test_the_command_has_a_line_for_them(capsys):
    main(["memory", "--world-size", "4"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "communicators" in line]
    assert line.strip().startswith("communicators")
    assert line.endswith(" 0.644 GB in addition: 3 of NCCL, 0.215 GB each, assumed")
    main(["memory"])
    assert "communicators" not in capsys.readouterr().out
