"""Training cut by tensors, alone and with FSDP and stages, is one rank's, and holds and sends what the formulas say."""

from __future__ import annotations

import functools
import re

import pytest

from tests.distributed.conftest import forked_ranks
from tests.distributed.tensor_training import EXPERIMENTS
from vdpp_core.config.errors import ConfigError
from vdpp_core.lessons import compared, problems
from vdpp_core.lessons.experiments import Experiment

TOLERANCES = {  # in bf16 partial sums are rounded before they are added
    "fp32": ("weights_difference", 1e-6),
    "fp64": ("largest_difference", 1e-9),
    "bf16": ("weights_difference", 2e-3),
}


@functools.cache
def results():
    return [one for ranks in (4, 8) for one in forked_ranks(ranks, "tests.distributed.tensor_training")]


@pytest.mark.parametrize("number", range(len(EXPERIMENTS)), ids=[experiment.name for experiment in EXPERIMENTS])
def test_loss_and_weights_are_those_of_one_rank(number):
    result, experiment = results()[number], EXPERIMENTS[number]
    name, tolerance = TOLERANCES[experiment.precision]
    assert Experiment(**result["experiment"]) == experiment
    assert len(result["losses"]) == 3
    assert result["loss_difference"] <= tolerance
    assert result[name] <= tolerance
    assert len({str(rank["losses"]) for rank in result["ranks"]}) == 1


def test_bytes_sent_are_those_of_the_formula():
    tables = compared.sent(results())
    assert ((tables["measured"] - tables["formula"]).abs() <= 0.01 * tables["formula"]).all(axis=None), tables


def test_four_all_reduces_a_layer():
    (reduced,) = results()[0]["ranks"][0]["sent"]
    assert reduced["calls"] - 4 * 6 in (0, 1)  # and one of the loss


def test_memory_is_that_of_the_formula():
    tables = compared.held(results())
    ratio = tables["measured"] / tables["formula"]
    assert ratio[["parameters", "gradients", "optimizer"]].sub(1).abs().max(axis=None) <= 0.01, ratio
    assert ratio["gathered"].dropna().sub(1).abs().max() <= 0.05, ratio
    most = [0.12 if one["experiment"]["precision"] == "bf16" else 0.1 for one in results()]  # logits stay in fp32
    assert (ratio["activations"].sub(1).abs() <= most).all(), ratio


def test_each_axis_has_its_messages():
    for result in results():
        if result["experiment"]["technique"] == "PP × TP × FSDP":
            groups = {one["collective"]: one["group"] for one in result["ranks"][0]["sent"] if one["bytes"] > 8}
            assert groups == {"all_gather": "dp", "reduce_scatter": "dp", "all_reduce": "tp", "send": "pp"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"technique": "TP", "ranks": 3}, "ranks 3: tensor parallelism over 3 must divide the 8 heads"),
        ({"technique": "TP", "problem": "svd"}, "problem svd: must be a transformer for tensor parallelism"),
        ({"technique": "TP", "micro_batches": 2}, "micro_batches 2: "),
        ({"technique": "TP × FSDP", "ranks": 3}, "ranks 3: must be an even number from 4 on for TP × FSDP"),
        ({"technique": "TP × FSDP", "batch": 1}, "batch 1: must be at least 2"),
        ({"technique": "PP × TP × FSDP", "ranks": 6, "micro_batches": 2}, "ranks 6: must be a multiple of 4"),
        ({"technique": "PP × TP × FSDP", "ranks": 8}, "micro_batches 1: must be at least 2, the stages"),
        (
            {"technique": "PP × TP × FSDP", "ranks": 8, "batch": 6, "micro_batches": 2},
            "batch 6: must be a multiple of 4",
        ),
        ({"technique": "PP × TP × FSDP", "problem": "svd", "micro_batches": 2}, "problem svd: must be a transformer"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_any_rank_starts(given, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        Experiment(**given)


def test_heads_that_pairs_do_not_divide_are_refused(monkeypatch):
    monkeypatch.setitem(problems.PROBLEMS, "odd", problems.TransformerProblem(hidden=48, heads=3))
    with pytest.raises(ConfigError, match="tensor parallelism over 2 must divide the 3 heads"):
        Experiment("TP × FSDP", "odd")
