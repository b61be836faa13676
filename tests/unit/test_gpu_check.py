"""make gpu-check as far as it goes without a GPU: what it would run, what it tells of a run, all of it on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpu import check  # tests/ is on the path: conftest.py lies in it

from vdpp_core import Parallel, RunConfig, memory
from vdpp_core.limits import GIB

PUBLISHED_SHAPES = [(14, 72, 128), (25, 72, 128), (25, 96, 160), (25, 160, 288)]
LARGEST = check.BASE.replace(latent_shape=(1, 4, 25, 160, 288))
SMALLEST = check.BASE.replace(latent_shape=(1, 4, 14, 72, 128))
TINY = RunConfig(
    model="tiny", device="cpu", random_weights=True, total_steps=2, warmup_samples=0, threads=1, save_latents=False
)


@pytest.fixture
def ten_gib_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shape needs 10 GiB, the largest 40: the true needs take seconds to predict."""
    monkeypatch.setattr(memory, "needed", lambda config: (40 if config.shape == LARGEST.shape else 10) * GIB)


@pytest.fixture
def five_gb_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "predict", lambda _: SimpleNamespace(total=5_000_000_000))


def of(configs: list[RunConfig], **values: Any) -> list[RunConfig]:
    return [config for config in configs if all(getattr(config, name) == value for name, value in values.items())]


@pytest.mark.usefixtures("ten_gib_each")
def test_one_card_with_room_for_everything() -> None:
    configs = check.configurations(1, 80 * GIB)
    assert configs == check.candidates(1)
    for mode in ("sequential", "batched"):
        plain = of(configs, guidance_mode=mode, forward_chunking=False, memory_limit_gib=None)
        assert [config.shape[2:] for config in plain] == PUBLISHED_SHAPES
    assert of(configs, forward_chunking=True) == [LARGEST.replace(forward_chunking=True)]
    assert of(configs, memory_limit_gib=check.LIMIT_GIB) == [LARGEST.replace(memory_limit_gib=check.LIMIT_GIB)]
    assert pytest.approx(23.68) == check.LIMIT_GIB + memory.CONTEXT_GIB
    assert len(configs) == 10
    for config in configs:
        assert (config.model, config.random_weights, config.dtype, config.device) == ("svd", True, "fp16", "cuda")
        assert (config.total_steps, config.num_samples, config.warmup_samples) == (2, 1, 0)
        assert config.parallel is None


@pytest.mark.usefixtures("ten_gib_each")
def test_batched_guidance_only_where_there_should_be_room() -> None:
    all_of_them = check.candidates(1)
    dropped = [config for config in all_of_them if config not in check.configurations(1, 24 * GIB)]
    assert dropped == [LARGEST.replace(guidance_mode="batched")]
    assert all(config.sequential for config in check.configurations(1, 8 * GIB))
    assert of(check.configurations(1, 8 * GIB), guidance_mode="sequential") == of(
        all_of_them, guidance_mode="sequential"
    )


@pytest.mark.usefixtures("ten_gib_each")
@pytest.mark.parametrize("cards", [2, 7, 16])
def test_several_cards_add_fsdp_frames_and_guidance(cards: int) -> None:
    alone, configs = check.configurations(1, 80 * GIB), check.configurations(cards, 80 * GIB)
    assert configs[: len(alone)] == alone
    added = configs[len(alone) :]
    assert [(config.shape[2:], config.memory_limit_gib) for config in added] == [
        ((25, 72, 128), None),
        ((25, 160, 288), None),
        ((25, 160, 288), check.LIMIT_GIB),
        ((25, 160, 288), None),
        ((25, 160, 288), None),
    ]
    for config in added[:3]:
        assert config.parallel == Parallel(dp=cards, fsdp=True)
        assert config.fsdp_same_sample
        assert config.sequential
    assert [config.parallel for config in added[3:]] == [Parallel(frames=cards), Parallel(cfg=2)]


def result(outcome: str, *memory_per_rank: dict[str, float], **more: Any) -> dict[str, Any]:
    peak = max((fact["allocated_gb"] for fact in memory_per_rank), default=None)
    facts = {"run_id": "000-1rank", "memory_per_rank": list(memory_per_rank), "max_peak_memory_gb": peak}
    return {"outcome": outcome, **facts, **more}


@pytest.mark.usefixtures("five_gb_predicted")
def test_the_row_of_a_run_that_ended_well() -> None:
    config = SMALLEST.for_ranks(1)
    ended = result("ok", {"allocated_gb": 5.35, "reserved_gb": 5.6, "device_used_gb": 5.6 + 0.6 * GIB / 1e9})
    events = [
        {"kind": "warm", "seconds": 9.0},
        {"kind": "step", "sample": -1, "seconds": 9.0},
        {"kind": "step", "sample": 0, "seconds": 0.5},
        {"kind": "step", "sample": 0, "seconds": 0.3},
    ]
    row = check.row(config, ended, events, memory.Fit(True))
    assert (row["shape"], row["layout"], row["guidance"]) == ("14 × 72 × 128", "1 rank", "sequential")
    assert (row["expected"], row["outcome"], row["cause"], row["limit_gib"]) == ("ok", "ok", None, None)
    assert (row["predicted_peak_gb"], row["peak_gb"], row["reserved_gb"]) == (5.0, 5.35, 5.6)
    assert row["ratio"] == pytest.approx(1.07)
    assert row["context_gib"] == pytest.approx(0.6)
    assert row["step_s"] == pytest.approx(0.4)
    assert (row["published_outcome"], row["published_gpus"], row["published_peak_gb"]) == ("ok", 1, 5.331)
    assert row["published_step_s"] == pytest.approx(53.3745 / 28)
    assert row["request_gib"] is row["expected_request_gib"] is row["published_request_gib"] is None
    assert json.loads(json.dumps(row)) == row


