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

from tests.doubles.cards import A100, A5000, T4, Card, faked
from tests.gpu import check
from tests.unit.inputs import as_event
from vdpp_core import Parallel, RunConfig
from vdpp_core.cli.main import parse
from vdpp_core.compare import peers_report
from vdpp_core.engine import preflight
from vdpp_core.parallel.devices import GIB
from vdpp_core.predict import communicators, memory

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


def planned(cards: int, card: Card) -> list[RunConfig]:
    with faked(*[card] * cards):
        return check.plan(cards)[0]


@pytest.mark.usefixtures("ten_gib_each")
def test_one_card_with_room_for_everything() -> None:
    configs = planned(1, A100)
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
    all_of_them, small = check.candidates(1), planned(1, Card((8, 6), 8))
    dropped = [config for config in all_of_them if config not in planned(1, A5000)]
    assert dropped == [LARGEST.replace(guidance_mode="batched")]
    assert all(config.sequential for config in small)
    assert of(small, guidance_mode="sequential") == of(all_of_them, guidance_mode="sequential")


@pytest.mark.usefixtures("ten_gib_each")
@pytest.mark.parametrize("cards", [2, 7, 8, 16])
def test_several_cards_add_fsdp_frames_and_guidance(cards: int) -> None:
    alone, configs = planned(1, A100), planned(cards, A100)
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
        as_event({"t": 0.0, "rank": 0, "kind": "warm", "seconds": 9.0}),
        *(
            as_event({"t": 0.0, "rank": 0, "kind": "step", "sample": sample, "step": 0, "seconds": seconds})
            for sample, seconds in ((-1, 9.0), (0, 0.5), (0, 0.3))
        ),
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


def test_the_room_that_a_run_is_expected_to_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA a limit is the allocator's: context and communicators come on top, up to what the card has."""
    asked: list[float] = []
    monkeypatch.setattr(memory, "fit", lambda _, capacity: asked.append(capacity / GIB))
    limited, sharded = SMALLEST.replace(memory_limit_gib=20), {"parallel": Parallel(dp=2, fsdp=True)}
    with faked(A5000, A5000):
        for config in (SMALLEST, limited, limited.replace(**sharded)):
            check.expectation(config)
    with faked(T4):
        check.expectation(limited)
    check.expectation(TINY.replace(memory_limit_gib=0.02))
    more = memory.CONTEXT_GIB
    assert asked == pytest.approx([23.68, 20 + more, 20 + more + communicators.ASSUMED_GIB, 14.56, 0.02])


@pytest.mark.usefixtures("ten_gib_each")
@pytest.mark.parametrize("gib", [16, 24, 80])
@pytest.mark.parametrize("capability", [(7, 5), (8, 6)], ids=["Turing", "Ampere"])
@pytest.mark.parametrize("cards", [1, 2, 7, 8, 16])
def test_what_is_planned_can_be_run_on_those_cards(cards: int, capability: tuple[int, int], gib: float) -> None:
    with faked(*[Card(capability, gib)] * cards):
        configs, left_out = check.plan(cards)
        for config in configs:
            ranks = (config.parallel or Parallel()).world_size
            preflight.check(config.for_ranks(ranks), ranks)
        asked = parse(check.peers_arguments(cards)[2:])
        ranks = int(asked.world_size)
        compared = peers_report.configuration(asked.run, max(ranks, 2), max(ranks, 2))
        if cards > 1:
            preflight.check(compared.for_ranks(ranks), ranks)
    assert len(configs) + len(left_out) == len(check.candidates(cards)) + (cards == 1)
    assert len(left_out) == (2 if gib < 40 and cards > 1 else 1 if gib < 40 else 0) + (cards == 1)


def test_more_cards_than_frames() -> None:
    assert [config.parallel for config in check.candidates(32)[-2:]] == [Parallel(frames=25), Parallel(cfg=2)]


