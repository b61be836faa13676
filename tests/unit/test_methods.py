"""The documents' table of methods, and what is measured beside it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from vdpp_core import Parallel, RunConfig
from vdpp_core.compare import methods
from vdpp_core.config.axes import AXIS_NAMES
from vdpp_core.predict import costs
from vdpp_core.runs.run import Run

BASE = RunConfig(latent_shape=(1, 4, 4, 8, 8), total_steps=3, num_samples=4, device="cpu", parallel=Parallel())


def finished(config: RunConfig, within_steps: list[float], handed_on: list[int | None]) -> Run:
    facts: dict[str, Any] = {"latency_s": [2.0, 4.0, 3.0], "samples_per_s": 0.5, "max_peak_memory_gb": 0.25}
    facts |= {"lockstep_gb_per_step_per_rank": within_steps, "handoff_bytes_per_rank": handed_on}
    return cast(Run, SimpleNamespace(config=config, result=lambda: facts))


def test_every_axis_and_sharding_is_a_method():
    assert sorted(method.axis for method in methods.METHODS.values()) == sorted([*AXIS_NAMES, "fsdp"])
    runs = methods.runs(BASE, 2)
    assert {config.layout.world_size for name, config in runs.items() if name != methods.ONE_RANK} == {2}
    assert runs["FSDP"].fsdp_same_sample
    assert runs["FSDP"].layout == Parallel(dp=2, fsdp=True)


@pytest.mark.parametrize(
    ("layout", "within_steps", "handed_on", "expected"),
    [
        (Parallel(frames=2), [0.003, 0.005], [None, None], 3 * 8.0),
        (Parallel(pp=2), [0.0, 0.0], [2_000_000, None], 2.0),
        (Parallel(dp=2, cfg=2), [0.001] * 4, [None] * 4, 3 * 2.0),
        (Parallel(pp=2, cfg=2), [0.001] * 4, [2_000_000, 2_000_000, None, None], 3 * 2.0 + 4.0),
    ],
)
def test_bytes_are_those_of_all_ranks_for_one_video(layout, within_steps, handed_on, expected):
    run = finished(BASE.replace(parallel=layout), within_steps, handed_on)
    assert methods.sent_mb(run) == pytest.approx(expected)


def test_parameters_are_gathered_for_one_video_or_for_one_of_each_rank():
    same = BASE.replace(parallel=Parallel(dp=2, fsdp=True), fsdp_same_sample=True)
    each = same.replace(fsdp_same_sample=False)
    gathered = 3 * 2 * costs.cost(same).gathered / 1e6
    assert methods.sent_mb(finished(same, [0.0] * 2, [None] * 2)) == pytest.approx(gathered)
    assert methods.sent_mb(finished(each, [0.0] * 2, [None] * 2)) == pytest.approx(gathered / 2)


def test_the_table_has_multiples_of_one_rank_and_what_the_documents_say():
    runs = {name: finished(config, [], []) for name, config in methods.runs(BASE, 2).items()}
    table = methods.table(runs)
    assert set(table["latency"]) == set(table["throughput"]) == set(table["memory"]) == {1.0}
    assert table["latency_s"]["frames"] == 3.0
    assert table["documents_throughput"].to_dict() == {
        "one rank": "–",
        "data parallel": "–",
        "step pipeline": "yes, linear",
        "FSDP": "no",
        "tensor parallel": "depends on the link",
        "frames": "–",
        "guidance (cfg)": "–",
    }
