"""Training experiments: what is refused, what is counted, and how the end of a job is told, without any ranks."""

from __future__ import annotations

import json
import math
import os
import re
import socket

import pandas as pd
import pytest
import torch
from torch import nn

from vdpp_core.cli import training as cli_training
from vdpp_core.config.errors import ConfigError
from vdpp_core.lessons import compared, data, rank, sizing, techniques, training, training_folder
from vdpp_core.lessons.experiments import Experiment
from vdpp_core.lessons.measure import Meter, held
from vdpp_core.lessons.problems import PROBLEMS, Batch, TransformerProblem
from vdpp_core.runs import processes

SMALL = TransformerProblem(hidden=32, layers=3, heads=2, sequence=16, vocabulary=32)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(PROBLEMS, "small", SMALL)


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"technique": "ZeRO-9"}, "technique ZeRO-9: must be one of one rank, DDP, "),
        ({"problem": "llama"}, "problem llama: must be one of transformer, small, svd"),
        ({"precision": "fp16"}, "precision fp16: must be one of fp32, bf16, fp64"),
        ({"ranks": 0}, "ranks 0: must be a whole number from 1 to 16"),
        ({"batch": True}, "batch True: must be a whole number from 1 to 1024"),
        ({"batch": 3}, "batch 3: must be at least 4, so that each part of the batch has a sample"),
        ({"micro_batches": 2}, "micro_batches 2: must be 1 for DDP"),
        ({"chunks": 2}, "chunks 2: must be 1 for DDP"),
        ({"technique": "one rank"}, "ranks 4: must be 1 for one rank"),
        ({"technique": "HYBRID_SHARD", "ranks": 6, "batch": 5}, "batch 5: must be at least 6"),
        ({"technique": "HYBRID_SHARD", "ranks": 3}, "ranks 3: must be an even number from 4 on for HYBRID_SHARD"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(facts, line):
    with pytest.raises(ConfigError) as refused:
        Experiment(**{"technique": "DDP", **facts})
    assert str(refused.value).startswith(line)


def test_techniques_are_found_however_they_are_typed():
    typed = ["full-shard", "Full_Shard", "tp x fsdp", "PPxTPxFSDP", "1f1b", "zero-bubble"]
    assert [techniques.named(text) for text in typed] == [
        *["FULL_SHARD"] * 2,
        "TP × FSDP",
        "PP × TP × FSDP",
        "1F1B",
        "Zero bubble",
    ]
    with pytest.raises(ConfigError, match=r"techniques zero: must be one of one rank, DDP"):
        techniques.named("zero")


def test_a_batch_in_parts_has_all_samples():
    batch = Batch({"x": torch.arange(7)}, torch.arange(7) * 2)
    parts = batch.parts(4)
    assert [len(part) for part in parts] == [2, 2, 2, 1]
    assert torch.cat([part.inputs["x"] for part in parts]).tolist() == list(range(7))
    assert torch.equal(torch.cat([part.target for part in parts]), batch.target)


def test_numbers_are_cast_and_tokens_are_not():
    batch = Batch({"x": torch.zeros(1), "tokens": torch.zeros(1, dtype=torch.int64)}, torch.zeros(1))
    dtypes = {name: value.dtype for name, value in batch.to(torch.float64).inputs.items()}
    assert dtypes == {"x": torch.float64, "tokens": torch.int64}
    assert batch.to(torch.bfloat16).target.dtype == torch.float32


def one_step(**facts):
    """Loss, and what a meter finds, of one step on one rank."""
    made = data.OneRank(Experiment("one rank", "small", 1, 4, **facts), SMALL, torch.device("cpu"))
    meter = Meter(made.modules, made.optimizer, made.timeline)
    with meter.measuring():
        loss = made.step(SMALL.batch(4, 0).to(torch.float64 if facts.get("precision") == "fp64" else torch.float32))
    return loss, meter


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_one_rank_holds_what_the_formula_says(precision):
    _, meter = one_step(precision=precision)
    formula = data.OneRank.formula(Experiment("one rank", "small", 1, 4, precision=precision))
    found = vars(meter.memory)
    for part in ("parameters", "gradients", "optimizer", "gathered"):
        assert found[part] == pytest.approx(formula[part], rel=0.02), part
    assert formula["activations"] < found["activations"] < 1.3 * formula["activations"]  # the head is not in it
    assert meter.sent == []


def test_a_checkpointed_step_keeps_less_and_has_the_same_loss():
    (loss, whole), (again, less) = one_step(), one_step(checkpointing=True)
    assert loss == again
    formula = data.OneRank.formula(Experiment("one rank", "small", 1, 4, checkpointing=True))
    assert less.memory.activations < 0.6 * whole.memory.activations
    assert less.memory.activations == pytest.approx(formula["activations"], rel=0.1)


def test_activations_are_counted_once_and_given_back():
    layer, meter_input = nn.Linear(8, 8, bias=False), torch.randn(4, 8)
    timeline_of = data.OneRank(Experiment("one rank", "small", 1, 4), SMALL, torch.device("cpu")).timeline
    optimizer = techniques.adam(layer)
    meter = Meter([layer], optimizer, timeline_of)
    with meter.measuring():
        hidden = layer(meter_input)
        (hidden * hidden).sum().backward()
        layer(meter_input).sum().backward()
        optimizer.step()
    assert meter.memory.activations == meter_input.nbytes + hidden.nbytes  # not the weight, not `hidden` twice


def test_memory_is_that_of_storages():
    whole = torch.zeros(10)
    assert held([whole, whole[2:], whole.view(5, 2)]) == 40


def test_the_values_of_a_layer_are_16():
    assert sizing.activation_factor() == 34
    assert sizing.activation_factor(each=2, dropout=False) == 32
    assert sizing.activation_factor(each=4, dropout=False) == 64
    assert sizing.activation_factor(4, each=2, dropout=False) == 14
    less = sizing.checkpointed(1, 1, 1, 8, each=4, dropout=False)
    assert less == 8 * 4 + 64


@pytest.mark.parametrize("technique", ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"])
def test_formulas_are_those_of_the_strategies(technique):
    formula = techniques.technique(technique).formula(Experiment(technique, "small"))
    count = sum(one.numel() for one in SMALL.model().parameters())
    strategy = sizing.strategies(sizing.training_state(count, (4, 4, 8)), 4, 2)[technique]
    sent = formula["all_gather"] + formula["reduce_scatter"] + formula["all_reduce"]
    assert sent == pytest.approx(strategy.inside + strategy.between)
    kept = sum(formula[part] for part in ("parameters", "gradients", "optimizer", "gathered"))
    extra = formula["parameters"] if technique == "SHARD_GRAD_OP" else 0  # the shard itself is kept beside the whole
    assert kept == pytest.approx(strategy.memory + extra)


def test_differences_are_relative_and_show_what_is_no_number():
    expected = {"a": torch.tensor([3.0, 4.0])}
    found = rank.differences([2.0, 1.1], [2.0, 1.0], {"a": torch.tensor([3.0, 4.5])}, expected)
    assert found == pytest.approx({"loss_difference": 0.1, "weights_difference": 0.1, "largest_difference": 0.5})
    found = rank.differences([1.0, math.nan], [1.0, 1.0], {"a": torch.tensor([math.nan, 4.0])}, expected)
    assert all(map(math.isnan, found.values()))
    with pytest.raises(ValueError, match="weights differ in name"):
        rank.differences([1.0], [1.0], {"b": expected["a"]}, expected)


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job of two experiments on two ranks whose launcher is gone."""
    monkeypatch.chdir(tmp_path)
    folder = training_folder.create([Experiment("DDP", ranks=2), Experiment("FULL_SHARD", ranks=2)])
    (folder / "launcher.log").write_text("once\nModuleNotFoundError: nothing\n")
    return training.Job(folder)


def write(job, *events):
    for number, event in enumerate(events):
        with (job.folder / "events" / f"rank-{event['rank']}.jsonl").open("a") as file:
            file.write(json.dumps({"t": float(number), **event}) + "\n")


START = {"kind": "start", "pid": 2**30, "created": 0.0, "host": socket.gethostname()}
ERROR = {"kind": "error", "experiment": 1}


@pytest.mark.parametrize(
    ("events", "outcome", "line"),
    [
        ([], "failed", "no rank has started: ModuleNotFoundError: nothing"),
        (
            [{"rank": 0, **ERROR, "error": "gloo", "lost": True}, {"rank": 1, **ERROR, "error": "NaN", "lost": False}],
            "failed",
            "experiment 2 of 2 (FULL_SHARD, transformer, 2 ranks, batch 8), rank 1: NaN",
        ),
        (
            [{"rank": 1, "kind": "step", "experiment": 1, "step": 0}, {"rank": 0, **ERROR, "error": "g", "lost": True}],
            "failed",
            "experiment 2 of 2 (FULL_SHARD, transformer, 2 ranks, batch 8), rank 1: ended without a word: "
            "killed, or out of memory",
        ),
        ([{"rank": rank, "kind": "terminated", "orphaned": False} for rank in (0, 1)], "stopped", None),
        (
            [{"rank": rank, "kind": "terminated", "orphaned": True} for rank in (0, 1)],
            "failed",
            "the launcher was killed",
        ),
    ],
)
def test_the_end_of_a_job_is_told_in_one_line(job, events, outcome, line):
    write(job, *([{"rank": rank, **START} for rank in (0, 1)] if events else []), *events)
    assert (job.outcome(), job.failure()) == (outcome, line)
    if outcome == "failed":
        with pytest.raises(RuntimeError) as raised:
            job.wait()
        assert str(raised.value) == line
        assert line.partition(":")[0] in training.page(job)


AGENT = """Traceback (most recent call last):
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\x20
============================================================
[0]:
  exitcode  : {}
  traceback : {}
============================================================
"""


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (AGENT.format("-9 (pid: 18888)  (SIGKILL)", "Signal 9 (SIGKILL) received by PID 18888"), "killed by SIGKILL"),
        ("ImportError: no torch\n" + AGENT.format("1 (pid: 7)", "To enable traceback see: …"), "ImportError: no torch"),
        ("no python here\n===\n", "no python here"),
        ("", "nothing was written"),
    ],
)
def test_a_job_without_a_first_rank_says_why(job, log, words):
    (job.folder / "launcher.log").write_text(log)
    assert job.failure() == f"no rank has started: {words}"


def test_progress_is_read_from_events(job):
    write(job, *({"rank": rank, "kind": "step", "experiment": 0, "step": rank} for rank in (0, 1)))
    assert job.progress() == {
        "share": pytest.approx(1 / 6),
        "finished": 0,
        "ranks": [{"rank": 0, "steps": 1}, {"rank": 1, "steps": 2}],
    }
    created = processes.created_s(os.getpid())
    (job.folder / "launcher.json").write_text(json.dumps({"pid": os.getpid(), "created": created}))
    assert job.outcome() is None
    assert [words in training.page(job) for words in ("running, 0 of 2", "DDP, transformer", "2 of 3 steps")] == [
        True
    ] * 3


def test_a_job_is_found_again_and_runs_are_listed_without_it(job):
    import launch

    assert training.attach(job.job_id).experiments == job.experiments
    assert launch.jobs() == []
    with pytest.raises(ConfigError, match="job_id nothing: must be a folder under"):
        training.attach("nothing")
    with pytest.raises(ConfigError, match="experiments"):
        training.start([])


def result(technique, formula, **facts):
    memory = {"parameters": 4e6, "gradients": 4e6, "optimizer": 8e6, "activations": 1e6, "gathered": 0}
    sent = [{"collective": "all_reduce", "group": "all", "calls": 2, "bytes": 3e6}]
    ranks = [{"memory": memory, "sent": sent, "events": []}, {"memory": memory, "sent": [], "events": []}]
    differences = {"loss_difference": 1e-8, "weights_difference": 2e-8, "largest_difference": 3e-6, "step_s": 0.5}
    experiment = vars(Experiment(technique, ranks=2, **facts))
    return {"experiment": experiment, **differences, "formula": formula, "ranks": ranks}


def test_tables_have_measured_and_formula():
    formula = {"parameters": 4e6, "gradients": 4e6, "optimizer": 8e6, "activations": math.nan, "all_reduce": 3e6}
    results = [result("DDP", formula), result("FULL_SHARD", {}), result("FULL_SHARD", {}, checkpointing=True)]
    held, sent = compared.held(results), compared.sent(results)
    assert list(held["measured"].index) == [
        "DDP",
        "FULL_SHARD, transformer, 2 ranks, batch 8",
        "FULL_SHARD, transformer, 2 ranks, batch 8, checkpointing",
    ]
    assert held["measured"].loc["DDP", "optimizer"] == held["formula"].loc["DDP", "optimizer"] == 8e6
    assert sent["measured"].loc["DDP"].to_dict() == {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 3e6, "send": 0}
    assert sent["formula"].loc["DDP", "all_gather"] == 0
    assert sent["formula"].iloc[1].isna().all()
    assert isinstance(compared.equality(results), pd.DataFrame)
    lines = compared.in_words(results)
    assert max(map(len, lines)) <= 100
    assert "4.00 1.000" in "\n".join(lines)


def test_the_help_names_what_the_command_knows():
    names = cli_training.TECHNIQUES.partition(": ")[2].partition(";")[0].split(", ")
    assert names == list(techniques.PLACES)
    assert [re.sub(r"\(.*?\)", "", cli_training.PROBLEMS).count(f" {name}") for name in PROBLEMS] == [1] * len(PROBLEMS)
