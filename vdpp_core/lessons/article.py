"""The figures of the article behind `lessons.sizing`, recomputed and, where they do not hold, corrected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from vdpp_core.lessons import advice
from vdpp_core.lessons.advice import Layout
from vdpp_core.lessons.sizing import (
    activation_factor,
    activations,
    all_gather,
    bubble,
    degree,
    fsdp_traffic,
    gbit_per_s,
    groups,
    least_gpus,
    micro_batches_kept,
    pipeline_traffic,
    strategies,
    tensor_traffic,
    training_state,
)

GB = 1e9
LLAMA = (4096, 8192, 80)  # Llama 3 70B: sequence, hidden, layers


def claims(measured: Mapping[str, str] | None = None) -> pd.DataFrame:
    """The article's claims: its figure, the computed one, whether it holds, and if not, the correct figure and why.

    A figure holds where its arithmetic and its use are right. Model: Llama 3 70B, batch 8, nodes of 8 GPUs.

    Args:
        measured: claim -> what CPU ranks measured, as of `lessons.measured`; then a further column.
    """
    lines = f"{_data_claims()}{_model_claims()}{_combined_claims()}".strip().splitlines()
    cells = [[*line.split(" | "), "", ""][:5] for line in lines if line]
    table = pd.DataFrame(cells, columns=["claim", "article", "computed", "corrected", "why"])
    table.insert(3, "holds", table["corrected"] == "")
    return table if measured is None else table.assign(measured=table["claim"].map(measured).fillna(""))


def _gb(size: float) -> str:
    return f"{size / GB:.4g} GB" if size >= GB else f"{size / 1e6:.4g} MB"


def _data_claims() -> str:
    bf16, mixed = training_state(70e9), training_state(70e9, (4, 4, 8))
    own, real, (p, g, o) = bf16.sharded(8), mixed.sharded(8), bf16
    full, one = (sum(own) + activations(batch, *LLAMA, factor=16) for batch in (8, 1))
    once, twice, fp32 = fsdp_traffic(p, g, 8, False), fsdp_traffic(p, g, 8), fsdp_traffic(p, 2 * g, 8)
    here, four = strategies(bf16, 8, 8), strategies(bf16, 32, 8)
    fsdp, hybrid, ddp, grad_op = four["FULL_SHARD"], four["HYBRID_SHARD"], here["NO_SHARD"], here["SHARD_GRAD_OP"]
    return f"""
parameters and gradients, bf16 | 140 GB, 140 GB | {_gb(p)}, {_gb(g)}
optimizer states | 280 GB | {_gb(o)} | {_gb(mixed.optimizer)} | Only with Adam in bf16; mixed precision keeps fp32.
state a GPU, DDP | 560 GB | {_gb(sum(bf16))} | {_gb(sum(mixed))} | Mixed precision keeps 16 bytes a parameter.
parameters and gradients a GPU of 8 | 17.5 GB, 17.5 GB | {_gb(own.parameters)}, {_gb(own.gradients)}
optimizer states a GPU of 8 | 35 GB | {_gb(own.optimizer)} | {_gb(real.optimizer)} | Mixed precision keeps fp32.
state a GPU of 8 | 70 GB | {_gb(sum(own))} | {_gb(sum(real))} | Mixed precision keeps 16 bytes a parameter.
memory saved over 8 | 8 times | {sum(bf16) / sum(own):g} times
70B fits 8 cards of 80 GB | 70 GB | {_gb(sum(own))} | {_gb(full)}, at batch 1 {_gb(one)} | \
Its own rule for activations comes on top, unless they are recomputed.
activations a value | 16 | {activation_factor():g} bytes | {activation_factor():g} bytes | See Korthikanti 2022.
all-gather, reduce-scatter over 8 | 122.5 GB, 122.5 GB | {_gb(all_gather(p, 8))}, {_gb(all_gather(g, 8))}
FSDP an iteration | 245 GB | {_gb(once)} | {_gb(twice)}, gradients in fp32 {_gb(fp32)} | Backward gathers again.
FSDP at 1 s | 1960 Gbit/s | {gbit_per_s(once):.4g} Gbit/s | {gbit_per_s(twice):.4g} Gbit/s | Backward gathers again.
EFA of a node of 8 | 3200 Gbit/s | {32 * 100} Gbit/s |  | 32 cards of 100 Gbit/s, so 400 Gbit/s a GPU.
FSDP over 8 uses EFA | 1960 Gbit/s | {8 * here["FULL_SHARD"].between / 1e9:g} Gbit/s | \
0 Gbit/s; over 32 GPUs {8 * gbit_per_s(fsdp.between):.4g} Gbit/s a node | \
A node of 8 has NVLink; a ring over four nodes needs more than EFA's 3200 Gbit/s.
NO_SHARD against SHARD_GRAD_OP | less traffic | {_gb(ddp.inside)} | the same, {_gb(grad_op.inside)} | \
An all-reduce is a reduce-scatter and an all-gather.
HYBRID_SHARD between 4 nodes of 8 | less traffic | {_gb(hybrid.between)}, FULL_SHARD {_gb(fsdp.between)}
HYBRID_SHARD in all | low traffic | {_gb(sum(hybrid[1:]))} | FULL_SHARD {_gb(sum(fsdp[1:]))} | Low between nodes only.
"""


def _model_claims() -> str:
    state, shard = training_state(70e9), training_state(70e9).sharded(8)
    whole, split = (activations(8, *LLAMA, factor) for factor in (16, activation_factor(8)))
    message, one = (activations(batch, *LLAMA[:2], 1, 2) for batch in (8, 1))
    bound, real = (least_gpus(sum(part), 80 * GB, 20 * GB) for part in (state[:2], state))
    sizes = ("/".join(str(size) for size in range(1, n + 1) if degree(size, n) == size) for n in (8, 4))
    waits, sent, rate = f"{bubble(4, 8):.1%}", pipeline_traffic(one, 8, 4), gbit_per_s(8 * one)
    gpipe, one_f_one_b, interleaved = micro_batches_kept(4, 8).values()
    return f"""
