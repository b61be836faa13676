"""What training jobs found, as tables: each technique beside one rank, and beside its formulas."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import pandas as pd

from vdpp_core.lessons.experiments import Experiment
from vdpp_core.lessons.measure import Memory

Results = Sequence[dict[str, Any]]
Tables = dict[str, pd.DataFrame]

HELD = [field.name for field in fields(Memory)]
SENT = ["all_gather", "reduce_scatter", "all_reduce", "send"]
NUMBERS = ["loss_difference", "weights_difference", "largest_difference", "step_s"]
MB = 1e6


def equality(results: Results) -> pd.DataFrame:
    """A row for each experiment: what it was, how far loss and weights are from one rank's, and seconds of a step.

    Differences of losses and weights are relative, that of weights in the L2 norm; the largest one is absolute.
    """
    return pd.DataFrame([{**result["experiment"], **{name: result[name] for name in NUMBERS}} for result in results])


def held(results: Results) -> Tables:
    """Bytes that a rank holds: "measured" and "formula" -> a row for each experiment, a column for each part.

    Of each part, the rank with most of it. NaN where there is no formula.
    """
    return _tables(results, HELD, [[rank["memory"] for rank in result["ranks"]] for result in results])


def sent(results: Results) -> Tables:
    """Bytes that a rank sends in a step, by collective; otherwise as `held`."""
    return _tables(results, SENT, [[_by_collective(rank) for rank in result["ranks"]] for result in results])


def _by_collective(rank: dict[str, Any]) -> Counter[str]:
    counted: Counter[str] = Counter()
    for one in rank["sent"]:
        counted[one["collective"]] += one["bytes"]
    return counted


def _tables(results: Results, parts: list[str], found: Sequence[Sequence[Mapping[str, float]]]) -> Tables:
    measured = [{part: max(rank[part] for rank in ranks) for part in parts} for ranks in found]
    formula = [_expected(result["formula"], parts) for result in results]
    names = labels(results)
    return {"measured": pd.DataFrame(measured, names), "formula": pd.DataFrame(formula, names)}


def _expected(formula: Mapping[str, float], parts: list[str]) -> dict[str, float]:
    """What a formula says of each part: nothing of those that it leaves out, unless there is none at all."""
    return {part: formula.get(part, 0.0 if formula else math.nan) for part in parts}


def labels(results: Results) -> list[str]:
    """A name for each experiment: its technique, and more where others have the same."""
    experiments = [Experiment(**result["experiment"]) for result in results]
    count = Counter(one.technique for one in experiments)
    return [one.technique if count[one.technique] == 1 else one.name for one in experiments]


def in_words(results: Results) -> list[str]:
    """The tables as lines for a terminal."""
    head = f"{'':34}{'loss':>10}{'weights':>10}{'largest':>10}{'s/step':>8}"
    lines = ["Difference from one rank after all steps: relative, but for the largest of a weight", head]
    for (_, row), result in zip(equality(results).iterrows(), results, strict=True):
        numbers = [f"{row[name]:10.1e}" for name in NUMBERS[:3]] + [f"{row['step_s']:8.2f}"]
        lines.append(f"{_short(result):34}" + "".join(numbers))
    for title, tables, width in (("A rank holds", held(results), 13), ("A rank sends in a step", sent(results), 16)):
        lines += ["", f"{title}: MB (1e6 bytes), and measured / formula where there is one"]
        lines.append(f"{'':34}" + "".join(f"{part.replace('_', '-'):>{width}}" for part in tables["measured"].columns))
        for place, result in enumerate(results):
            pairs = zip(tables["measured"].iloc[place], tables["formula"].iloc[place], strict=True)
            lines.append(f"{_short(result):34}" + "".join(f"{_cell(*pair):>{width}}" for pair in pairs))
    return lines


def _short(result: dict[str, Any]) -> str:
    one = Experiment(**result["experiment"])
    marks = [f"M{one.micro_batches}"] * (one.micro_batches > 1)
    marks += ["bf16"] * (one.precision == "bf16") + ["ckpt"] * one.checkpointing
    return " ".join([one.technique, one.problem.replace("transformer", "gpt"), f"b{one.batch}", *marks])


def _cell(measured: float, formula: float) -> str:
    if not measured and not formula:
        return "–"
    ratio = f"{measured / formula:.3f}" if formula and math.isfinite(formula) else ""
    return f"{measured / MB:.2f} {ratio:>5}"
