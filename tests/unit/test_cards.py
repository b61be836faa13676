"""What the machine chooses and refuses on 1 to 16 cards, before and after Ampere: on faked ones."""

from __future__ import annotations

import pytest
import torch

from launch.widgets.predictions import Predictions
from tests.doubles.cards import A100, A5000, GIB, T4, Card, faked, from_environment
from vdpp_core import ConfigError, Parallel, RunConfig
from vdpp_core.__main__ import main
from vdpp_core.config.execution import resolve
from vdpp_core.engine import preflight
from vdpp_core.parallel import devices
from vdpp_core.predict import memory
from vdpp_core.runs import machine

COUNTS = [1, 2, 7, 8, 16]
ON_CUDA = RunConfig(device="cuda", total_steps=32)


def answer(config: RunConfig, local_ranks: int = 1, ranks: int | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        preflight.check(config.for_ranks(ranks or local_ranks), local_ranks)
    line = str(caught.value)
    assert "\n" not in line
    return line


def capacity(config: RunConfig, local_ranks: int) -> int:
    return devices.capacity(config, resolve(config, local_ranks))


def test_the_double_bites() -> None:
    """What torch says of cards, their numbers included; computing on one fails as it does without CUDA."""
    before = torch.cuda.device_count(), torch.cuda.is_available()
    with faked(T4, A5000):
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 2
        assert torch.cuda.get_device_capability() == (7, 5)
        assert torch.cuda.get_device_name(torch.device("cuda", 1)) == "NVIDIA RTX A5000"
        assert torch.cuda.get_device_properties("cuda:1").total_memory == int(23.68 * GIB)
        for ask in (torch.cuda.get_device_properties, torch.cuda.get_device_capability, torch.cuda.get_device_name):
            with pytest.raises(AssertionError, match="Invalid device id"):
                ask(2)
        if not before[1]:
            with pytest.raises((AssertionError, RuntimeError)):
                torch.zeros(1, device="cuda")
    with faked():
        assert not torch.cuda.is_available()
    assert (torch.cuda.device_count(), torch.cuda.is_available()) == before


def test_cards_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CARDS", "7,8.6,23.68")
    assert from_environment() == (A5000,) * 7
    monkeypatch.delenv("FAKE_CARDS")
    assert from_environment() == ()


@pytest.mark.parametrize("card", [T4, A5000, A100], ids=lambda card: card.name)
@pytest.mark.parametrize("count", COUNTS)
def test_what_auto_is_on_cards(count: int, card: Card) -> None:
    config = RunConfig().for_ranks(count)
    with faked(*[card] * count):
        execution = preflight.check(config, count)
        assert (execution.device_type, execution.backend) == ("cuda", "nccl")
        assert execution.dtype == torch.float16
        assert execution.cards == range(count)
        assert devices.capacity(config, execution) == card.total_memory
        assert machine.hardware_name(machine.hardware()) == f"{count} × {card.name}"
    with faked():
        execution = resolve(config, count)
        assert (execution.device_type, execution.backend, execution.cards) == ("cpu", "gloo", range(0))
        assert execution.dtype == torch.float32


@pytest.mark.parametrize("count", COUNTS)
def test_more_ranks_than_cards(count: int) -> None:
    with faked(*[A5000] * count):
        line = answer(ON_CUDA, count + 1)
        preflight.check(ON_CUDA.for_ranks(2 * count), count)  # on two machines
    assert line == f"world_size {count + 1}: must be at most the GPUs of this machine, {count}"


@pytest.mark.parametrize("count", COUNTS)
def test_a_card_that_is_not_there(count: int) -> None:
    with faked(*[A5000] * count):
        preflight.check(RunConfig(device=f"cuda:{count - 1}").for_ranks(1), 1)
        line = answer(RunConfig(device=f"cuda:{count}"))
    assert line == f"device cuda:{count}: must be below cuda:{count}, this machine has {count}"


@pytest.mark.parametrize("count", COUNTS[1:])
def test_one_card_for_several_ranks(count: int) -> None:
    with faked(*[A5000] * count):
        line = answer(RunConfig(device="cuda:1"), count)
    assert line == "device cuda:1: must be cuda with several ranks: the local rank picks the GPU"


def test_no_card() -> None:
    with faked():
        assert answer(ON_CUDA) == "device cuda: no CUDA device here: use cpu or auto"
        assert answer(RunConfig(backend="nccl")) == "backend nccl: needs CUDA devices; on cpu use gloo or auto"
    with faked(A5000):
        line = answer(RunConfig(device="cpu", backend="nccl"))
    assert line == "backend nccl: needs CUDA devices; on cpu use gloo or auto"


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize("count", COUNTS[1:])
def test_gloo_on_several_cards(count: int, device: str) -> None:
    gloo = RunConfig(device=device, backend="gloo", total_steps=32)
    with faked(*[A5000] * count):
        lines = {answer(gloo, count), answer(gloo, count, 2 * count), answer(gloo, 1, 2)}
        preflight.check(gloo.for_ranks(1), 1)  # who is alone communicates with nobody
        preflight.check(RunConfig(device="cpu", backend="gloo").for_ranks(count), count)
    assert lines == {"backend gloo: must be nccl or auto with several ranks on CUDA: gloo is for CPUs"}


@pytest.mark.parametrize("command", ["benchmark", "peers"])
def test_the_command_refuses_gloo_on_several_cards(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with faked(A5000, A5000), pytest.raises(SystemExit) as end:
        main([command, "--device", "cuda", "--backend", "gloo", "--world-size", "2"])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said == "error: --backend gloo: must be nccl or auto with several ranks on CUDA: gloo is for CPUs\n"


@pytest.mark.parametrize("count", COUNTS)
def test_bf16_before_ampere(count: int) -> None:
    bf16 = RunConfig(device="cuda", dtype="bf16")
    with faked(*[T4] * count):
        line = answer(bf16, count)
        for dtype in ("auto", "fp16", "fp32"):
            preflight.check(bf16.replace(dtype=dtype).for_ranks(count), count)
    known = "cuda:0 (Tesla T4, compute capability 7.5) only emulates bf16"
    assert line == f"dtype bf16: must be fp16 or fp32: {known}"
    for card in (A100, A5000):
        with faked(*[card] * count):
            preflight.check(bf16.for_ranks(count), count)


def test_bf16_is_asked_of_the_cards_that_are_used() -> None:
    bf16 = RunConfig(device="cuda", dtype="bf16")
    with faked(A5000, T4):
        preflight.check(bf16.for_ranks(1), 1)
        preflight.check(RunConfig(device="cuda:0", dtype="bf16").for_ranks(1), 1)
        for config, ranks in ((bf16, 2), (RunConfig(device="cuda:1", dtype="bf16"), 1)):
            assert "cuda:1 (Tesla T4" in answer(config, ranks)
    with faked(T4):
        preflight.check(RunConfig(device="cpu", dtype="bf16").for_ranks(1), 1)


def test_the_capacity_is_that_of_the_smallest_card_in_use() -> None:
    with faked(A100, A5000, T4, A100):
        capacities = [capacity(ON_CUDA, ranks) for ranks in (1, 2, 3, 4)]
        assert capacities == [card.total_memory for card in (A100, A5000, T4, T4)]
        assert capacity(RunConfig(device="cuda:3"), 1) == A100.total_memory
        assert capacity(RunConfig(device="cuda:2", memory_limit_gib=3), 1) == 3 * GIB


def test_a_run_that_only_the_smallest_card_has_no_room_for() -> None:
    config = RunConfig(device="cuda", num_samples=2, parallel=Parallel(dp=2))
    with faked(A100, A100):
        assert memory.before_start(config, resolve(config, 2)) == []
        small = Card((7, 5), memory.needed(config) / GIB - 0.1)
    with faked(A100, small):
        (line,) = memory.before_start(config, resolve(config, 2))
    assert line.startswith("dp 2: will probably run out of memory")


def test_the_panel_counts_what_is_outside_a_limit_on_both_sides() -> None:
    config = RunConfig(device="cuda", parallel=Parallel(pp=2), memory_limit_gib=2)
    with faked(A5000, A5000):
        page = Predictions().of(config, []).page
        needed, there = memory.needed(config), 2 * GIB + memory.outside(config)
    assert needed <= there
    assert f" fits in {there / 1e9:.3g} GB" in page


def test_on_a_mac_it_is_what_metal_recommends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 12 * GIB)
    assert capacity(RunConfig(device="mps"), 1) == 12 * GIB
    assert capacity(RunConfig(device="mps", memory_limit_gib=3), 1) == 3 * GIB