parameters and gradients a GPU, TP 8 | 17.5 GB, 17.5 GB | {_gb(shard.parameters)}, {_gb(shard.gradients)}
optimizer states a GPU, TP 8 | 280 GB | {_gb(shard.optimizer)} | {_gb(shard.optimizer)}, {_gb(sum(shard))} in all | \
A rank keeps the states of its own shard only.
activations a value, TP 8 | not split | {activation_factor(8):g} bytes | \
{activation_factor(8):g} of {activation_factor():g} bytes | Korthikanti et al. 2022: 10 + 24/TP.
TP, message a layer | 536 MB | {_gb(message)}
TP, traffic of 80 layers | 42.9 GB | {_gb(80 * message)} | {_gb(tensor_traffic(message, 80, 8))} | \
Four all-reduces a layer, each 2(N−1)/N of the message.
NVLink of an H100 | 900 GB/s | {2 * 18 * 25} GB/s |  | 18 links of 25 GB/s each way, both ways added.
TP, activations assumed | 20 GB | {_gb(whole)} | {_gb(split)} | Not what batch 8 keeps, by its own rule or with TP 8.
TP, least size | 4.67 | {bound:.2f} | {real:.2f} | The optimizer states must fit as well: 8 GPUs are too few.
TP, size for 4.67 | 8 | {degree(bound, 8)}
TP, sizes in nodes of 8 and 4 | 1/2/4/8, 1/2/4 | {", ".join(sizes)} |  | So 8 is the most.
TP, size by the guideline | min(8, ⌈4.67⌉) | {min(8, math.ceil(bound))} | {degree(bound, 8)} | 5 does not divide 8 GPUs.
bubble, P 4, M 8 | 27.3% | {waits}
GPipe's bubble | above 1F1B's | {waits} | the same, {waits} | 1F1B changes the order, not the waiting.
interleaved bubble, 2 chunks | lowest | {bubble(4, 8, 2):.1%}
GPipe's memory, P 4, M 8 | low | {gpipe} micro-batches | highest, 1F1B {one_f_one_b} | GPipe keeps all M.
interleaved memory, P 4, M 8 | high | {interleaved} micro-batches | above 1F1B, below GPipe | It keeps P + (P−1)/2.
activations of a stage, P 4, M 8 | more | {_gb(whole / 4)} | a quarter of {_gb(whole)} | A stage has 1/P of the layers.
PP, a micro-batch | 67 MB | {_gb(one)}
PP, 8 micro-batches | 536 MB | {_gb(8 * one)} | {_gb(sent / 3)} a boundary, {_gb(sent)} over 3 | Gradients come back.
PP, bandwidth | 400 Gbit/s | {rate:.3g} Gbit/s | {rate:.3g} Gbit/s at 1 s | EFA offers 400 a GPU, PP does not need them.
PP, stages from memory | P ≤ | P ≥ {real:.2f} | P ≥ {real:.2f}, so {degree(real, 80)} | More stages need less each.
PP, M at P 4 | 16 | {4 * 4} |  | Bubble {bubble(4, 16):.1%}, but the article's own batch of 8 makes 8 at most.
PP, practical stages | 2–8 | {groups(1024, 8 * 8)} | 16 too | Its own 3D setting; bubble {bubble(16, 64):.1%} at M = 4P.
"""


def _combined_claims() -> str:
    rows = ""
    for model, tp, pp, dp, printed in (
        ("7B–13B", 1, 1, (8, 16), "8–128 GPUs, 1–16 nodes"),
        ("70B", 8, 1, (4, 8), "32–64 GPUs, 4–8 nodes"),
        ("405B", 8, 4, (8, 16), "256–512 GPUs, 32–64 nodes"),
    ):
        gpus, nodes = ("–".join(str(groups(tp * pp * size, by)) for size in dp) for by in (1, 8))
        found = f"{gpus} GPUs, {nodes} nodes"
        wrong = f" | {found} | GPUs are TP × PP × DP." if found != printed else ""
        rows += f"setting for {model} | {printed} | {found}{wrong}\n"
    return f"""
