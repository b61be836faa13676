"""A rank that is stopped for some seconds: the run ends well, and everything that shows its times says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import launch
from tests.distributed.conftest import launch_command
from vdpp_core import ConfigError, Parallel, RunConfig
from vdpp_core.compare import tables
from vdpp_core.predict import rates
from vdpp_core.runs import events

STOPPED_S = 4.0


def test_a_rank_that_is_stopped_for_seconds(tmp_path: Path, wait_until: Callable[[Callable[[], Any], float], Any]):
    config = RunConfig(total_steps=8, num_samples=30, num_frames=3, threads=1, parallel=Parallel(pp=2))
    job = launch.start(config.replace(output_dir=tmp_path / "runs" / "stopped"))

    def rank_1() -> list[events.Event]:
        return [event for event in job.run.events() if event.rank == 1]

    wait_until(lambda: sum(event.kind == "sample" for event in rank_1()) >= 3, 90)
    process = psutil.Process(rank_1()[0].pid)
    process.suspend()
    try:
        stands = rank_1()[-1].t
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED, 10)
        with pytest.raises(TimeoutError):
            job.wait(STOPPED_S)
    finally:
        process.resume()
    result = job.wait(120)
    assert result["outcome"] == "ok"
    after = next(event for event in rank_1() if event.t > stands + 1)
    (line,) = [line for line in result["disturbed"] if line.startswith(("rank 1 ", "ranks 0, 1 "))]
    assert f"sample {after.sample}" in line
    seconds = float(line.partition(" took ")[2].partition(" s ")[0])
    assert seconds > STOPPED_S - 0.5
    assert line in tables.table([job.folder])["disturbed"][0]
    assert "1 of these runs was disturbed" in tables.source([job.folder])
    shown = launch_command(tmp_path, "status", "stopped")
    assert f"disturbed {line}" in shown.stdout
    with pytest.raises(ConfigError, match=r"calibrate .*stopped: was disturbed: rank"):
        rates.from_run(job.folder)