def test_a_plan_of_unequal_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on one card runs on the first of them; all of them are as small as the smallest."""
    monkeypatch.setattr(memory, "needed", lambda _: 16 * GIB)
    with faked(A5000, T4):
        configs, left_out = check.plan(2)
    assert SMALLEST.replace(guidance_mode="batched") in configs
    assert left_out == ["25 × 160 × 288, cfg 2, batched: 16.0 GiB needed, 14.6 GiB there"]


def test_what_a_communicator_takes_is_a_slope() -> None:
    def row(communicators: int, context_gib: float | None, outcome: str = "ok") -> dict[str, Any]:
        return {"communicators": communicators, "context_gib": context_gib, "outcome": outcome}

    rows = [row(0, 0.5), row(0, 0.6), row(2, 0.85), row(3, 1.0), row(3, None), row(4, 9.0, "oom")]
    assert check.communicator_gib(rows) == pytest.approx(0.15)
    for untold in ([], rows[:2], [row(0, 0.8), row(2, 0.7)]):
        assert check.communicator_gib(untold) is None


@pytest.mark.slow
def test_what_was_measured_is_predicted_with_on_the_same_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicators, "MEASURED", tmp_path)
    ended = [{"communicators": number, "context_gib": 0.5 + 0.3 * number, "outcome": "ok"} for number in (0, 2)]
    seven = SMALLEST.replace(parallel=Parallel(dp=7, fsdp=True))
    with faked(*[A5000] * 7):
        assumed = memory.outside(seven)
        path = check.write(tmp_path, ended, [], 60.0, None)
        assert json.loads(path.read_text())["communicator_gib"] == pytest.approx(0.3)
        assert memory.outside(seven) - assumed == pytest.approx((0.3 - communicators.ASSUMED_GIB) * GIB, abs=2)
        alone = json.loads(path.read_text()) | {"date": "9999-12-31", "communicator_gib": None}
        (tmp_path / "later-on-one-card.json").write_text(json.dumps(alone))
        assert communicators.gib_each()[0] == pytest.approx(0.3)
    for others in ([T4] * 7, []):
        with faked(*others):
            assert communicators.gib_each() == (communicators.ASSUMED_GIB, "assumed")


@pytest.mark.slow
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
        return SimpleNamespace(
            folder=tmp_path / name, wait=lambda: ended | {"run_id": name}, run=SimpleNamespace(events=list)
        )

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


@pytest.mark.slow
def make_gpu_check(*variables: str) -> subprocess.CompletedProcess[str]:
    """`make gpu-check` with the Python of this process, and without installing anything."""
    project = Path(__file__).parents[2]
    hidden = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"} | {"CUDA_VISIBLE_DEVICES": ""}
    make = ["make", "--silent", "-o", ".venv/ready", f"VENV={Path(sys.executable).parent}"]
    command = [*make, "gpu-check", *variables]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=project, env=hidden)


@pytest.mark.slow
def test_dry_it_prints_its_plan_and_runs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_CARDS", "7,8.6,23.68")
    assert check.main(["--dry"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "7 × NVIDIA RTX A5000, compute capability 8.6, 23.68 GiB: 13 runs in fp16, nothing is run now"
    assert lines[7] == "  7  25 × 160 × 288, 1 rank, sequential: oom expected, peak 23.021 GB predicted"
    assert lines[11] == " 11  25 × 160 × 288, dp 7 × fsdp, sequential: ok expected, peak 20.455 GB predicted"
    assert lines[14].startswith("peers: python -m vdpp_core peers --json --world-size 7 --model svd")
    assert lines[15].startswith("left out: 25 × 160 × 288, 1 rank, batched: 45.1 GiB needed, 23.7 GiB there")
    assert lines[-1] == "time: not known, not checked before"


def test_dry_it_tells_how_long_it_took_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(communicators, "MEASURED", tmp_path)
    monkeypatch.setattr(check, "plan", lambda _: ([], []))
    with faked(A5000, A5000):
        check.write(tmp_path, [], [], 312.4, None)
        check.main(["--dry"])
    assert capsys.readouterr().out.splitlines()[-1].startswith("time: 312 s on 20")


def test_nothing_runs_on_faked_cards() -> None:
    ended = make_gpu_check("FAKE_CARDS=2,8.6,24")
    assert ended.returncode == 2
    assert "FAKE_CARDS: only with --dry (make: DRY=1)" in ended.stderr


@pytest.mark.parametrize("variables", [[], ["DRY=1"]], ids=["", "dry"])
def test_without_cuda_it_says_so(variables: list[str]) -> None:
    ended = make_gpu_check(*variables)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("no CUDA device here, nothing was run. Where there is one: SVD's UNet")
    assert "25 × 160 × 288" in ended.stdout
    assert ended.stdout.count("\n") == 1