2D, TP 8 × DP 4 | 32 GPUs, 4 nodes | {8 * 4} GPUs, {groups(32, 8)} nodes
3D, TP 8 × PP 16 × DP 8 | 1024 GPUs, 128 nodes | {8 * 16 * groups(1024, 8 * 16)} GPUs, {groups(1024, 8)} nodes
3D, a stage | 8 nodes | {groups(groups(1024, 16), 8)} nodes
PP and DP by the guideline | each from the other | {sum(4 % pp == 0 for pp in range(1, 5))} answers | \
PP from memory, then DP | For 32 GPUs and TP 8 both formulas are PP · DP = 4.
{rows}"""


SIZES = {"7B": (7e9, 4096, 32), "13B": (13e9, 5120, 40), "70B": (70e9, 8192, 80), "405B": (405e9, 16384, 126)}
EXAMPLES = (  # name, model, layout, samples of a replica, what the article prints
    ("70B with FSDP", "70B", Layout(1, 1, 8, "FULL_SHARD"), 8, "70 GB a GPU: fits 80 GB; 245 GB sent, 1960 Gbit/s"),
    ("70B with TP", "70B", Layout(8, 1, 1), 8, "TP 8 for parameters and gradients; 42.9 GB sent"),
    ("70B in 2D", "70B", Layout(8, 1, 4, "FULL_SHARD"), 2, "TP 8 × DP 4 on 4 nodes"),
    ("405B in 3D", "405B", Layout(8, 16, 8, "SHARD_GRAD_OP"), 64, "TP 8 × PP 16 × DP 8 on 128 nodes"),
    ("EC2, 7B", "7B", Layout(1, 1, 8, "FULL_SHARD"), 1, "DP 8: 8 GPUs, 1 node"),
    ("EC2, 13B", "13B", Layout(1, 1, 16, "FULL_SHARD"), 1, "DP 16: 128 GPUs, 16 nodes"),
    ("EC2, 70B", "70B", Layout(8, 1, 4, "FULL_SHARD"), 1, "TP 8 × DP 4: 32 GPUs, 4 nodes"),
    ("EC2, 70B", "70B", Layout(8, 1, 8, "FULL_SHARD"), 1, "TP 8 × DP 8: 64 GPUs, 8 nodes"),
    ("EC2, 405B", "405B", Layout(8, 4, 8, "SHARD_GRAD_OP"), 16, "TP 8 × PP 4 × DP 8: 256 GPUs, 32 nodes"),
    ("EC2, 405B", "405B", Layout(8, 4, 16, "SHARD_GRAD_OP"), 16, "TP 8 × PP 4 × DP 16: 512 GPUs, 64 nodes"),
)


def examples() -> pd.DataFrame:
    """The article's own settings on H100s of 80 GB: `example`, its answer (`article`), `ours` and the `difference`.

    Sequence 4096, computing for a second, mixed precision, and without stages activations of all layers. Where the
    article gives no batch, a replica has one sample, and with stages its 4 · P.
    """
    return pd.DataFrame(
        [
            [f"{name}: {layout} {layout.strategy}".rstrip(), printed, *_compared(*SIZES[model], layout, samples)]
            for name, model, layout, samples, printed in EXAMPLES
        ],
        columns=["example", "article", "ours", "difference"],
    )


def _compared(parameters: float, hidden: int, layers: int, layout: Layout, samples: int) -> tuple[str, str]:
    """What we answer for a layout of the article's, with the best one on its GPUs, and how its rules differ."""
    gpus = layout.tp * layout.pp * layout.dp
    sizes: dict[str, Any] = {"parameters": parameters, "hidden": hidden, "layers": layers}
    sizes |= {"batch": samples * layout.dp, "iteration_seconds": 1.0}
    run = advice.training(gpus, **sizes)
    row = advice.row(run, layout)
    sent = f"{row['inside_gb'] + row['between_gb']:.4g} GB sent, {row['between_gbit_per_s']:.4g} Gbit/s between nodes"
    nodes = gpus // run.gpus_per_node
    ours = f"{gpus} GPUs, {nodes} node{'s' * (nodes > 1)}; {row['memory_gb']:.4g} GB: "
    ours += ("fits; " if not row["cause"] else f"does not fit: {row['reason']}; ") + sent
    best = advice.advise(run).iloc[0]
    if row["cause"]:
        best = advice.advise(advice.training(gpus, **sizes, checkpointing=True)).iloc[0]
    if pd.isna(best["place"]):
        ours += "; nothing fits these GPUs"
    elif best["layout"] != str(layout) or best["strategy"] != layout.strategy or row["cause"]:
        again = "with checkpointing " if row["cause"] else ""
        ours += f"; {again}{best['layout']} {best['strategy']} is best, {best['memory_gb']:.4g} GB"
    return ours, row["article"] or "none"
