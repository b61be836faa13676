"""sizing: how to split a training over GPUs, from formulas alone."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import pandas as pd

from vdpp_core.cli import arguments
from vdpp_core.cli.arguments import N, Switch, X, number, shown
from vdpp_core.cli.words import WIDTH, counted, wrapped
from vdpp_core.config.errors import ConfigError

LEGEND = (
    "GB of a GPU: its state; gath.: parameters and gradients that are gathered for a while; act.: activations; all of "
    "these; what it sends in an iteration in its node and out of it. s: seconds of an iteration if nothing waits"
)
THEIRS = "the article about training (--article) says"
NAMES = "llama-7b|llama-3-70b|llama-3.1-405b|svd"
COLUMNS = {  # heading and width; the numbers are GB, but for the last two
    "place": ("#", 3),
    "layout": ("layout", -22),
    "strategy": ("strategy", -13),
    "schedule": ("schedule", -11),
    "state_gb": ("state", 5),
    "gathered_gb": ("gath.", 5),
    "activations_gb": ("act.", 5),
    "memory_gb": ("all", 5),
    "inside_gb": ("in", 5),
    "between_gb": ("out", 5),
    "seconds": ("s", 6),
}


@dataclass(frozen=True)
class Sizing:
    """Which ways to split a training fit on GPUs: memory, traffic, bubble and a reason for each, the fastest first."""

    model: Annotated[str | None, shown(NAMES)] = None  # a published model; or --parameters
    parameters: Annotated[str | None, X] = None  # of a transformer, such as 7e9
    gpus: Annotated[str | None, N] = None  # number of GPUs
    gpu_memory: Annotated[str | None, shown("X", default="80")] = None  # memory of each GPU in GB (1e9 bytes)
    gpus_per_node: Annotated[str | None, shown("N", default="8, or all")] = None  # GPUs that share fast links
    batch: Annotated[str | None, shown("N", default="one for each GPU")] = None  # samples of an iteration, on all GPUs
    micro_batch: Annotated[str | None, shown("N", default="1")] = None  # samples that a stage computes at once
    sequence: Annotated[str | None, shown("N", default="4096, or the model's")] = None  # tokens of a sample
    hidden: Annotated[str | None, shown("N", default="128 times the layers")] = None  # hidden size h
    layers: Annotated[str | None, shown("N", default="parameters / 12 / h²")] = None  # number of layers
    precision: Annotated[str | None, shown("mixed|bf16", default="mixed")] = (
        None  # 16 bytes a parameter, or all bf16: 8
    )
    checkpointing: Switch = False  # keep only the inputs of layers, compute the rest again
    inside_gb_per_s: Annotated[str | None, shown("X", default="450")] = (
        None  # 1e9 bytes a GPU sends per second in a node
    )
    between_gbit_per_s: Annotated[str | None, shown("X", default="400")] = None  # 1e9 bits it sends to other nodes
    tflops: Annotated[str | None, shown("X", default="400")] = None  # 1e12 operations per second of a GPU
    iteration_seconds: Annotated[str | None, X] = None  # seconds of computing, instead of --tflops
    article: Switch = False  # the examples of the article instead: its answer, this package's, and the difference
    top: Annotated[str, N] = "5"  # layouts to print; --json has all
    json: Switch = False  # print the result as JSON

    def __call__(self, *_: Any) -> None:
        top, given = arguments.whole_number("top", self.top), self._given()
        if self.article:
            self._examples(given)
            return
        from vdpp_core.lessons import advice  # takes seconds to import: after the arguments were read

        if "gpus" not in given:
            raise ConfigError("gpus", "", "must be given")
        run = advice.training(**given)
        table = advice.advise(run)
        if self.json:
            layouts = json.loads(table.to_json(orient="records", force_ascii=False))
            facts = {"training": asdict(run), "computing_s": run.seconds, "layouts": layouts}
            print(json.dumps(facts, indent=2, ensure_ascii=False))
            return
        for line in advice.in_words(run):
            print(textwrap.fill(line, WIDTH))
        for line in _plan(table, top):
            print(line)
        if not run.checkpointing and not run.svd:
            more = advice.advise(replace(run, checkpointing=True))["place"].count() - table["place"].count()
            if more > 0:
                print(f"with --checkpointing, {counted(int(more), 'more layout')} would fit")

    def _given(self) -> dict[str, Any]:
        """The values that were given, as numbers; RunConfig's way of naming what is wrong."""
        counts = ("gpus", "gpus_per_node", "batch", "micro_batch", "sequence", "hidden", "layers")
        sizes = ("parameters", "gpu_memory", "inside_gb_per_s", "between_gbit_per_s", "tflops", "iteration_seconds")
        given: dict[str, Any] = {
            name: arguments.whole_number(name, text, most=10**6) for name in counts if (text := getattr(self, name))
        }
        given |= {name: number(name, text) for name in sizes if (text := getattr(self, name))}
        given |= {name: text for name in ("model", "precision") if (text := getattr(self, name))}
        if {"tflops", "iteration_seconds"} <= given.keys():
            raise ConfigError("iteration_seconds", self.iteration_seconds, "not with --tflops, which gives them")
        return given | ({"checkpointing": True} if self.checkpointing else {})

    def _examples(self, given: dict[str, Any]) -> None:
        from vdpp_core.lessons import article

        if given:
            raise ConfigError("article", True, f"not with --{next(iter(given)).replace('_', '-')}: it has its own")
        table = article.examples()
        if self.json:
            print(json.dumps(table.to_dict("records"), indent=2, ensure_ascii=False))
            return
        for row in table.to_dict("records"):
            print(row.pop("example"))
            for name, text in row.items():
                print(textwrap.fill(f"{name}: {text}", WIDTH, initial_indent="  ", subsequent_indent="    "))


def _plan(table: pd.DataFrame, top: int) -> Iterator[str]:
    """The best layouts with their reasons, and the nearest one for each cause of exclusion and strategy."""
    fitting, rest = table[table["place"].notna()], table[table["place"].isna()]
    if len(fitting):
        yield from wrapped(LEGEND, first=0)
        yield " ".join(_cell(heading, width) for heading, width in COLUMNS.values()).rstrip()
    else:
        yield f"nothing fits; the smallest needs {rest['memory_gb'].min():.4g} GB"
    for row in fitting.head(top).to_dict("records"):
        yield " ".join(_cell(row[name], width) for name, (_, width) in COLUMNS.items())
        needs = f"needs {row['inside_gb_per_s']:.3g} GB/s in the node, {row['between_gbit_per_s']:.3g} Gbit/s between"
        yield from wrapped(f"{row['reason']}; {needs}")
        if row["article"]:
            yield from wrapped(f"{THEIRS}: {row['article']}")
    if (more := len(fitting) - top) > 0:
        yield f"and {more} more that fit{'s' * (more == 1)} (--top)"
    for _, rows in rest.groupby(["cause", "strategy"], sort=False):
        nearest = rows.iloc[0]
        alike = f" (and {len(rows) - 1} more like it)" * (len(rows) > 1)
        name = " ".join(filter(None, (nearest["layout"], nearest["strategy"])))
        article = f"; {THEIRS}: {nearest['article']}" * bool(nearest["article"])
        yield from wrapped(f"excluded: {name}: {nearest['reason']}{alike}{article}", first=0)


def _cell(value: Any, width: int) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value).replace("Interleaved 1F1B", "interleaved")
    if isinstance(value, float) and abs(value) < 5e-4:
        text = "0"
    return f"{text:<{-width}}" if width < 0 else f"{text:>{width}}"
