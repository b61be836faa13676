"""The notebooks that predict memory and time, executed with small parameters, and rendered."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks.conftest import PREDICTING, SAID_TWICE, assert_renders, texts

pytestmark = pytest.mark.slow  # minutes


@pytest.mark.parametrize("name", PREDICTING)
def test_executes_and_renders_to_a_page_that_needs_no_network(
    executed: Callable[[str], Any], name: str, tmp_path: Path
):
    assert_renders(executed(name), name, tmp_path)


def test_the_memory_notebook_predicts_the_published_rows_and_runs_out_where_it_should(
    executed: Callable[[str], Any],
):
    shown = texts(executed("02_fsdp_memory"))
    assert "the request that fails: 2.75 GiB, published: 2.75 GiB" in shown
    predicted, measured = (shown.index(words) for words in ("predicted / published", "measured / predicted"))
    assert shown[predicted:measured].count("<td>oom</td>") == 2
    outcomes = re.findall(r"<td>(oom|ok|failed|stopped)</td>", shown[measured:])
    assert outcomes == ["oom", "oom", "ok", "ok", "ok", "ok"]
    for layout in ("1 rank, small device", "step pipeline, small device"):
        assert f"{layout}: rank" in shown
    assert shown.count("out of memory while ") == 2
    assert SAID_TWICE in shown  # by the sliders
