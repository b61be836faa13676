"""What the ranks of a pipeline did in a step, beside its formulas: bubble, activations kept, bytes of each hop."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from vdpp_core.lessons import sizing
from vdpp_core.lessons.experiments import Experiment
from vdpp_core.lessons.measure import Span

COMPUTING = ("forward", "loss", "backward", "input gradients", "weight gradients")
_BACKWARD = ("backward", "input gradients")  # what the previous stage waits for
_FREES = ("backward", "weight gradients")

Ranks = Sequence[Sequence[Span]]


def spans_of(result: dict[str, Any]) -> list[list[Span]]:
    """The spans of each rank in the result of an experiment."""
    return [[Span(**event) for event in rank["events"]] for rank in result["ranks"]]


def computing(ranks: Ranks) -> list[list[Span]]:
    """The spans in which ranks computed for a micro-batch."""
    return [[span for span in spans if span.kind in COMPUTING] for spans in ranks]


def bubble(ranks: Ranks) -> float:
    """1 − mean busy share of the ranks between the first and the last computation of a step."""
    ranks = computing(ranks)
    makespan = max(spans[-1].end for spans in ranks) - min(spans[0].begin for spans in ranks)
    return 1 - sum(span.end - span.begin for spans in ranks for span in spans) / (len(ranks) * makespan)


def unequal_bubble(seconds: Sequence[float], micro_batches: int, chunks: int = 1) -> float:
    """`sizing.bubble` for ranks that differ: the slowest one sets the pace.

    1 − M·mean(t) / (M·max(t) + (Σt − max(t))/v): the slowest rank computes without a pause, and a micro-batch passes a
    chunk of all others before and after it.

    Args:
        seconds: t, of each rank, for one micro-batch, forward and backward.
    """
    slowest, total = max(seconds), sum(seconds)
    return 1 - micro_batches * total / len(seconds) / (micro_batches * slowest + (total - slowest) / chunks)


def parts_of_a_bubble(experiment: Experiment) -> int:
    """v of `sizing.bubble`. A zero-bubble schedule (Qi et al. 2023, ZB-H1) waits for F + B − W in place of F + B + W.

    That is a third, where forward pass F, gradients of inputs B and gradients of weights W take equally long.
    """
    return experiment.chunks * (3 if experiment.technique == "Zero bubble" else 1)


def table(results: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """A row for each result of a pipeline: its bubble and the micro-batches kept by each rank, beside their formulas.

    `without messages` is the bubble of `on_own_cores`, to be compared with the formulas, which know no messages;
    `formula, these stages` is the formula with the seconds of these ranks. A rank keeps activations of so many
    micro-batches, in bytes measured against a result of GPipe with one micro-batch of the same size, NaN without one.
    """
    rows = []
    for result in results:
        experiment = Experiment(**result["experiment"])
        if experiment.technique not in ("GPipe", "1F1B", "Interleaved 1F1B", "Zero bubble"):
            continue
        ranks, parts = spans_of(result), parts_of_a_bubble(experiment)
        own = on_own_cores(ranks)
        rows.append(
            {
                "technique": experiment.technique,
                "problem": experiment.problem,
                "ranks": experiment.ranks,
                "micro_batches": experiment.micro_batches,
                "chunks": experiment.chunks,
                "bubble": bubble(ranks),
                "without messages": bubble(own),
                "formula, these stages": unequal_bubble(seconds(ranks), experiment.micro_batches, parts),
                "formula": sizing.bubble(experiment.ranks, experiment.micro_batches, parts),
                "kept per rank": _kept_in_bytes(result, experiment, results),
                "kept, formula": expected_kept(experiment),
            }
        )
    return pd.DataFrame(rows)


def _kept_in_bytes(result: dict[str, Any], experiment: Experiment, results: Sequence[dict[str, Any]]) -> list[float]:
    size = experiment.batch // experiment.micro_batches
    one = replace(experiment, technique="GPipe", batch=size, micro_batches=1, chunks=1, steps=1)
    units = [each for each in results if replace(Experiment(**each["experiment"]), steps=1) == one]
    bytes_of = [[rank["memory"]["activations"] for rank in each["ranks"]] for each in (result, *units[:1])]
    return [kept / unit for kept, unit in zip(*bytes_of, strict=True)] if units else [math.nan] * experiment.ranks


def on_own_cores(ranks: Ranks) -> list[list[Span]]:
    """The step as it would be if no two ranks shared a core and messages took no time.

    The same operations in the same order, each of as many seconds as it computed, and as early as its input is there.
    """
    ranks = computing(ranks)

    def key(rank: int, span: Span, further: int = 0) -> tuple[bool, int, int]:
        return span.kind in _BACKWARD, span.chunk * len(ranks) + rank + further, span.micro_batch

    passed_on = ("forward", *_BACKWARD)
    places = {
        key(rank, span): (rank, at)
        for rank, spans in enumerate(ranks)
        for at, span in enumerate(spans)
        if span.kind in passed_on
    }

    @functools.cache
    def begin(rank: int, at: int) -> float:
        span = ranks[rank][at]
        needed = places.get(key(rank, span, 1 if span.kind in _BACKWARD else -1)) if span.kind in passed_on else None
        before = (rank, at - 1) if at else None
        return max((begin(*each) + ranks[each[0]][each[1]].cpu for each in (before, needed) if each), default=0.0)

    return [
        [replace(span, begin=begin(rank, at), end=begin(rank, at) + span.cpu) for at, span in enumerate(spans)]
        for rank, spans in enumerate(ranks)
    ]


def seconds(ranks: Ranks) -> list[float]:
    """What each rank computes for a micro-batch, in CPU seconds: the mean of those of a step."""
    return [
        sum(span.cpu for span in spans) / (1 + max(span.micro_batch for span in spans)) for spans in computing(ranks)
    ]


def kept(spans: Sequence[Span]) -> float:
    """Most micro-batches at once whose activations a rank keeps; a chunk counts as its share."""
    chunks, now, most = 1 + max(span.chunk for span in spans), 0, 0
    for span in spans:
        now += (span.kind == "forward") - (span.kind in _FREES)
        most = max(most, now)
    return most / chunks


def expected_kept(experiment: Experiment) -> list[float]:
    """`sizing.micro_batches_kept` of each rank: later ones keep fewer with 1F1B, since gradients are there sooner.

    A zero-bubble schedule computes gradients of weights later on later ranks, so all keep as many as the first.
    """
    count, parts, chunks = experiment.ranks, experiment.micro_batches, experiment.chunks
    if experiment.technique == "GPipe":
        return [parts] * count
    if experiment.technique == "1F1B":
        return [min(parts, count - rank) for rank in range(count)]
    if experiment.technique == "Zero bubble":
        return [min(parts, ((chunks - 1) * count + count) / chunks)] * count
    return [min(parts, ((chunks - 1) * count + 2 * (count - 1 - rank) + 1) / chunks) for rank in range(count)]
