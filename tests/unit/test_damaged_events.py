"""Event files that other programs, full disks and crashes left: whatever is in them, a run can be looked at."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import launch.__main__
from tests.unit.inputs import json_like
from vdpp_core import Parallel, RunConfig
from vdpp_core.runs import machine, progress, results, runfolder
from vdpp_core.runs.run import Run

KINDS = ["start", "loaded", "predicted", "warm", "clock", "take", "step", "send", "sample", "pad", "done", "error"]
KINDS += ["terminated", "decode", "chunk", "video", "comparing", "official", "else"]
NAMES = ["t", "rank", "kind", "sample", "step", "seconds", "memory", "error", "lost_rank", "pid", "host", "created"]

shapeless = st.dictionaries(st.sampled_from(NAMES), json_like, max_size=5)
nearly = shapeless.flatmap(
    lambda odd: st.sampled_from(KINDS).map(
        lambda kind: {"t": 1.0, "rank": 0, "kind": kind, "sample": 0, "step": 1, "seconds": 0.1} | odd
    )
)
lines = st.one_of(
    st.binary(max_size=20),
    (shapeless | nearly | json_like).map(lambda value: json.dumps(value).encode()),
    nearly.map(lambda value: json.dumps(value).encode()[:-7]),
)


def test_a_run_with_damaged_events_can_be_looked_at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "git_commit", lambda: None)

    @settings(
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=100,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(lines, max_size=6))
    def each(written: list[bytes]) -> None:
        shutil.rmtree("runs", ignore_errors=True)
        config = RunConfig(command="simulate", parallel=Parallel(), output_dir=Path("runs/run"))
        folder = runfolder.create(config)
        (folder / "events" / "rank-0.jsonl").write_bytes(b"\n".join(written))
        progress.progress(Run(folder))
        results.summarise(Run(folder))
        launch.__main__.main(["status", "run"])

    each()