@pytest.mark.usefixtures("five_gb_predicted")
def test_the_row_of_a_run_out_of_memory() -> None:
    config = LARGEST.replace(memory_limit_gib=check.LIMIT_GIB).for_ranks(1)
    full = {"requested_gb": 2.75 * GIB / 1e9, "free_gb": 1.0, "limit_gib": 22.97, "layer": None, "phase": "warming up"}
    ended = result("oom", failure={"rank": 0, "cause": "out of memory while warming up", "oom": full})
    row = check.row(config, ended, [], memory.Fit(False, request=2_949_120_000))
    assert (row["expected"], row["outcome"], row["published_outcome"]) == ("oom", "oom", "oom")
    assert row["request_gib"] == pytest.approx(2.75)
    assert row["expected_request_gib"] == pytest.approx(2.7466, abs=1e-4)
    assert row["published_request_gib"] == 2.75
    assert row["cause"] == "out of memory while warming up"
    for unknown in ("peak_gb", "ratio", "reserved_gb", "context_gib", "step_s", "published_peak_gb"):
        assert row[unknown] is None


def test_only_what_was_run_like_the_published_runs_is_compared_with_them() -> None:
    seven = Parallel(dp=7, fsdp=True)
    assert (check.published(LARGEST) or {})["id"] == 4
    assert (check.published(LARGEST.replace(parallel=seven, fsdp_same_sample=True)) or {})["id"] == 6
    for other in ({"guidance_mode": "batched"}, {"forward_chunking": True}, {"parallel": Parallel(dp=2)}):
        assert check.published(LARGEST.replace(**other)) is None
    assert check.published(LARGEST.replace(latent_shape=(1, 4, 14, 40, 72))) is None


def test_the_context_is_not_in_a_limit_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(memory, "fit", lambda _, capacity: asked.append(capacity / GIB))
    for config in (SMALLEST, SMALLEST.replace(memory_limit_gib=20), TINY.replace(memory_limit_gib=20)):
        check.expectation(config, 80 * GIB)
    assert asked == pytest.approx([80, 20 + memory.CONTEXT_GIB, 20])


def test_all_of_it_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "before_start", lambda *_: [])  # seconds, for a warning of what is expected here
    short = TINY.replace(latent_shape=(1, 4, 2, 32, 32), memory_limit_gib=0.025)
    assert check.check([short, TINY], ["too large, batched"], tmp_path / "figures", tmp_path / "runs") == 0
    (path,) = (tmp_path / "figures").iterdir()
    facts = json.loads(path.read_text())
    assert path.name.endswith(f"-{facts['date']}.json")
    assert path.name == path.name.lower()
    assert {"card", "cards", "date", "command", "versions", "hardware", "rows"} <= facts.keys()
    assert facts["left_out"] == ["too large, batched"]
    full, well = facts["rows"]
    assert (full["expected"], full["outcome"]) == ("oom", "oom")
    assert (well["expected"], well["outcome"]) == ("ok", "ok")
    assert well["peak_gb"] > 0 < well["step_s"]
    printed = capsys.readouterr().out
    assert "1/2" in printed
    assert "2/2" in printed
    assert "left out: too large, batched" in printed


def test_a_run_that_failed_is_named_and_written_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def job(name: str, ended: dict[str, Any]) -> SimpleNamespace:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(TINY.for_ranks(1).to_json())
        return SimpleNamespace(folder=tmp_path / name, wait=lambda: ended | {"run_id": name})

    failed = job("000", result("failed", failure={"rank": 0, "cause": "ValueError: no"}))
    sweep = SimpleNamespace(
        run_id="a-sweep",
        folder=tmp_path,
        runs=[{}, {}],
        jobs=[failed, job("001", result("ok", {"allocated_gb": 0.1}))],
        wait=lambda: None,
    )
    monkeypatch.setattr("launch.sweep", lambda *_, **__: sweep)
    assert check.check([TINY, TINY], folder=tmp_path / "figures") == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].startswith("FAILED  14 × 8 × 8, 1 rank, batched: failed, ok expected, ValueError: no; see ")
    (path,) = (tmp_path / "figures").iterdir()
    assert [row["outcome"] for row in json.loads(path.read_text())["rows"]] == ["failed", "ok"]


def test_without_cuda_it_says_so() -> None:
    project = Path(__file__).parents[2]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.gpu.check"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=project, env=hidden)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("no CUDA device here, nothing was run. Where there is one: SVD's UNet")
    assert "25 × 160 × 288" in ended.stdout
    assert ended.stdout.count("\n") == 1
