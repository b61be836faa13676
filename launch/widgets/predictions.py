"""What a run will need and take, in words beside the widgets that describe it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import fmean

from vdpp_core.config import RunConfig, execution
from vdpp_core.config.errors import ConfigError
from vdpp_core.engine import checks
from vdpp_core.parallel import devices
from vdpp_core.predict import memory, published, rates
from vdpp_core.predict.predictor import Predictor
from vdpp_core.predict.rates import Rates
from vdpp_core.runs import machine


class Foreteller:
    """Counts on the meta device, and remembers what it counted: only a new kind of video or split takes a second."""

    def __init__(self) -> None:
        self.predictor = Predictor()
        self.hardware = machine.hardware()
        self.finished: dict[Path, tuple[str, RunConfig] | None] = {}  # what it ran in, and as

    def page(self, config: RunConfig, runs: Sequence[Path]) -> str:
        """Memory and times of a run as HTML; the times from those of `runs`, which have ended, that tell them.

        Raises:
            ConfigError: one line on what cannot be on this machine.
        """
        ranks = config.layout.world_size
        checks.check(config, ranks)
        warnings = memory.before_start(config, ranks)
        room, there = self.predictor.room(config), devices.capacity(config, ranks) + memory.outside_a_limit(config)
        batch, _, frames, rows, columns = config.shape
        facts = {
            "layout": f"{config.layout}" + f" on {ranks} ranks" * (ranks > 1),
            "steps of the stages": ", ".join(str(len(steps)) for steps in config.stages()),
            "latents": f"{f'{batch} × ' * (batch > 1)}{frames} × {rows} × {columns}",
            "memory of a rank": f"{room.peak / 1e9:.3g} GB",
            "with allowances": f"{room.needed / 1e9:.3g} of {there / 1e9:.3g} GB",
        }
        known = self._rates(config, runs)
        source = "no run here tells the seconds of this model, device, type and number of threads yet"
        if known is not None:
            numbers = rates.predict_schedule(config, self.predictor.cost(config), known).numbers()
            facts |= {
                "makespan": f"{numbers['makespan_s']:.3g} s",
                "latency of a sample": f"{fmean(numbers['latency_s']):.3g} s",
                "interval": f"{fmean(numbers['interval_s']):.3g} s" if numbers["interval_s"] else "–",
                "samples": f"{numbers['samples_per_s']:.3g} a second",
                "bubble": f"{numbers['bubble']:.0%}",
            }
            source = f"seconds: {known.source}; link: {known.link.source}"
        rows_of_table = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(told)}</td></tr>" for name, told in facts.items()
        )
        notes = "".join(f"<p>{escape(line)}</p>" for line in [*warnings, source])
        return f"<table>{rows_of_table}</table>{notes}"

    def _rates(self, config: RunConfig, runs: Sequence[Path]) -> Rates | None:
        """Of the newest run of that model in that setting, one of the same size before all others."""
        wanted = self._setting(config)
        alike = [(folder, ran) for folder in runs if (ran := self._finished(folder, wanted)) is not None]
        for folder, _ in sorted(alike, key=lambda found: found[1].shape != config.shape):
            with contextlib.suppress(ConfigError):
                return rates.from_run(folder)
        if config.model == "svd" and execution.device_type(config) == "cuda":
            return published.rates(published.nearest_row(config))
        return None

    def _setting(self, config: RunConfig) -> str:
        """What `rates.setting_of` will say of a run that has not started."""
        threads = execution.threads(config, config.layout.world_size)
        facts = {"device": execution.device_type(config), "dtype": str(execution.dtype(config)).removeprefix("torch.")}
        return rates.setting_of(config, facts | {"threads_per_rank": [threads], "hardware": self.hardware})

    def _finished(self, folder: Path, wanted: str) -> RunConfig | None:
        """A run's configuration, if it finished in the wanted setting with ranks that do not wait within a step."""
        if folder not in self.finished:
            try:
                config, result = rates.finished(folder)
                plain = rates.is_plain(config.layout)
                self.finished[folder] = (rates.setting_of(config, result), config) if plain else None
            except ConfigError:
                self.finished[folder] = None
        found = self.finished[folder]
        return found[1] if found and found[0] == wanted else None
