"""What CPU ranks measured for the claims of the article: its ratios, on a small transformer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from vdpp_core.lessons import bubbles, sizing
from vdpp_core.lessons.data import size
from vdpp_core.lessons.problems import PROBLEMS, TransformerProblem

Result = dict[str, Any]
EACH = 4  # bytes of a value in fp32
STATE = ("parameters", "gradients", "optimizer")


def measured(results: Sequence[Result]) -> dict[str, str]:
    """Claim of `article.claims` -> what these results say of it. Claims without a result are left out.

    Of each technique, the first experiment counts that trained a transformer in fp32 without checkpointing. P is the
    size of all parameters, and of all gradients.
    """
    found: dict[str, Result] = {}
    for one in results:
        facts = one["experiment"]
        is_plain = facts["precision"] == "fp32" and not facts["checkpointing"]
        if is_plain and isinstance(PROBLEMS[facts["problem"]], TransformerProblem):
            found.setdefault(facts["technique"], one)
    return dict([*_data(found), *_tensor(found), *_pipelines(found)])


def _whole(result: Result) -> float:
    """Bytes of all parameters."""
    return EACH * size(result["experiment"]["problem"])[0]


def _problem(result: Result) -> TransformerProblem:
    problem = PROBLEMS[result["experiment"]["problem"]]
    assert isinstance(problem, TransformerProblem)
    return problem


def _held(result: Result, *parts: str) -> float:
    """Bytes that the rank with most of it holds, in units of P."""
    return max(sum(rank["memory"][part] for part in parts) for rank in result["ranks"]) / _whole(result)


def _sent(result: Result, collective: str = "", group: str = "") -> float:
    """Bytes that a rank sends in a step, in units of P."""
    sizes = [
        one["bytes"]
        for one in result["ranks"][0]["sent"]
        if collective in ("", one["collective"]) and group in ("", one["group"])
    ]
    return sum(sizes) / _whole(result)


def _values(result: Result, samples: float) -> float:
    """Values of the hidden state of all layers."""
    problem = _problem(result)
    return samples * problem.sequence * problem.hidden * problem.layers


def _a_value(result: Result, samples: float) -> str:
    """Activation bytes a value, as they would be in 16 bits."""
    most = max(rank["memory"]["activations"] for rank in result["ranks"])
    return f"{most / _values(result, samples) * 2 / EACH:.3g} bytes"


def _data(found: dict[str, Result]) -> Iterator[tuple[str, str]]:
    ddp, full, grad_op = (found.get(name) for name in ("DDP", "FULL_SHARD", "SHARD_GRAD_OP"))
    if ddp:
        ranks, batch = ddp["experiment"]["ranks"], ddp["experiment"]["batch"]
        yield "optimizer states", f"{EACH * _held(ddp, 'optimizer'):.3g} bytes a parameter in fp32"
        yield "state a GPU, DDP", f"{EACH * _held(ddp, *STATE):.3g} bytes a parameter in fp32, on each of {ranks} ranks"
        yield "activations a value", f"{_a_value(ddp, batch / ranks)} in 16 bits, without dropout"
    if full:
        over = f"on each of {full['experiment']['ranks']} ranks"
        shares = [f"{_held(full, part):.4g}" for part in STATE]
        yield "parameters and gradients a GPU of 8", f"{shares[0]} P and {shares[1]} P {over}"
        yield "optimizer states a GPU of 8", f"{shares[2]} P of 2 P {over}"
        yield "state a GPU of 8", f"{_held(full, *STATE):.4g} P of 4 P {over}"
        once, reduced = _sent(full, "all_gather") / 2, _sent(full, "reduce_scatter")
        yield "all-gather, reduce-scatter over 8", f"{once:.4g} P and {reduced:.4g} P over {len(full['ranks'])}"
    if ddp and full:
        saved = _held(ddp, *STATE) / _held(full, *STATE)
        yield "memory saved over 8", f"{saved:.4g} times over {full['experiment']['ranks']}"
    if full and grad_op:
        yield "FSDP an iteration", f"{_sent(full):.4g} P, without the second all-gather {_sent(grad_op):.4g} P"
    if (no_shard := found.get("NO_SHARD") or ddp) and grad_op:
        yield "NO_SHARD against SHARD_GRAD_OP", f"{_sent(no_shard):.4g} P and {_sent(grad_op):.4g} P"
    if (hybrid := found.get("HYBRID_SHARD")) and full:
        between, inside = _sent(hybrid, group="replicate"), _sent(hybrid, group="shard")
        yield "HYBRID_SHARD between 4 nodes of 8", f"{between:.4g} P between two groups, {inside:.4g} P inside"
        yield "HYBRID_SHARD in all", f"{_sent(hybrid):.4g} P, FULL_SHARD {_sent(full):.4g} P"


def _tensor(found: dict[str, Result]) -> Iterator[tuple[str, str]]:
    if tensor := found.get("TP"):
        ranks, batch = tensor["experiment"]["ranks"], tensor["experiment"]["batch"]
        note = f"TP {ranks}, with embeddings, norms and head whole"
        shares = [f"{_held(tensor, part):.3g}" for part in STATE]
        yield "parameters and gradients a GPU, TP 8", f"{shares[0]} P and {shares[1]} P: {note}"
        yield "optimizer states a GPU, TP 8", f"{shares[2]} P of 2 P: {note}"
        yield "activations a value, TP 8", f"TP {ranks}: {_a_value(tensor, batch)} in 16 bits, without dropout"
        messages = _sent(tensor, "all_reduce") * _whole(tensor) / EACH / _values(tensor, batch)
        yield "TP, traffic of 80 layers", f"TP {ranks}: {messages:.3g} messages a layer, 4 · 2(N−1)/N"
    for name, claim in (("TP × FSDP", "2D, TP 8 × DP 4"), ("PP × TP × FSDP", "3D, TP 8 × PP 16 × DP 8")):
        if one := found.get(name):
            ranks = one["experiment"]["ranks"]
            axes = f"{name.replace('TP', 'TP 2').replace('PP ', 'PP 2 ')} on {ranks} ranks"
            apart, share = one["weights_difference"], _held(one, *STATE) / 4
            yield claim, f"{axes}: weights within {apart:.0e} of one rank's, {share:.3g} of its state a rank"


def _pipelines(found: dict[str, Result]) -> Iterator[tuple[str, str]]:
    def setting(one: Result) -> str:
        return f"P {one['experiment']['ranks']}, M {one['experiment']['micro_batches']}"

    names = {"1F1B": "bubble, P 4, M 8", "GPipe": "GPipe's bubble", "Interleaved 1F1B": "interleaved bubble, 2 chunks"}
    kept = {}
    for name, claim in names.items():
        if one := found.get(name):
            spans = bubbles.spans_of(one)
            waits, facts = bubbles.bubble(bubbles.on_own_cores(spans)), one["experiment"]
            formula = sizing.bubble(facts["ranks"], facts["micro_batches"], facts["chunks"])
            yield claim, f"{setting(one)}: {waits:.1%} without messages, formula {formula:.1%}"
            kept[name] = f"{name} {max(map(bubbles.kept, spans)):g}"
    if "GPipe" in kept:
        yield "GPipe's memory, P 4, M 8", f"{setting(found['GPipe'])}: {', '.join(kept.values())} micro-batches"
    if "Interleaved 1F1B" in kept:
        text = f"{setting(found['Interleaved 1F1B'])}: {', '.join(kept.values())} micro-batches"
        yield "interleaved memory, P 4, M 8", text
    if one := found.get("GPipe"):
        yield from _stages(one)


def _stages(gpipe: Result) -> Iterator[tuple[str, str]]:
    """What GPipe's stages keep and send."""
    facts = gpipe["experiment"]
    ranks, count, batch = facts["ranks"], facts["micro_batches"], facts["batch"]
    message = EACH * _values(gpipe, batch / count) / _problem(gpipe).layers
    hops = [sum(one["bytes"] for one in rank["sent"] if one["collective"] == "send") for rank in gpipe["ranks"]]
    yield "activations of a stage, P 4, M 8", f"P {ranks}: {_a_value(gpipe, batch)} a value of all layers, in 16 bits"
    yield "PP, a micro-batch", f"{hops[0] / count / message:.3g} times hidden · samples · sequence values"
    times = sum(hops) / (ranks - 1) / count / message
    yield "PP, 8 micro-batches", f"{times:.3g} times M messages over each of {ranks - 1} boundaries"
