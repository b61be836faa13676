"""The documents' table of methods for several GPUs (their section 12), beside what the same methods measure here."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

import pandas as pd

from vdpp_core.config import RunConfig
from vdpp_core.config.layout import Parallel
from vdpp_core.predict import costs, memory
from vdpp_core.runs.run import Run

ONE_RANK = "one rank"
WHAT = ("memory", "throughput", "latency")  # the columns of the documents' table
COMPARED = {"latency": "latency_s", "throughput": "samples_per_s", "memory": "peak_gb"}


class Method(NamedTuple):
    """A way to use several GPUs.

    Attributes:
        axis: of `Parallel`, or "fsdp".
        documents: whether it saves memory, raises throughput and shortens latency, as of the documents' table; None
            for what is not in it.
    """

    axis: str
    documents: tuple[str, str, str] | None = None

    def layout(self, ranks: int) -> Parallel:
        """The layout of this method on so many ranks."""
        return Parallel(dp=ranks, fsdp=True) if self.axis == "fsdp" else Parallel(**{self.axis: ranks})


METHODS = {
    "data parallel": Method("dp"),
    "step pipeline": Method("pp", ("no", "yes, linear", "no")),
    "FSDP": Method("fsdp", ("yes, the parameters", "no", "no")),
    "tensor parallel": Method("tp", ("yes, within layers", "depends on the link", "possible")),
    "frames": Method("frames"),
    "guidance (cfg)": Method("cfg"),
}


def runs(base: RunConfig, ranks: int) -> dict[str, RunConfig]:
    """One rank, then each method on so many ranks, doing the run of `base`. With FSDP all ranks compute the same
    sample, as in the documents."""
    found = {ONE_RANK: base.replace(parallel=Parallel())}
    for name, method in METHODS.items():
        found[name] = base.replace(parallel=method.layout(ranks), fsdp_same_sample=method.axis == "fsdp")
    return found


def table(finished: Mapping[str, Run]) -> pd.DataFrame:
    """A row for each method, from its finished run; index: its name.

    Columns: `latency_s` (median of the samples), `samples_per_s`, `peak_gb` (of the fullest rank, measured),
    `parameters_gb` (of a rank), `sent_mb` (for one video, by all ranks; FSDP's all-gathers by formula); as multiples of
    one rank's `latency`, `throughput`, `memory`; `documents_memory`, `documents_throughput`, `documents_latency`.
    """
    rows = {}
    for name, run in finished.items():
        result, config = run.result(), run.config
        assert result is not None
        said = METHODS[name].documents if name in METHODS else None
        rows[name] = {
            "latency_s": median(result["latency_s"]),
            "samples_per_s": result["samples_per_s"],
            "peak_gb": result["max_peak_memory_gb"],
            "parameters_gb": memory.predict(config).parameters / 1e9,
            "sent_mb": sent_mb(run),
            **{f"documents_{what}": said[number] if said else "–" for number, what in enumerate(WHAT)},
        }
    found = pd.DataFrame(rows).T
    for what, column in COMPARED.items():
        found[what] = found[column] / found[column][ONE_RANK]
    return found


def sent_mb(run: Run) -> float:
    """MB (1e6 bytes) that all ranks together send for one video: within steps, from stage to stage, and parameters."""
    result, config = run.result(), run.config
    assert result is not None
    layout = config.layout
    within_steps = 1e9 * sum(result["lockstep_gb_per_step_per_rank"]) / (layout.dp * layout.groups)
    handed_on = sum(size or 0 for size in result["handoff_bytes_per_rank"]) / layout.dp
    gathered = costs.cost(config).gathered * layout.world_size / (1 if config.fsdp_same_sample else layout.dp)
    return (config.total_steps * (within_steps + gathered) + handed_on) / 1e6
