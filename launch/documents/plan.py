"""What would run, with predicted time and memory of each run; nothing is started."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from launch.documents import figures, output
from launch.documents.experiments import Experiment
from launch.documents.machine import Machine
from launch.documents.rows import number
from vdpp_core.cli.words import WIDTH, counted
from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.layout import Parallel
from vdpp_core.parallel.devices import GIB
from vdpp_core.predict import costs, memory, published, rates
from vdpp_core.predict.rates import Link, Rates
from vdpp_core.runs import machine as hardware
from vdpp_core.runs import runfolder

HEADS = ("run", "layout", "latents", "steps × samples", "time", "GB a rank")
WIDTHS = (35, 11, 14, 8, 13, 9)
LAUNCHES = "Theirs took 0.15 s a step, waiting for kernel launches, which predictions leave out."
CORE_FLOPS = {"dummy": 15e9, "tiny": 30e9, "medium": 40e9}  # a core of the machine of docs/benchmark.md
MOST_RUNS = 200  # finished ones that are looked at for rates


@dataclass
class Plan:
    """Predictions for a machine: published A5000 rates for GPUs, for a CPU those of finished runs here."""

    machine: Machine
    sources: dict[str, None] = field(default_factory=dict)  # of the rates that were used, in words

    def text(self, chosen: Sequence[Experiment]) -> str:
        """A table for each section, and the sum; runs that an earlier section has done are not counted again."""
        counted_in, lines = dict[RunConfig, float](), list[str]()
        for experiment in chosen:
            lines += ["", f"Section {experiment.section}: {experiment.title}", ""]
            lines += [output.wrapped(HEADS, WIDTHS), output.wrapped(["-" * width for width in WIDTHS], WIDTHS)]
            for name, config in experiment.runs.items():
                seconds, is_done = self.seconds(config), config in counted_in
                lines.append(output.wrapped(self._cells(name, config, seconds, is_done), WIDTHS))
                counted_in[config] = seconds or 0.0
            if experiment.section == "5" and not self.machine.small:
                lines.append(LAUNCHES)
        sizes = "small sizes" if self.machine.small else "the documents' sizes"
        total = f"about {duration(sum(counted_in.values()))} without start-up"
        head = f"{self.machine.name}: {counted(len(counted_in), 'run')}, {sizes}, {total}; nothing is run now"
        foot = f"rates: {'; '.join(self.sources) or 'none needed'}"
        return "\n".join([*textwrap.wrap(head, WIDTH), *lines, "", *textwrap.wrap(foot, WIDTH)])

    def _cells(self, name: str, config: RunConfig, seconds: float | None, is_done: bool) -> tuple[str, ...]:
        samples = config.num_samples + config.warmup_samples * config.layout.dp
        steps = f"{config.total_steps} × {samples}"
        time = "as above" if is_done else "out of memory" if seconds is None else duration(seconds)
        return name, str(config.layout), config.size_text, steps, time, number(memory.predict(config).total / 1e9)

    def is_full(self, config: RunConfig) -> bool:
        """Whether a run is predicted to find too little memory on a card, or in the limit that plays one."""
        if self.machine.small:
            limit = config.memory_limit_gib
            return limit is not None and memory.predict(config).total > limit * GIB
        return not memory.fit(config, (self.machine.card_gib or figures.CARD_GIB) * GIB).fits

    def seconds(self, config: RunConfig) -> float | None:
        """Predicted seconds of all samples, those of warm-up included, and of decoding; None out of memory."""
        if self.is_full(config):
            return None
        known = self._rates(config)
        self.sources[known.source] = None
        samples = config.num_samples + config.warmup_samples * config.layout.dp
        makespan = rates.predict(config.replace(num_samples=samples), known).numbers()["makespan_s"]
        return makespan + rates.decode_s(config, known)

    def _rates(self, config: RunConfig) -> Rates:
        if not self.machine.small and config.device == "cuda":
            return published.rates(published.nearest_row(config)) if config.model == "svd" else self._dummy_on_cards
        own = [folder for folder, (model, shape) in self._finished.items() if model == config.model]
        alike = [folder for folder in own if self._finished[folder][1] == config.shape] or own
        if alike:
            return rates.from_run(alike[0])
        flops = CORE_FLOPS[config.model]
        source = f"assumed, as no run here tells: {config.model} model, {flops / 1e9:g} GFLOP/s a core"
        return Rates(flops, Link(1e9), source, cores=self.machine.cores)

    @cached_property
    def _dummy_on_cards(self) -> Rates:
        """The dummy network on an A5000: section 13."""
        shape = figures.COMPARISON["latent_shape"]
        config = RunConfig(model="dummy", latent_shape=shape, guidance_scale=1.0, parallel=Parallel())
        step_s = figures.DUMMY[1]["pipeline_avg_ms"] / 1e3 / figures.STEPS
        source = "published: the dummy network on one A5000 in section 13"
        return Rates(costs.cost(config).flops / step_s, published.link(), source)

    @cached_property
    def _finished(self) -> dict[Path, tuple[str, tuple[int, ...]]]:
        """Folder -> model and shape of finished, undisturbed runs of one thread a rank on this CPU, newest first."""
        here, found = hardware.hardware_name(hardware.hardware()), dict[Path, tuple[str, tuple[int, ...]]]()
        folders = sorted(runfolder.runs_root().glob("**/result.json"), key=lambda path: -path.stat().st_mtime)
        for path in folders[:MOST_RUNS]:
            try:
                config, result = rates.finished(path.parent)
            except ConfigError:
                continue
            threads = set(result["threads_per_rank"]) == {1}
            plain = rates.is_plain(config.layout) and config.memory_limit_gib is None
            same = result["device"] == "cpu" and hardware.hardware_name(result["hardware"]) == here
            if plain and threads and same and config.model_id is None and not config.shortcuts:
                found[path.parent] = config.model, config.shape
        return found


def duration(seconds: float) -> str:
    """Seconds as people say them: 3.1 ms, 12 s, 4.2 min, 2.3 h."""
    for factor, unit, most in ((1e-3, "ms", 1.0), (1, "s", 90.0), (60, "min", 5400.0)):
        if seconds < most:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 3600:.1f} h"
