"""Pipelines of layers train as one rank does, keep and send what the formulas say, and denoise bit-equally."""

from __future__ import annotations

import functools
import json

import pytest

from tests.distributed.conftest import forked_ranks

SCHEDULES = [("GPipe", 1), ("1F1B", 1), ("Interleaved 1F1B", 2), ("Zero bubble", 1), ("Zero bubble", 2)]
TRANSFORMER = [
    {"technique": technique, "chunks": chunks, "precision": precision, "micro_batches": 4}
    for precision in ("fp32", "fp64")
    for technique, chunks in SCHEDULES
]
UNEVEN = {"technique": "1F1B", "micro_batches": 4, "precision": "fp64"}
UNET = {"problem": "svd", "precision": "fp64", "micro_batches": 4, "batch": 4, "steps": 2}
DENOISING = {"samples": 3, "steps": 2}
CASES = {
    2: [
        *TRANSFORMER,
        {"technique": "GPipe", "batch": 2, "steps": 2},
        {"technique": "1F1B", "micro_batches": 4, "precision": "bf16"},
        {"technique": "1F1B", "micro_batches": 4, "checkpointing": True},
        UNEVEN | {"cut": [2, 10]},
        UNET | {"technique": "Interleaved 1F1B", "chunks": 2},
        UNET | {"technique": "GPipe", "precision": "fp32", "cut": [4, 16]},
        UNET | {"technique": "Zero bubble"},
        DENOISING,
    ],
    4: [*TRANSFORMER[5:], UNEVEN | {"cut": [1, 2, 8, 10]}, UNET | {"technique": "1F1B"}],
}
ALL = [(ranks, json.dumps(case)) for ranks, cases in CASES.items() for case in cases if case != DENOISING]


@functools.cache
def of_ranks(ranks):
    """What the ranks found, for all cases of so many of them."""
    return forked_ranks(ranks, "tests.distributed.training_pipelines", *map(json.dumps, CASES[ranks]))


@pytest.mark.parametrize(("ranks", "case"), ALL)
def test_losses_and_weights_are_those_of_one_rank(ranks, case):
    found = of_ranks(ranks)[case]
    assert found["loss_difference"] <= 1e-6
    assert found["weights_difference"] <= 1e-6
    assert json.loads(case).get("precision") != "fp64" or found["largest_difference"] <= 1e-9


@pytest.mark.parametrize(("ranks", "case"), ALL)
def test_ranks_keep_and_send_what_the_formulas_say(ranks, case):
    found = of_ranks(ranks)[case]
    assert found["kept"] == found["kept, formula"]
    assert json.loads(case).get("precision") == "bf16" or found["sent"] == found["sent, formula"]


def test_activations_in_bytes_are_those_of_the_micro_batches_kept():
    found = of_ranks(2)
    unit = found[json.dumps(CASES[2][10])]["activations"]
    for case, kept in zip(CASES[2][:2], ([4, 4], [2, 1]), strict=True):
        bytes_kept = found[json.dumps(case)]["activations"]
        assert [one / other for one, other in zip(bytes_kept, unit, strict=True)] == pytest.approx(kept, rel=0.05)


def test_the_first_rank_computes_in_the_order_of_the_schedule():
    found = of_ranks(2)
    orders = {case["technique"]: found[json.dumps(case)]["first"] for case in CASES[2][:4]}
    letters = {"forward": "F", "backward": "B", "input gradients": "I", "weight gradients": "W"}
    written = {
        name: " ".join(f"{letters[kind]}{micro_batch}{'′' * chunk}" for kind, micro_batch, chunk in order)
        for name, order in orders.items()
    }
    assert written == {
        "GPipe": "F0 F1 F2 F3 B0 B1 B2 B3",
        "1F1B": "F0 F1 B0 F2 B1 F3 B2 B3",
        "Interleaved 1F1B": "F0 F1 F0′ F1′ F2 B0′ F3 B1′ F2′ B0 F3′ B1 B2′ B3′ B2 B3",
        "Zero bubble": "F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3",
    }


def test_layers_spread_over_ranks_denoise_bit_equally():
    found = of_ranks(2)[json.dumps(DENOISING)]
    assert found == {"same": True, "hops": 3 * (2 + 1)}
