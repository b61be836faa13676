"""How to split a training over given GPUs: the layouts that fit, ranked, with reasons, and why the rest are excluded.

The rules are those of `lessons.sizing`, for a transformer with 16-bit activations and fused attention. Neighbours in a
node are tensor parallel, then data parallel, then stages (Narayanan et al. 2021). Times are the best case: all-reduces
of tensor parallelism wait for nothing and hide behind nothing, all other traffic hides behind computing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field

from vdpp_core.config.errors import ConfigError
from vdpp_core.lessons import sizing
from vdpp_core.plots import training_sizing
from vdpp_core.predict.checked_arguments import checked, checked_dataclass

GB = 1e9
HEAD = 128  # channels of an attention head
ASPECT = 128  # hidden size / layers of GPT-3, Llama 7B and Llama 3.1 405B
PRECISIONS = {  # bytes per parameter kept (parameter, gradient, Adam's moments) and sent (parameter, gradient)
    "mixed": ((4, 4, 8), (2, 4)),  # fp32 master weights, gathered in bf16, gradients reduced in fp32
    "bf16": ((2, 2, 4), (2, 2)),  # as the article
}
WHOLE = "NO_SHARD"
ARTICLE_FACTOR = 16  # activation bytes a value, by the article
SVD_KEPT = 76.4e9  # bytes a clip of 14 × 72 × 128 keeps in the UNet for the backward pass, counted on the meta device
SVD_OPERATIONS = 44.8e12  # of one forward pass, counted with it

Size = Annotated[float, Field(ge=1e-6, le=1e15)]
Parameters = Annotated[float, Field(ge=1e3, le=1e15)]
Count = Annotated[int, Field(ge=1, le=10**6)]


class Model(NamedTuple):
    """Sizes of a published model: parameters, hidden size, layers, sequence in training."""

    parameters: float
    hidden: int
    layers: int
    sequence: int


MODELS = {
    "llama-7b": Model(6.74e9, 4096, 32, 2048),
    "llama-3-70b": Model(70.6e9, 8192, 80, 8192),
    "llama-3.1-405b": Model(405.9e9, 16384, 126, 8192),
    "svd": Model(1.525e9, 320, 3, 14 * 72 * 128),  # its largest block has a third of the parameters
}


@checked_dataclass
class Training:
    """One iteration of a training, and the GPUs for it; `training` fills in defaults.

    Attributes:
        gpu_memory: GB of each GPU (1e9 bytes) that the training may use.
        batch: samples of an iteration, on all GPUs together.
        micro_batch: samples that a pipeline's stage computes at once.
        inside_gb_per_s: what a GPU sends within a node, one way (an H100's NVLink: 450).
        between_gbit_per_s: what it sends between nodes (a GPU's share of EFA: 400).
        iteration_seconds: how long the GPUs compute; by default the operations at `tflops` 1e12 a second each.
        svd: the UNet of SVD, whose activations and operations are counted, not calculated.
    """

    parameters: Parameters
    hidden: Count
    layers: Count
    sequence: Count
    gpus: Count
    batch: Count
    gpu_memory: Size = 80.0
    gpus_per_node: Count = 8
    micro_batch: Count = 1
    precision: Literal["mixed", "bf16"] = "mixed"
    checkpointing: bool = False
    inside_gb_per_s: Size = 450.0
    between_gbit_per_s: Size = 400.0
    tflops: Size = 400.0
    iteration_seconds: Size | None = None
    svd: bool = False

    @property
    def seconds(self) -> float:
        """Seconds of computing: 6 operations per parameter and token, 8 where the forward pass is computed again."""
        if self.iteration_seconds is not None:
            return self.iteration_seconds
        passes = 4 if self.checkpointing else 3
        forward = SVD_OPERATIONS if self.svd else 2 * self.parameters * self.sequence
        return passes * forward * self.batch / (self.gpus * self.tflops * 1e12)


def training(gpus: int, model: str | None = None, parameters: float | None = None, **given: Any) -> Training:
    """A training of a named model or of so many parameters; unnamed sizes get defaults.

    Hidden size h and layers l follow from 12·l·h² parameters and h/l = 128; the sequence is the article's 4096, the
    batch one sample for each GPU; a node has 8 GPUs, or all.

    Raises:
        ConfigError: neither or both are given, or a value is not allowed.
    """
    if model is None and parameters is not None:
        known = _usual(parameters, given.get("hidden"), given.get("layers"))
    elif model in MODELS and parameters is None:
        known = MODELS[model]
    elif model is None or parameters is not None:
        allowed = f"not with --model {model}" if model else f"give these or a model: {', '.join(MODELS)}"
        raise ConfigError("parameters", parameters or "", allowed)
    else:
        raise ConfigError("model", model, f"must be one of {', '.join(MODELS)}")
    for name in ("hidden", "layers", "sequence", "checkpointing") if model == "svd" else ():
        if given.get(name):
            raise ConfigError(name, given[name], "not with svd, whose activations are counted for one size")
    _check_sizes(known, given)
    defaults = {"batch": gpus, "gpus_per_node": min(8, gpus), "svd": model == "svd"}
    values: dict[str, Any] = {**known._asdict(), "gpus": gpus, **defaults, **given}
    made = Training(**values)
    sizing.groups(made.gpus, made.gpus_per_node)
    return made


def _check_sizes(known: Model, given: dict[str, Any]) -> None:
    """Refuse a hidden size and layers that contradict the parameters: 12·l·h² more than twice or less than half."""
    if not given.get("hidden") and not given.get("layers"):
        return
    hidden, layers = given.get("hidden") or known.hidden, given.get("layers") or known.layers
    counted = 12 * layers * hidden**2
    if not known.parameters / 2 <= counted <= 2 * known.parameters:
        allowed = f"with {layers} layers is {counted:.3g} parameters (12·l·h²), not {known.parameters:.3g}"
        raise ConfigError("hidden", hidden, allowed)


@checked
def _usual(parameters: Parameters, hidden: Count | None, layers: Count | None) -> Model:
    """Sizes of a transformer with 12·l·h² parameters."""
    if hidden is None:
        wanted = math.sqrt(parameters / 12 / layers) if layers else (ASPECT * parameters / 12) ** (1 / 3)
        unit = 8 * HEAD if wanted > 16 * HEAD else HEAD  # so that eight ranks can divide the heads
        hidden = max(unit, round(wanted / unit) * unit)
    return Model(parameters, hidden, layers or max(1, round(parameters / 12 / hidden**2)), 4096)


class Layout(NamedTuple):
    """How the GPUs are used: TP × PP × DP, a strategy for the DP ranks ("" for one), and chunks of layers a stage."""

    tp: int
    pp: int
    dp: int
    strategy: str = ""
    chunks: int = 1

    def __str__(self) -> str:
        sizes = {"TP": self.tp, "PP": self.pp, "DP": self.dp}
        return " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1 GPU"

    @property
    def schedule(self) -> str:
        """The pipeline's schedule, where there is one."""
        return "–" if self.pp == 1 else "Interleaved 1F1B" if self.chunks > 1 else "1F1B"

    def micro_batches(self, run: Training) -> int:
        """Micro-batches of an iteration, 1 without stages."""
        return 1 if self.pp == 1 else run.batch // self.dp // run.micro_batch

    def in_node(self, run: Training) -> int:
        """DP ranks of a stage in one node."""
        return min(self.dp, run.gpus_per_node // self.tp)

    def shards(self, run: Training) -> int:
        """GPUs that divide a stage's optimizer states among them."""
        return {"": 1, WHOLE: 1, "HYBRID_SHARD": self.in_node(run)}.get(self.strategy, self.dp)

    def layers(self, run: Training) -> int:
        """Layers of the fullest stage."""
        return math.ceil(run.layers / self.pp)

    def share(self, run: Training) -> float:
        """Share of the parameters that its GPU has before data parallelism."""
        return self.layers(run) / run.layers / self.tp


def layouts(run: Training) -> Iterator[tuple[Layout, str, str]]:
    """All divisions of the GPUs, each with the cause and the reason in words where it is impossible, or "", ""."""
    sizes = _divisors(run.gpus)
    for tp, pp in ((tp, pp) for pp in sizes for tp in sizes if run.gpus % (tp * pp) == 0):
        plain = Layout(tp, pp, run.gpus // tp // pp)
        cause, reason = _impossible(run, plain)
        if cause:
            yield plain, cause, reason
            continue
        for strategy in _strategies(run, plain):
            yield plain._replace(strategy=strategy), "", ""
            if pp > 1 and plain.micro_batches(run) % pp == 0 and run.layers >= 2 * pp:
                yield plain._replace(strategy=strategy, chunks=2), "", ""


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]


def _strategies(run: Training, layout: Layout) -> list[str]:
    """The strategies of the DP ranks. Stages of torch keep what they gathered, and gradients whole, for all
    micro-batches: that is SHARD_GRAD_OP."""
    if layout.dp == 1:
        return [""]
    if layout.pp > 1:
        return [WHOLE, "SHARD_GRAD_OP"]
    hybrid = ["HYBRID_SHARD"] if 1 < layout.in_node(run) < layout.dp else []
    return [WHOLE, "SHARD_GRAD_OP", "FULL_SHARD", *hybrid]


def _impossible(run: Training, layout: Layout) -> tuple[str, str]:
    """Why a division of the GPUs cannot be, in a word and in a sentence."""
    tp, pp, dp = layout[:3]
    heads, stage = run.hidden // HEAD, tp * dp
    if run.svd and dp < run.gpus:
        return "model", "the rules of TP and PP are a transformer's, not a UNet's"
    if run.gpus_per_node % tp:
        return "tp", f"TP {tp} does not divide a node of {run.gpus_per_node}, and its all-reduces must not leave one"
    if max(heads, 1) % tp:
        return "heads", f"TP {tp} does not divide {heads} heads of {HEAD} channels"
    if pp > run.layers:
        return "layers", f"PP {pp} is above {run.layers} layers"
    if stage % run.gpus_per_node and run.gpus_per_node % stage:
        return "node", f"a stage of {stage} GPUs crosses a node of {run.gpus_per_node}"
    if run.batch % dp:
        return "batch", f"DP {dp} does not divide a batch of {run.batch}"
    if pp > 1 and run.batch // dp % run.micro_batch:
        return "batch", f"micro-batches of {run.micro_batch} do not divide {run.batch // dp} samples of a replica"
    return "", ""


def advise(run: Training) -> pd.DataFrame:
    """Rank every layout of the GPUs: the fastest that fits first, excluded ones last.

    Columns: `place` (1 is best, missing where excluded), `layout`, `tp`, `pp`, `dp`, `strategy`, `schedule`,
    `micro_batches`; per GPU in GB: `state_gb` (its share of parameters, gradients and optimizer states), `gathered_gb`
    (parameters and gradients that are whole for a while), `activations_gb`, `memory_gb` (all three), `inside_gb` and
    `between_gb` (sent in an iteration within the node and to others); `inside_gb_per_s` and `between_gbit_per_s` (what
    carries that while the GPUs compute); `bubble`; `seconds` of an iteration; `cause` of exclusion in a word; `reason`;
    `article`, what the article's rules say where they differ.
    """
    rows = [_excluded(layout, cause, reason) if cause else row(run, layout) for layout, cause, reason in layouts(run)]
    table = pd.DataFrame(rows)
    fits = table["cause"] == ""
    order = ["rounded", "between_gb", "inside_gb", "memory_gb"]
    table["rounded"] = table["seconds"].map("{:.3g}".format).astype(float)
    fitting = table[fits].sort_values(order, kind="stable")
    table = pd.concat([fitting, table[~fits].sort_values("memory_gb", kind="stable")], ignore_index=True)
    table.insert(0, "place", pd.Series(range(1, len(fitting) + 1), dtype="Int64").reindex(table.index))
    return table.drop(columns="rounded")


NUMBERS = [
    *(f"{part}_gb" for part in ("state", "gathered", "activations", "memory", "inside", "between")),
    "inside_gb_per_s",
    "between_gbit_per_s",
    "bubble",
    "seconds",
]


def _excluded(layout: Layout, cause: str, reason: str) -> dict[str, Any]:
    names = {"layout": str(layout), **layout._asdict(), "schedule": layout.schedule, "micro_batches": 0}
    return {**names, **dict.fromkeys(NUMBERS, math.nan), "cause": cause, "reason": reason, "article": ""}


def row(run: Training, layout: Layout) -> dict[str, Any]:
    """A row of `advise`, but for its place: everything about one layout, which must be possible."""
    memory, sent = _memory(run, layout), _traffic(run, layout)
    inside, between = (sum(part) for part in zip(*sent.values(), strict=True))
    bubble = sizing.bubble(layout.pp, layout.micro_batches(run), layout.chunks)
    seconds, pace = _seconds(run, layout, sent, bubble)
    numbers = {f"{part}_gb": size / GB for part, size in memory.items()} | {
        "memory_gb": sum(memory.values()) / GB,
        "inside_gb": inside / GB,
        "between_gb": between / GB,
        "inside_gb_per_s": inside / GB / run.seconds,
        "between_gbit_per_s": 8 * between / GB / run.seconds,
        "bubble": bubble,
        "seconds": seconds,
    }
    cause, reason = "", "; ".join([*_why(run, layout, bubble), pace])
    if numbers["memory_gb"] > run.gpu_memory:
        cause, reason = _too_large(run, layout, memory)
    found = _excluded(layout, cause, reason) | numbers | {"micro_batches": layout.micro_batches(run)}
    return found | {"article": _article(run, found, layout)}


def _kept(run: Training, layout: Layout) -> tuple[sizing.TrainingState, float, float]:
    """A GPU's part before data parallelism: its state, and its parameters and gradients as sent, in bytes."""
    kept, sent = PRECISIONS[run.precision]
    own = run.parameters * layout.share(run)
    return sizing.training_state(own, kept), own * sent[0], own * sent[1]


def _memory(run: Training, layout: Layout) -> dict[str, float]:
    """Bytes of a GPU by kind."""
    state, parameters, gradients = _kept(run, layout)
    ranks = layout.shards(run)
    layers = layout.layers(run)
    gathered = 0.0
    if layout.strategy == "SHARD_GRAD_OP":
        gathered = parameters + gradients / (layers if layout.pp == 1 else 1)
    elif ranks > 1:  # two layers at once, as the next one is gathered early; the gradients of one
        gathered = (2 * parameters + gradients) / max(layers, 2)
    return {"state": sum(state.sharded(ranks)), "gathered": gathered, "activations": _activations(run, layout)}


def _activations(run: Training, layout: Layout) -> float:
    """Bytes kept for the backward pass by the first stage, which keeps most."""
    samples = run.batch // layout.dp
    if run.svd:
        return SVD_KEPT * samples
    kept, at_once = float(samples), samples
    if layout.pp > 1:
        waiting = sizing.micro_batches_kept(layout.pp, layout.micro_batches(run), max(layout.chunks, 2))
        kept, at_once = run.micro_batch * waiting[layout.schedule], run.micro_batch
    of_a_layer = sizing.activations(1, run.sequence, run.hidden, 1, sizing.activation_factor(layout.tp))
    if run.checkpointing:
        inputs = kept * sizing.activations(1, run.sequence, run.hidden, layout.layers(run), 2)
        return inputs + at_once * of_a_layer
    return kept * layout.layers(run) * of_a_layer


def _traffic(run: Training, layout: Layout) -> dict[str, tuple[float, float]]:
    """Bytes that a GPU sends in an iteration for each axis, inside a node and between nodes."""
    state, *as_sent = _kept(run, layout)
    sent = dict.fromkeys(("tp", "pp", "dp"), (0.0, 0.0))
    if layout.dp > 1:
        found = sizing.strategies(state, layout.dp, layout.in_node(run), (as_sent[0], as_sent[1]))
        sent["dp"] = found[layout.strategy][1:]
    samples = run.batch // layout.dp
    if layout.tp > 1:
        message = sizing.activations(samples, run.sequence, run.hidden, 1, 2)
        again = 5 / 4 if run.checkpointing else 1  # torch stops the second forward pass before its last all-reduce
        sent["tp"] = again * sizing.tensor_traffic(message, layout.layers(run), layout.tp), 0.0
    if layout.pp > 1:
        message = sizing.activations(run.micro_batch, run.sequence, run.hidden, 1, 2)
        stages = layout.chunks * layout.pp
        size = sizing.pipeline_traffic(message, layout.micro_batches(run), stages) / layout.pp
        sent["pp"] = (0.0, size) if run.gpus > run.gpus_per_node else (size, 0.0)
    return sent


def _seconds(run: Training, layout: Layout, sent: dict[str, tuple[float, float]], bubble: float) -> tuple[float, str]:
    """Seconds of an iteration at best, and what sets the pace, in words."""
    inside, between = GB * run.inside_gb_per_s, GB / 8 * run.between_gbit_per_s
    exchanging = sent["tp"][0] / inside
    computing = (run.seconds * layout.pp * layout.layers(run) / run.layers + exchanging) / (1 - bubble)
    hidden = {
        "in the node": (sent["dp"][0] + sent["pp"][0]) / inside,
        "between nodes": (sent["dp"][1] + sent["pp"][1]) / between,
    }
    where = max(hidden, key=hidden.__getitem__)
    if hidden[where] > computing:
        return hidden[where], f"the traffic {where} sets the pace: {hidden[where] / computing:.2g} times the computing"
    words = [f"all-reduces take {exchanging / (1 - bubble) / computing:.0%} of the time"] * (layout.tp > 1)
    if hidden[where]:
        words.append(f"other traffic hides behind computing ({hidden[where] / computing:.0%} of it)")
    return computing, "; ".join(words) or "nothing is sent"


def _why(run: Training, layout: Layout, bubble: float) -> list[str]:
    """What each axis does."""
    ranks, words = layout.in_node(run), []
    if layout.tp > 1:
        words.append(f"each layer over {layout.tp} GPUs of a node")
    if layout.pp > 1:
        count = layout.micro_batches(run)
        kept = sizing.micro_batches_kept(layout.pp, count, max(layout.chunks, 2))
        words.append(f"{layout.layers(run)} layers a stage, bubble {bubble:.1%} with {count} micro-batches")
        words.append(f"keeps {kept[layout.schedule]:g} of them, GPipe {count}")
    words += {
        "FULL_SHARD": ["parameters gathered twice, each layer for itself"],
        "SHARD_GRAD_OP": ["parameters gathered once and kept for the backward pass"],
        "HYBRID_SHARD": [f"sharded over {ranks} GPUs of a node, gradients averaged over {layout.dp // ranks} nodes"],
        WHOLE: [f"{layout.dp} whole copies, gradients averaged"],
        "": [],
    }[layout.strategy]
    return words


def _too_large(run: Training, layout: Layout, memory: dict[str, float]) -> tuple[str, str]:
    """The cause in a word, and in a sentence."""
    state, gathered, activations = (size / GB for size in memory.values())
    limit = f"a GPU has {run.gpu_memory:g} GB"
    ranks = layout.in_node(run) if layout.strategy == "HYBRID_SHARD" else layout.dp
    who = f"{layout.strategy} over {ranks}" if layout.strategy else "unsharded"
    if state > run.gpu_memory:
        return "state", f"{who}: {state:.4g} GB of state alone; {limit}"
    if state + gathered > run.gpu_memory:
        return "gathered", f"{who}: {state:.4g} GB of state and {gathered:.4g} GB gathered; {limit}"
    words = f"{state + gathered:.4g} GB of state and {activations:.4g} GB of activations; {limit}"
    if not run.checkpointing and not run.svd:
        less = _activations(replace(run, checkpointing=True), layout) / GB
        fits = "which fits" if state + gathered + less <= run.gpu_memory else "still too much"
        words += f"; {less:.4g} GB of activations with --checkpointing, {fits}"
    return "activations", words


def by_the_article(run: Training, layout: Layout) -> dict[str, float]:
    """GB of state, activations and traffic of a GPU by the article's rules; no traffic where it gives no formula.

    All state is bf16, only FSDP shards optimizer states, PP leaves gradients whole, nothing splits activations, and
    backward gathers nothing again.
    """
    parameters, gradients, optimizer = sizing.training_state(run.parameters)
    ranks = layout.shards(run)
    whole = 1 if layout.strategy == "SHARD_GRAD_OP" else ranks
    state = parameters / layout.tp / layout.pp / whole + gradients / layout.tp / ranks + optimizer / ranks
    sizes = (run.batch // layout.dp, run.sequence, run.hidden)
    found = {"state": state, "activations": sizing.activations(*sizes, run.layers, ARTICLE_FACTOR)}
    sent = [sizing.activations(*sizes, 1, 2) * run.layers] * (layout.tp > 1)
    sent += [sizing.activations(*sizes, 1, 2)] * (layout.pp > 1)
    if layout.strategy == "FULL_SHARD":
        sent.append(sizing.fsdp_traffic(parameters / layout.tp, gradients / layout.tp, layout.dp, False))
    if sent and (layout.dp == 1 or layout.strategy == "FULL_SHARD"):
        found["traffic"] = sum(sent)
    return {name: size / GB for name, size in found.items()}


def _article(run: Training, row: dict[str, Any], layout: Layout) -> str:
    """What the article's rules say of a layout where that differs by more than a hundredth."""
    if run.svd:
        return ""
    theirs, total = by_the_article(run, layout), row["inside_gb"] + row["between_gb"]
    ours = {"state": row["state_gb"], "activations": row["activations_gb"], "traffic": total}
    if layout.strategy == "SHARD_GRAD_OP":  # the article counts gathered parameters as state
        ours["state"] += row["gathered_gb"]
    words = [
        f"{name} {size:.4g} GB instead of {ours[name]:.4g}"
        for name, size in theirs.items()
        if not math.isclose(size, ours[name], rel_tol=0.01)
    ]
    fits = theirs["state"] + theirs["activations"] <= run.gpu_memory
    if fits != (row["memory_gb"] <= run.gpu_memory):
        words.insert(0, "fits" if fits else "does not fit")
    return ", ".join(words)


def in_words(run: Training) -> list[str]:
    """What is trained, on what, and what is assumed: two lines."""
    each = sum(PRECISIONS[run.precision][0])
    assumed = f"{run.tflops:g} TFLOPS a GPU" if run.iteration_seconds is None else "given"
    attention = "" if run.svd or run.iteration_seconds else ", attention's scores not counted"
    what = (
        "a clip of 14 × 72 × 128 each" if run.svd else f"{run.layers} layers of {run.hidden}, sequence {run.sequence}"
    )
    again = ", activations recomputed" if run.checkpointing else ""
    gpus, samples = (f"{count} {name}{'s' * (count > 1)}" for count, name in ((run.gpus, "GPU"), (run.batch, "sample")))
    return [
        f"{run.parameters / 1e9:.4g}B parameters, {what}; {samples} an iteration; {run.precision} precision, "
        f"{each} bytes of state a parameter{again}",
        f"{gpus} of {run.gpu_memory:g} GB (1e9 bytes) in nodes of {run.gpus_per_node}; "
        f"{run.seconds:.4g} s of computing ({assumed}{attention}); "
        f"{run.inside_gb_per_s:g} GB/s in a node, {run.between_gbit_per_s:g} Gbit/s between",
    ]


def draw(gpus: int, **given: Any) -> Figure:
    """The figure of `advise` for the arguments of `training`; for sliders."""
    run = training(gpus, **given)
    table = advise(run)
    best = table["layout"][0] + (f", {table['strategy'][0]}" if table["strategy"][0] else "")
    first = f"{best} comes first" if table["place"].notna().any() else "nothing fits"
    title = f"{given.get('model') or f'{run.parameters / 1e9:.4g}B parameters'} on {gpus} GPUs: {first}"
    return training_sizing.layouts(table, run.gpu_memory, title, f"predicted; {'; '.join(in_words(run))}")
