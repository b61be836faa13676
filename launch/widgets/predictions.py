"""The memory and time that a run will need, shown beside the widgets that describe it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import fmean

from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.execution import resolve
from vdpp_core.engine import preflight
from vdpp_core.parallel import devices
from vdpp_core.predict import accuracy, memory, messages, published, rates
from vdpp_core.predict.predictor import Predictor
from vdpp_core.predict.rates import Rates
from vdpp_core.runs import machine


class Predictions:
    """Predictions counted on the meta device. Counts are kept: only a new video size or layout takes a second."""

    def __init__(self) -> None:
        self.predictor = Predictor()
        self.hardware = machine.hardware()
        self.finished: dict[Path, tuple[str, RunConfig] | None] = {}  # setting and configuration

    def page(self, config: RunConfig, runs: Sequence[Path]) -> str:
        """Memory (GB = 1e9 bytes) and times (seconds) of a run, as HTML.

        Args:
            runs: folders of finished runs, newest first. Times come from one of them in the same setting.

        Raises:
            ConfigError: this machine cannot run it.
        """
        ranks = config.layout.world_size
        config = preflight.complete(config, ranks)
        execution = preflight.check(config, ranks)
        warnings = memory.before_start(config, execution)
        beside = memory.outside_a_limit(config)
        room, available = self.predictor.room(config), devices.capacity(config, execution) + beside
        facts = {
            "layout": f"{config.layout}" + f" on {ranks} ranks" * (ranks > 1),
            "steps per stage": ", ".join(str(len(steps)) for steps in config.stages()),
            "latents": config.size_text,
            "peak memory per rank": f"{room.peak / 1e9:.3g} GB",
            "with allowance": f"{room.needed / 1e9:.3g} of {available / 1e9:.3g} GB available",
        }
        if config.experts is not None:
            facts["experts"] = ", ".join(f"{name}: {count} steps" for name, count in config.experts)
        if config.layout.pp > 1:
            facts["hand-off"] = f"{messages.largest(config) / 1e6:.3g} MB"
        known = self._rates(config, runs)
        source = "No times yet: no finished run here has this model, device, dtype and number of threads."
        if known is not None:
            planned = rates.predict_schedule(config, self.predictor.per_stage(config), known)
            numbers = planned.numbers()
            facts |= {
                "makespan": f"{numbers['makespan_s']:.3g} s",
                "latency": f"{fmean(numbers['latency_s']):.3g} s",
                "interval": f"{fmean(numbers['interval_s']):.3g} s" if numbers["interval_s"] else "–",
                "throughput": f"{numbers['samples_per_s']:.3g} samples/s",
                "bubble": f"{numbers['bubble']:.0%}",
            }
            if planned.first_video_s is not None:
                facts["first video"] = f"{planned.first_video_s:.3g} s"
            source = f"Times based on: {known.source}; link: {known.link.source}."
        rows_of_table = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts.items()
        )
        notes = "".join(f"<p>{escape(line)}</p>" for line in [*warnings, source])
        return f"<table>{rows_of_table}</table>{notes}"

    def _rates(self, config: RunConfig, runs: Sequence[Path]) -> Rates | None:
        """Rates from runs in the same setting, if possible of the same size; without any, published for SVD."""
        wanted = self._setting(config)
        alike = {folder: ran for folder in runs if (ran := self._finished(folder, wanted)) is not None}
        of_size = {folder: ran for folder, ran in alike.items() if ran.shape == config.shape}
        for some in (of_size, alike):
            best = accuracy.to_calibrate_on(some)
            for folders in (best, best[:1], *([folder] for folder in some)):
                with contextlib.suppress(ConfigError):
                    return rates.from_run(folders)
        if config.model == "svd" and config.is_svd and resolve(config).device_type == "cuda":
            return published.rates(published.nearest_row(config))
        return None

    def _setting(self, config: RunConfig) -> str:
        """The value of `rates.setting_of` for a run that has not started."""
        execution = resolve(config, config.layout.world_size)
        facts = {"device": execution.device_type, "dtype": execution.dtype_name}
        return rates.setting_of(config, facts | {"threads_per_rank": [execution.threads], "hardware": self.hardware})

    def _finished(self, folder: Path, wanted: str) -> RunConfig | None:
        """A run's configuration, if it finished in the wanted setting."""
        if folder not in self.finished:
            try:
                config, result = rates.finished(folder)
                self.finished[folder] = rates.setting_of(config, result), config
            except ConfigError:
                self.finished[folder] = None
        found = self.finished[folder]
        return found[1] if found and found[0] == wanted else None
