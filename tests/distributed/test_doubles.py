"""The strict and late communicators bite; under them nothing in the package does what NCCL would not forgive."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.breaking import RULES
from tests.distributed.conftest import forked_ranks, with_doubles
from tests.doubles.checking import check
from vdpp_core import RunConfig
from vdpp_core.config.fields import EXAMPLE_IMAGE
from vdpp_core.runs import runfolder
from vdpp_core.runs.run import Run

SYNCHRONISED = {  # dp × pp × cfg × frames × fsdp, in fours
    "pp 4": {"pp": 4},
    "dp 2 × pp 2": {"dp": 2, "pp": 2},
    "dp 2 × pp 2, fsdp": {"dp": 2, "pp": 2, "fsdp": True},
    "pp 2 × cfg 2": {"pp": 2, "cfg": 2},
    "pp 2 × frames 2": {"pp": 2, "frames": 2},
    "pp 2 × frames 2, fsdp": {"pp": 2, "frames": 2, "fsdp": True},
    "cfg 2 × frames 2": {"cfg": 2, "frames": 2},
}


def broken(kind: str, folder: Path) -> Any:
    """What the ranks of `breaking.py` say of themselves."""
    return forked_ranks(2, "tests.distributed.breaking", kind, **with_doubles(folder, "strict", kind))


def test_each_rule_that_is_broken_is_named(tmp_path: Path) -> None:
    first, second = broken("strict", tmp_path)
    late = "born while a message is outstanding"
    assert set(first) == set(second) == {*RULES, late}
    for rule, words in [*first.items(), *second.items()]:
        assert rule in words or (rule, words) == (late, "nothing")
    assert late in second[late]
    problems = check(tmp_path).problems
    assert any("operation" in words and "[2, 2]" in words and "[4]" in words for words in problems)
    assert any("message" in words and "[6]" in words and "[2, 3]" in words for words in problems)


def test_messages_are_late(tmp_path: Path) -> None:
    sender, receiver = broken("late", tmp_path)
    assert sender == {"completed_too_soon": False}
    assert receiver == {"nan_before": True, "got": [2.0] * 4, "synchronisation_waits": True}


@pytest.mark.slow
@pytest.mark.parametrize("queues", ["one queue a pair", "one queue a group"])
def test_synchronising_the_device_at_any_moment_locks_nothing_up(
    queues: str,
    tmp_path: Path,
    warm_ranks: Callable[..., None],
    official: Callable[[RunConfig, int], torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ["strict", "late", "sync", *(["one-queue"] if queues == "one queue a group" else [])]
    for variable, value in with_doubles(tmp_path, *names).items():
        monkeypatch.setenv(variable, value)
    base = RunConfig(
        image=EXAMPLE_IMAGE, total_steps=4, num_frames=3, num_samples=2, threads=1, save_latents=True, timeout_s=30
    )
    folders = [
        runfolder.create(base.replace(output_dir=tmp_path / name, parallel=layout))
        for name, layout in SYNCHRONISED.items()
    ]
    warm_ranks(4, *folders)
    verdict = check(tmp_path)
    assert verdict.problems == []
    assert verdict.calls > 500
    for folder in folders:
        assert Run(folder).result()["outcome"] == "ok"
        for sample in range(base.num_samples):
            latents, expected = Run(folder).load_latents(sample), official(base, sample)
            assert ((latents - expected).norm() / expected.norm()).item() <= 1e-5, folder.name
