"""What measurements say of the article's claims, from results that are exactly what the formulas say."""

from __future__ import annotations

from dataclasses import asdict

from vdpp_core.lessons import article
from vdpp_core.lessons.experiments import Experiment
from vdpp_core.lessons.measured import measured
from vdpp_core.lessons.techniques import technique

GROUPS = {"HYBRID_SHARD": {"all_gather": "shard", "reduce_scatter": "shard", "all_reduce": "replicate"}}
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "send")


def by_formula(name, **given):
    experiment = Experiment(name, **given)
    formula = technique(name).formula(experiment)
    groups = GROUPS.get(name, {})
    sent = [
        {"collective": kind, "group": groups.get(kind, "all"), "calls": 1, "bytes": formula[kind]}
        for kind in COLLECTIVES
        if formula.get(kind)
    ]
    rank = {"memory": formula, "sent": sent, "events": []}
    return {"experiment": asdict(experiment), "ranks": [rank] * experiment.ranks, "weights_difference": 1.5e-7}


def pipeline(name, spans, chunks=1):
    """Two ranks and two micro-batches: the spans of both ranks as (kind, micro-batch, chunk)."""
    events = [
        [
            {"kind": kind, "micro_batch": part, "chunk": chunk, "begin": 0.0, "end": 1.0, "cpu": 1.0}
            for kind, part, chunk in own
        ]
        for own in spans
    ]
    experiment = Experiment(name, ranks=2, batch=2, micro_batches=2, chunks=chunks)
    message = 4 * 128 * 256  # of a sample
    sent = [{"collective": "send", "group": "all", "calls": 2, "bytes": 2 * message}]
    ranks = [{"memory": {"activations": 8 * 2 * message * 17 / 2}, "sent": sent, "events": own} for own in events]
    return {"experiment": asdict(experiment), "ranks": ranks, "weights_difference": 0.0}


GPIPE = [[(kind, part, 0) for kind in ("forward", "backward") for part in (0, 1)]] * 2


def test_ratios_of_memory_and_traffic():
    names = ("DDP", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "TP", "TP × FSDP")
    found = measured([by_formula(name) for name in names])
    assert found["state a GPU, DDP"] == "16 bytes a parameter in fp32, on each of 4 ranks"
    assert found["optimizer states"] == "8 bytes a parameter in fp32"
    assert found["state a GPU of 8"] == "1 P of 4 P on each of 4 ranks"
    assert found["memory saved over 8"] == "4 times over 4"
    assert found["activations a value"] == "32 bytes in 16 bits, without dropout"
    assert found["activations a value, TP 8"] == "TP 4: 14 bytes in 16 bits, without dropout"
    assert found["all-gather, reduce-scatter over 8"] == "0.75 P and 0.75 P over 4"
    assert found["FSDP an iteration"] == "2.25 P, without the second all-gather 1.5 P"
    assert found["NO_SHARD against SHARD_GRAD_OP"] == "1.5 P and 1.5 P"
    assert found["HYBRID_SHARD between 4 nodes of 8"] == "0.5 P between two groups, 1.5 P inside"
    assert found["HYBRID_SHARD in all"] == "2 P, FULL_SHARD 2.25 P"
    assert found["TP, traffic of 80 layers"] == "TP 4: 6 messages a layer, 4 · 2(N−1)/N"
    assert found["2D, TP 8 × DP 4"].startswith("TP 2 × FSDP on 4 ranks: weights within 1e-07 of one rank's")


def test_bubbles_micro_batches_and_messages():
    found = measured([pipeline("GPipe", GPIPE), pipeline("1F1B", GPIPE)])
    assert found["bubble, P 4, M 8"] == found["GPipe's bubble"] == "P 2, M 2: 33.3% without messages, formula 33.3%"
    assert found["GPipe's memory, P 4, M 8"] == "P 2, M 2: 1F1B 2, GPipe 2 micro-batches"
    assert found["PP, a micro-batch"] == "1 times hidden · samples · sequence values"
    assert found["PP, 8 micro-batches"] == "2 times M messages over each of 1 boundaries"
    assert found["activations of a stage, P 4, M 8"] == "P 2: 17 bytes a value of all layers, in 16 bits"


def test_claims_have_a_column_for_what_was_measured():
    found = measured([by_formula("DDP"), by_formula("FULL_SHARD", precision="bf16")])
    table = article.claims(found).set_index("claim")
    assert set(found) <= set(table.index)
    assert (table["measured"] != "").sum() == len(found)
    assert "state a GPU of 8" not in found  # only measured in bf16
