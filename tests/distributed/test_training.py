"""Training that is split over ranks is one rank's training, and holds and sends what the formulas say."""

from __future__ import annotations

import functools
import os
import signal

import psutil
import pytest

from tests.distributed.conftest import forked_ranks
from tests.distributed.training import EXPERIMENTS
from vdpp_core.lessons import compared, training, training_folder
from vdpp_core.lessons.experiments import Experiment
from vdpp_core.runs import processes

TOLERANCES = {
    "fp32": ("weights_difference", 1e-6),
    "fp64": ("largest_difference", 1e-9),
    "bf16": ("weights_difference", 1e-6),
}


@functools.cache
def results():
    return forked_ranks(4, "tests.distributed.training")


def chosen(**facts):
    return [one for one in results() if facts.items() <= one["experiment"].items()]


@pytest.mark.parametrize("number", range(len(EXPERIMENTS)), ids=[experiment.name for experiment in EXPERIMENTS])
def test_loss_and_weights_are_those_of_one_rank(number):
    result = results()[number]
    experiment = EXPERIMENTS[number]
    name, tolerance = TOLERANCES[experiment.precision]
    assert len(result["losses"]) == experiment.steps
    assert result["loss_difference"] <= tolerance
    assert 0 <= result[name] <= tolerance  # not NaN
    assert len(set(map(str, (rank["losses"] for rank in result["ranks"])))) == 1


def test_bytes_sent_are_those_of_the_formula():
    tables = compared.sent(results())
    measured, formula = tables["measured"], tables["formula"]
    assert ((measured - formula).abs() <= 0.01 * formula).all(axis=None), measured / formula


def test_memory_is_that_of_the_formula():
    tables = compared.held(chosen(problem="small"))
    measured, formula = tables["measured"], tables["formula"]
    state = ["parameters", "gradients", "optimizer", "gathered"]
    assert ((measured - formula).abs() <= 0.01 * formula)[state].all(axis=None), measured / formula
    assert ((measured - formula).abs() <= 0.1 * formula)["activations"].all(), measured / formula


def test_a_unet_is_held_in_shards():
    tables = compared.held(chosen(problem="small svd", checkpointing=False))
    state = ["parameters", "gradients", "optimizer", "gathered"]
    assert ((tables["measured"] - tables["formula"]).abs() <= 0.01 * tables["formula"])[state].all(axis=None)


def test_hybrid_sharding_gathers_inside_groups_and_reduces_between_them():
    (result,) = chosen(technique="HYBRID_SHARD", problem="small", precision="fp32")
    groups = {one["collective"]: one["group"] for one in result["ranks"][0]["sent"]}
    assert groups == {"all_gather": "shard", "reduce_scatter": "shard", "all_reduce": "replicate"}


def test_what_a_step_does_is_recorded():
    for result in results():
        for rank in result["ranks"]:
            assert [span["kind"] for span in rank["events"]] == ["forward", "backward", "optimizer"]
            assert all(0 <= span["begin"] <= span["end"] for span in rank["events"])


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def left(job):
    starts = [event for event in training_folder.events(job.folder) if event["kind"] == "start"]
    return [event for event in starts if processes.is_alive(event["pid"], event["created"])]


def test_a_killed_rank_ends_the_job_which_keeps_what_is_finished(here, wait_until):
    done = [  # the second one's mesh of tensor parallelism equals the first one's, whose groups are gone
        Experiment("TP × FSDP", "small", ranks=4, steps=1),
        Experiment("PP × TP × FSDP", "small", ranks=4, steps=1, micro_batches=2),
    ]
    job = training.start([*done, Experiment("FULL_SHARD", ranks=2, steps=1000)])
    wait_until(lambda: (job.progress()["finished"] == 2 and job.progress()["ranks"]) or job.failure(), 120)
    assert job.failure() is None
    assert [bar in training.page(job) for bar in ("2 of 3 experiments", "rank 1")] == [True, True]
    victim = next(event for event in left(job) if event["rank"] == 1)
    os.kill(victim["pid"], signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"^experiment 2 \(FULL_SHARD, .*\), rank 1: ended without a word"):
        job.wait(60)
    assert job.outcome() == "failed"
    assert [result["experiment"]["technique"] for result in job.results()] == [one.technique for one in done]
    wait_until(lambda: not left(job), 20)
    assert training.attach(job.job_id).table()["weights_difference"].max() <= 1e-6


def test_a_job_is_stopped_with_its_ranks(here, wait_until):
    job = training.start([Experiment("one rank", ranks=1, batch=2, steps=1000)])
    wait_until(lambda: job.progress()["ranks"] or left(job), 120)
    ranks = left(job)
    job.stop()
    assert (job.outcome(), job.failure()) == ("stopped", None)
    assert not any(psutil.pid_exists(event["pid"]) for event in ranks)
