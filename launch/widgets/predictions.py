"""The memory and time that a run will need, shown before it starts and kept in its folder."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.execution import resolve
from vdpp_core.engine import preflight
from vdpp_core.parallel import devices
from vdpp_core.predict import accuracy, cores_and_disk, memory, messages, published, rates
from vdpp_core.predict.predictor import Predictor
from vdpp_core.predict.rates import Rates
from vdpp_core.runs import machine

MOST_CHECKED = 8  # runs that the range is taken from
NO_TIMES = "no finished run here has this model, device, dtype and number of threads"


@dataclass(frozen=True)
class Prediction:
    """What is predicted of one run before it starts.

    Attributes:
        record: for `launch.start(config, predicted=…)`: memory and times, named as in a result, with their `source` and
            `makespan_range_s`; the makespan is None where no times are known.
        facts: name -> value in words.
        warnings: about memory, cores and disk.
    """

    record: dict[str, Any]
    facts: dict[str, str]
    warnings: list[str]

    @property
    def headline(self) -> str:
        """The two numbers that decide, their source, and the warnings, as HTML."""
        times = self.facts.get("makespan", "time not known yet")
        first = f"<p>Predicted: <b>{escape(times)}</b>, <b>{escape(self.facts['peak memory per rank'])}</b></p>"
        lines = [*(f"Warning: {line}" for line in self.warnings), self.source]
        return first + "".join(f"<p>{escape(line)}</p>" for line in lines)

    @property
    def source(self) -> str:
        """Where the times are from, in words."""
        return (
            f"Times based on: {self.record['source']}." if self.record["makespan_s"] else f"No times yet: {NO_TIMES}."
        )

    @property
    def table(self) -> str:
        """All facts as an HTML table."""
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(fact)}</td></tr>" for name, fact in self.facts.items())
        return f"<table>{rows}</table>"

    @property
    def page(self) -> str:
        """Headline and table."""
        return self.headline + self.table


class Predictions:
    """Predictions counted on the meta device. Counts are kept: only a new video size or layout takes a second."""

    def __init__(self) -> None:
        self.predictor = Predictor()
        self.hardware = machine.hardware()
        self.finished: dict[Path, tuple[str, RunConfig] | None] = {}  # setting and configuration
        self.known: dict[tuple[Path, ...], Rates | None] = {}

    def of(self, config: RunConfig, runs: Sequence[Path]) -> Prediction:
        """Memory and times of a run.

        Args:
            runs: folders of finished runs, newest first. Times come from those in the same setting that nothing
                disturbed.

        Raises:
            ConfigError: this machine cannot run it.
        """
        ranks = config.layout.world_size
        config = preflight.complete(config, ranks)
        execution = preflight.check(config, ranks)
        warnings = [*cores_and_disk.before_start(config, execution), *memory.before_start(config, execution)]
        room, beside = self.predictor.room(config), memory.outside_a_limit(config)
        available = devices.capacity(config, execution) + beside
        fits = f"{'fits' if room.needed <= available else 'does not fit'} in {available / 1e9:.3g} GB"
        facts = {
            "peak memory per rank": f"{room.peak / 1e9:.3g} GB a rank without allowances, {fits}",
            "layout": f"{config.layout}" + f" on {ranks} ranks" * (ranks > 1),
            "steps per stage": ", ".join(str(len(steps)) for steps in config.stages()),
            "latents": config.size_text,
        }
        if config.experts is not None:
            facts["experts"] = ", ".join(f"{name}: {count} steps" for name, count in config.experts)
        if config.layout.pp > 1:
            facts["hand-off"] = f"{messages.largest(config) / 1e6:.3g} MB"
        times = self._times(config, runs)
        record = {"memory": memory.predict(config).in_gb(), **times}
        return Prediction(record, _in_words(times) | facts, warnings)

    def _times(self, config: RunConfig, runs: Sequence[Path]) -> dict[str, Any]:
        """The times of `Prediction.record`."""
        known = self._rates(config, runs)
        if known is None:
            return {"source": f"none: {NO_TIMES}", "makespan_s": None}
        planned = rates.predict_schedule(config, self.predictor.per_stage(config), known)
        numbers = planned.numbers()
        ends = [numbers["makespan_s"], *(numbers["makespan_s"] / (1 + error) for error in known.errors)]
        return numbers | {
            "source": f"{known.source}; {rates.how_far_off(known.errors)}",
            "link": known.link.source,
            "makespan_range_s": [min(ends), max(ends)] if known.errors else None,
            "time_to_first_video_s": planned.first_video_s,
        }

    def _rates(self, config: RunConfig, runs: Sequence[Path]) -> Rates | None:
        """Rates from runs in the same setting, if possible of the same size; without any, published for SVD."""
        wanted = self._setting(config)
        alike = {folder: ran for folder in runs if (ran := self._finished(folder, wanted)) is not None}
        of_size = {folder: ran for folder, ran in alike.items() if ran.shape == config.shape}
        for some in (of_size, alike):
            if (found := self._from_runs(some)) is not None:
                return found
        if config.model == "svd" and config.is_svd and resolve(config).device_type == "cuda":
            known = published.rates(published.nearest_row(config))
            return known.checked(accuracy.against_published(known))
        return None

    def _from_runs(self, some: dict[Path, RunConfig]) -> Rates | None:
        """Rates from a few of these runs, checked against the newest others."""
        key = tuple(some)
        if key not in self.known:
            self.known[key] = None
            best = accuracy.to_calibrate_on(some)
            for folders in (best, best[:1], *([folder] for folder in some)):
                with contextlib.suppress(ConfigError):
                    known = rates.from_run(folders)
                    self.known[key] = known.checked(accuracy.against_runs(key[:MOST_CHECKED], known))
                    break
        return self.known[key]

    def _setting(self, config: RunConfig) -> str:
        """The value of `rates.setting_of` for a run that has not started."""
        execution = resolve(config, config.layout.world_size)
        facts = {"device": execution.device_type, "dtype": execution.dtype_name}
        return rates.setting_of(config, facts | {"threads_per_rank": [execution.threads], "hardware": self.hardware})

    def _finished(self, folder: Path, wanted: str) -> RunConfig | None:
        """A run's configuration, if it finished in the wanted setting and nothing disturbed it: also no other run on
        the same cores, which makes steps longer."""
        if folder not in self.finished:
            self.finished[folder] = None
            with contextlib.suppress(ConfigError):
                config, result = rates.finished(folder)
                if not result.get("disturbed"):
                    self.finished[folder] = rates.setting_of(config, result), config
        found = self.finished[folder]
        return found[1] if found and found[0] == wanted else None


def _in_words(times: dict[str, Any]) -> dict[str, str]:
    """Name -> value of predicted times."""
    if times["makespan_s"] is None:
        return {}
    interval, first = times["interval_s"], times["time_to_first_video_s"]
    between = "" if times["makespan_range_s"] is None else " ({:.3g} to {:.3g} s)".format(*times["makespan_range_s"])
    facts = {
        "makespan": f"{times['makespan_s']:.3g} s{between}",
        "latency": f"{fmean(times['latency_s']):.3g} s",
        "interval": f"{fmean(interval):.3g} s" if interval else "–",
        "throughput": f"{times['samples_per_s']:.3g} samples/s",
        "bubble": f"{times['bubble']:.0%}",
        "link": times["link"],
    }
    return facts | ({} if first is None else {"first video": f"{first:.3g} s"})
