"""The notebooks of other pipelines and of experts, executed with small parameters, and rendered."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks.conftest import OTHER_PIPELINES, assert_renders, texts


@pytest.mark.parametrize("name", OTHER_PIPELINES)
def test_executes_and_renders_to_a_page_that_needs_no_network(
    executed: Callable[[str], Any], name: str, tmp_path: Path
):
    assert_renders(executed(name), name, tmp_path)


def test_the_notebook_of_any_pipeline_compares_with_the_official_ones_and_says_what_is_refused(
    executed: Callable[[str], Any],
):
    shown = texts(executed("08_any_pipeline"))
    rows = re.findall(r"<th>((?:animatediff|hunyuan-video) \w+)</th>\s*((?:<td>[^<]+</td>\s*){5})", shown)
    equality = {name: re.findall(r"<td>([^<]+)</td>", cells) for name, cells in rows}
    assert {name: cells[:2] for name, cells in equality.items()} == dict.fromkeys(equality, ["bit-equal"] * 2)
    assert len(equality) == 2
    cfg, _, fsdp = equality["animatediff PNDMScheduler"][2:]
    assert {cfg, fsdp} <= {"bit-equal", *(f"{digit}e-0{power}" for digit in range(1, 10) for power in (6, 7, 8))}
    assert "the call of LTXLatentUpsamplePipeline has no num_inference_steps" in shown
    assert "call guidance: must be one of " in shown
    assert re.search(r"<th[^>]*>as-ready</th>", shown)


def test_the_notebook_of_experts_shows_what_fits_and_that_all_ways_give_the_official_latents(
    executed: Callable[[str], Any],
):
    shown = texts(executed("09_experts"))
    assert "out of memory while loading" in shown
    assert shown.count(">equal to the official pipeline</th>") == 2
    assert shown.count(">bit-equal to the official pipeline") == 2
    who = dict(re.findall(r"<th>([0-3])</th>\s*<td>[0-3]–[0-3]</td>\s*<td>([0-9, ]+)</td>", shown))
    assert who == {"0": "0, 1, 2, 3", "1": "0, 3", "2": "1", "3": "2"}
    assert re.search(r"stages beat two loads a video, 4 steps, 2 GPUs, predicted</th>\s*<td[^>]*>(below|at any)", shown)
