"""Predictions beside what was measured: the published times, and the runs that are here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas as pd

from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.execution import resolve
from vdpp_core.config.layout import Parallel
from vdpp_core.models import checkpoint
from vdpp_core.predict import published, rates
from vdpp_core.predict.rates import Rates


def against_published(known: Rates) -> pd.DataFrame:
    """Predictions beside the published times of SVD that were reached, in seconds; index: experiment and row.

    memory: the first sample. throughput, and pp: the average interval of a step pipeline. dp: the makespan of 14
    samples, of an experiment that does not state its guidance; with one pass a step its times come nearest.
    """
    found = {}
    for name, config, number, truth, calibrated in _published_times(known):
        foretold = rates.predict(config, known).numbers()[number]
        found[name] = {
            "video": _video(config),
            "layout": str(config.layout),
            "predicted_s": foretold,
            "known_s": truth,
            "error": foretold / truth - 1,
            "calibrated on": calibrated,
        }
    return pd.DataFrame(found).T.astype({"predicted_s": float, "known_s": float, "error": float, "calibrated on": bool})


def _published_times(known: Rates) -> Iterator[tuple[str, RunConfig, str, float, bool]]:
    """Name, run, which of its numbers, what that was, and whether the rates are known from it."""
    for row, facts in published.memory_rows().items():
        if facts["first_sample_time_s"] is not None:
            on = known.link.on if facts["mode"] == "fsdp" else known.on
            config = published.memory_config(facts)
            yield f"memory, row {row}", config, "first_sample_time_s", facts["first_sample_time_s"], on == row
    experiment = published.figures()["throughput_cfg3_14x72x128"]
    base = published.memory_config(published.memory_rows()[1]).replace(num_samples=experiment["num_samples"])
    for facts in experiment["rows"]:
        config = base.replace(parallel=Parallel(pp=facts["world_size"]))
        name = f"throughput, pp {facts['world_size']}"
        yield name, config, "avg_sample_time_s", facts["avg_sample_time_s"], False
    experiment = published.figures()["pipeline_vs_data_parallel"]
    samples = experiment["num_samples"]
    base = base.replace(num_samples=samples, latent_shape=experiment["latent_shape"], guidance_scale=1.0)
    for facts in experiment["svd_fp16"]:
        gpus = facts["world_size"]
        config = base.replace(parallel=Parallel(pp=gpus))
        yield f"comparison, pp {gpus}", config, "avg_sample_time_s", facts["pipeline_avg_s"], False
        config = base.replace(parallel=Parallel(dp=gpus))
        yield f"comparison, dp {gpus}", config, "makespan_s", samples / facts["data_samples_per_s"], False


def _video(config: RunConfig) -> str:
    return " × ".join(map(str, config.shape[2:]))


def against_runs(folders: Sequence[Path], known: Rates) -> pd.DataFrame:
    """Predictions beside the makespan and the mean latency of finished runs, in seconds. Runs of another UNet, device,
    type or number of threads than the one that the rates are known from are left out, and so are disturbed ones."""
    found = []
    for folder in folders:
        try:
            config, result = rates.finished(folder)
        except ConfigError:
            continue
        if rates.setting_of(config, result) != known.setting or (result.get("disturbed") and folder.name != known.on):
            continue
        foretold = rates.predict(config, known).numbers()
        found.append(
            {
                "run": folder.name,
                "layout": str(config.layout),
                **config.layout.model_dump(),
                "video": _video(config),
                "samples": config.num_samples,
                "predicted_makespan_s": foretold["makespan_s"],
                "makespan_s": result["makespan_s"],
                "error": foretold["makespan_s"] / result["makespan_s"] - 1,
                "predicted_latency_s": fmean(foretold["latency_s"]),
                "latency_s": fmean(result["latency_s"]),
                "latency error": fmean(foretold["latency_s"]) / fmean(result["latency_s"]) - 1,
                "calibrated on": folder.name == known.on,
            }
        )
    return pd.DataFrame(found) if found else _nothing()


def _nothing() -> pd.DataFrame:
    """Of what can be asked of no runs as of some."""
    return pd.DataFrame({"run": [], "layout": [], "error": np.array([]), "calibrated on": np.array([], dtype=bool)})


def among(folders: Sequence[Path]) -> pd.DataFrame:
    """`against_runs` of runs that were made here. Those of a sweep, or of no sweep, of one setting and one video are
    foretold from one plain run of them: on another day a machine may be another one. A step pipeline of many samples
    is preferred: it has ranks that are alone for a while, so it also tells what others do to them. Disturbed runs are
    left out."""
    groups: dict[tuple[Path, str, tuple[int, ...]], list[Path]] = {}
    for folder in folders:
        try:
            config, result = rates.finished(folder)
            checkpoint.check_model(config, resolve(config))
        except ConfigError:
            continue  # not a run that something can be learned from
        if result.get("disturbed"):
            continue
        key = folder.parent, rates.setting_of(config, result), config.shape
        groups.setdefault(key, []).append(folder)
    compared = []
    for group in groups.values():
        plain = {folder: config for folder in group if rates.is_plain((config := RunConfig.read(folder)).layout)}
        if len(group) > 1 and plain:
            best = max(plain, key=lambda folder: (plain[folder].layout.pp > 1, plain[folder].num_samples))
            compared.append(against_runs(group, rates.from_run(best)))
    return pd.concat(compared, ignore_index=True) if compared else _nothing()
