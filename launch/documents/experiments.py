"""The documents' experiments: for each section the runs on this machine, and the rows that follow from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from launch.documents import figures
from launch.documents.machine import Machine, named, ranks_text
from launch.documents.measured import Measured
from launch.documents.rows import Row, Value
from vdpp_core.config import RunConfig
from vdpp_core.config.layout import Parallel
from vdpp_core.predict import memory

Done = Mapping[str, Measured]  # name of a run -> what it left, of those that ended well (or out of memory)
VIDEO, OFFICIAL = "one video", "official.mp4"
# Section 12 on a CPU: row -> frames, rows, columns of the latents; one limit for all rows plays the card.
SMALL_MEMORY = {1: (2, 9, 16), 2: (4, 9, 16), 3: (4, 12, 20), 4: (4, 32, 64), 5: (4, 9, 16), 6: (4, 32, 64)}
SMALL_MEMORY |= {7: SMALL_MEMORY[2], 8: SMALL_MEMORY[4]}
SMALL_LIMIT_GIB = 0.58  # row 4 needs 0.59 at least on one rank, row 3 needs 0.56
SMALL_STEPS = 2  # peak and seconds of a step do not depend on their number
MODELS = {"DummyUNet": figures.DUMMY, "SVD": figures.SVD}
SPLITS = {"PP": ("pp", "pipeline"), "DP": ("dp", "data")}  # axis, and name in the published rows


@dataclass(frozen=True)
class Experiment:
    """An experiment of the documents.

    Attributes:
        section: of the documents.
        setting: their settings, and which of them are inferred, in a sentence or two.
        runs: by name, in the order of execution.
        rows: what follows from those that have ended well.
        steps_on_ranks: number of ranks -> the steps of each, where that belongs to it.
        may_be_full: whether running out of memory is a result.
    """

    section: str
    title: str
    setting: str
    runs: dict[str, RunConfig]
    rows: Callable[[Done], list[Row]]
    steps_on_ranks: dict[int, list[range]] = field(default_factory=dict)
    may_be_full: bool = False


def all_of(machine: Machine) -> list[Experiment]:
    """The experiments in the order of execution: the video comes last, as the official pipeline then has a device."""
    makers = (simulator, dummy_on_gpus, few_frames, throughput, memory_limits, comparison, video)
    return [make(machine) for make in makers]


def _finished(done: Done) -> Iterator[tuple[int, str, Measured]]:
    """Published number of GPUs, name and run, of runs that are named by it."""
    names = {count: ranks_text(count) for count in figures.RANKS}
    return ((count, name, done[name]) for count, name in names.items() if name in done)


_ONE_DUMMY: dict[str, Any] = {
    "total_steps": figures.STEPS,
    "latent_shape": figures.DUMMY_LATENTS,
    "guidance_scale": 1.0,
    "warmup_samples": 0,
    "save_latents": True,
}


def simulator(machine: Machine) -> Experiment:
    """Section 2: the dummy network on CPU processes."""
    on_cpu = Machine(0, machine.cores, machine.name)
    runs = on_cpu.split(RunConfig(command="simulate", threads=1, **_ONE_DUMMY))
    setting = (
        "DummyUNet, 28 steps, one sample, gloo, fp32, latents of 8 × 32 × 32, as published. A split passes if its "
        "latents are those of one rank, bit for bit. The documents count steps down, this lab in order of execution. "
        "Ranks start warm, as forks of a process that has imported everything."
    )
    assigned = {count: config.stages() for count, config in runs.items() if count > 1}
    return Experiment("2", "Simulator", setting, named(runs), partial(_simulator_rows, on_cpu), assigned)


def _simulator_rows(machine: Machine, done: Done) -> list[Row]:
    found = _verdicts("2", machine, figures.SIMULATOR_TOTAL_S, done)
    if one := done.get(ranks_text(1)):
        cold, later = _ms(one.phases["cold_step"]), _ms(one.step_s)
        least, most = (bound * 1e3 for bound in figures.SIMULATOR_STEP_S)
        published = figures.SIMULATOR_COLD_S * 1e3
        found.append(Row("2", "cold first step, 1 rank", published, cold, "ms", "theirs starts CUDA"))
        found.append(Row("2", "later steps, 1 rank", f"{least:g} – {most:g} ms", later, "ms", "theirs on a GPU"))
    return found


def dummy_on_gpus(machine: Machine) -> Experiment:
    """Section 3: the same network on GPUs; without any, the runs of section 2."""
    if machine.small:
        runs = simulator(machine).runs
        setting = (
            "DummyUNet, 28 steps, one sample, on GPUs with NCCL. There is no GPU here: the runs of section 2 again."
        )
    else:
        runs = named(machine.split(RunConfig(model="dummy", dtype="fp32", **_ONE_DUMMY, **machine.on_device)))
        setting = "DummyUNet, 28 steps, one sample, NCCL, fp32, latents of 8 × 32 × 32, as published."
    rows = partial(_verdicts, "3", machine, figures.DUMMY_TOTAL_S)
    return Experiment("3", "DummyUNet on GPUs", setting, runs, rows)


def _verdicts(section: str, machine: Machine, totals: Mapping[int, float], done: Done) -> list[Row]:
    """Whether the latents are those of one rank, their norm, and the total with start-up, for each number of ranks."""
    verdicts, norms, times = list[Row](), list[Row](), list[Row]()
    one = done.get(ranks_text(1))
    for count, name, run in _finished(done):
        verdict, why = "baseline", ""
        if count > 1:
            verdict, why = _verdict(run, one)
        verdicts.append(Row(section, f"verdict, {name}", "pass" if count > 1 else "baseline", verdict, why=why))
        norm = float(run.latents.norm())
        norms.append(Row(section, f"norm of the final tensor, {name}", "as expected", norm, why="no number published"))
        cpu = "on the CPU" if section == "3" and machine.small else ""
        why = machine.why(run.config, count, cpu, "started warm: nothing is imported")
        alike = run.config.layout.world_size == count
        total = run.phases["total"]
        times.append(Row(section, f"total with start-up, {name}", totals[count], total, "s", why, alike))
    return [*verdicts, *norms, *times]


def _verdict(run: Measured, one: Measured | None) -> tuple[str, str]:
    if one is None:
        return "not compared", "one rank did not finish"
    if torch.equal(run.latents, one.latents):
        return "pass", "bit for bit one rank's latents"
    return "fail", f"latents differ by {(run.latents - one.latents).abs().max():.2g}"


def few_frames(machine: Machine) -> Experiment:
    """Section 5: SVD with one sample of few frames, the more frames the more GPUs."""
    setting = (
        "SVD, one sample, latents of F × 32 × 32 (stated for one of the two tables). Guidance is not stated: one pass "
        "a step is used. Their steps take as long with 2 frames as with 14, so they wait for kernel launches. Their "
        "memory filled from step to step; here no gradients are kept."
    )

    def config(frames: int, gpus: int, steps: int) -> RunConfig:
        base = machine.svd((1, 4, frames, *figures.SMALL_HW), (1, 4, frames, 4, 4))
        layout = Parallel(pp=machine.ranks(gpus))
        return base.replace(total_steps=steps, guidance_scale=1.0, warmup_samples=0, parallel=layout)

    runs = {_frames_text(row.frames, row.gpus): config(*row[:3]) for row in figures.FEW_FRAMES}
    runs |= {_frames_text(frames, 1): config(frames, 1, figures.VIDEO_STEPS) for frames in figures.STEPS_UNTIL_FULL}
    return Experiment("5", "SVD with few frames", setting, runs, partial(_few_frames_rows, machine))


def _frames_text(frames: int, gpus: int) -> str:
    return f"{frames} frames, {ranks_text(gpus)}"


def _few_frames_rows(machine: Machine, done: Done) -> list[Row]:
    found = []
    for row in figures.FEW_FRAMES:
        name = _frames_text(row.frames, row.gpus)
        if (run := done.get(name)) is None:
            continue
        why = machine.why(run.config, row.gpus, "ranks warm up before the clock starts")
        alike = run.config.layout.world_size == row.gpus
        found.append(Row("5", f"total, {name}", row.total_s, run.result["makespan_s"], "s", why, alike))
        if row.gpus == figures.RANKS[-1]:
            why = machine.why(run.config, row.gpus)
            parts = {
                "a step": (figures.SMALL_STEP_S, run.step_s),
                "cold first step": (figures.SMALL_COLD_S, _cold(run)),
            }
            for what, ((least, most), here) in parts.items():
                published = f"{least * 1e3:g} – {most * 1e3:g} ms"
                found.append(Row("5", f"{what}, {name}", published, _ms(here), "ms", why))
    for frames, steps in figures.STEPS_UNTIL_FULL.items():
        if run := done.get(_frames_text(frames, 1)):
            words = f"{run.config.total_steps} steps, peak {run.result['max_peak_memory_gb']:.2g} GB"
            full = f"memory full after {steps} steps"
            found.append(Row("5", f"one card, {frames} frames", full, words, why=machine.why(run.config, 1)))
    return found


def video(machine: Machine) -> Experiment:
    """Section 10: one video, denoised first and decoded when the UNet is gone."""
    config = RunConfig(
        command="generate",
        model="tiny" if machine.small else "svd",
        latent_shape=None if machine.small else figures.VIDEO_LATENTS,
        total_steps=figures.VIDEO_STEPS,
        seed=figures.VIDEO["seed"],
        parallel=Parallel(),
        **machine.on_device,
    )
    setting = (
        "One video in two phases on one GPU: denoising, then decoding when the UNet is freed. 25 steps, 14 frames of "
        "1024 × 576, guidance 1 to 3, seed 42, as published. Then the official pipeline makes the same video."
    )
    if machine.small:
        setting += " Here the tiny model, 64 × 64."
    return Experiment("10", "Two-phase generation", setting, {VIDEO: config}, partial(_video_rows, machine))


def official_path(run: Measured) -> Path:
    """Where the official pipeline's video of that run is, once it is made: beside the run's own."""
    return run.run.folder / "videos" / OFFICIAL


def _video_rows(machine: Machine, done: Done) -> list[Row]:
    if (run := done.get(VIDEO)) is None:
        return []
    known, phases, why = figures.VIDEO, run.phases, machine.why(run.config, 1)
    denoise, decode, total = run.result["makespan_s"], sum(run.result["decode_s"]), phases["total"]
    warm = "; ".join(filter(None, [why, "started warm"]))
    rest = known["total_s"] - known["diffusion_s"] - known["decode_s"]
    others = None if total is None else total - denoise - decode
    times: dict[str, tuple[Value, Value, str]] = {
        "load": (None, phases["load"], "no number published"),
        "encode": (None, phases["encode"], "no number published"),
        "denoise": (known["diffusion_s"], denoise, why),
        "decode and write": (known["decode_s"], decode, why),
        "all the rest: start, load, encode, …": (rest, others, warm),
        "total": (known["total_s"], total, warm),
    }
    found = [Row("10", what, theirs, here, "s", words) for what, (theirs, here, words) in times.items()]
    return found + _mp4_rows(run, why)


def _mp4_rows(run: Measured, why: str) -> list[Row]:
    """Sizes in KB of 1024 bytes, as `ls -h` says and so probably the documents."""
    (ours,), official, published = run.run.video_paths(0), official_path(run), figures.MP4_KB
    found = [Row("10", "MP4 of this lab", published["after it"], ours.stat().st_size / 1024, "KB", why)]
    if official.exists():
        size, equal = official.stat().st_size / 1024, official.read_bytes() == ours.read_bytes()
        found.insert(0, Row("10", "MP4 of the official pipeline", published["official pipeline"], size, "KB", why))
        verdict = ("pass", "the same bytes") if equal else ("fail", "run generate --compare-official to see where")
        found.append(Row("10", "ours is the official video", "other size", verdict[0], why=verdict[1]))
    return found


def throughput(machine: Machine) -> Experiment:
    """Section 11: a step pipeline on 1, 2, 4 and 7 GPUs."""
    known = figures.KNOWN["throughput_cfg3_14x72x128"]
    names = ("total_steps", "num_samples", "warmup_samples", "guidance_scale")
    base = machine.svd(known["latent_shape"], (1, 4, 7, 8, 8)).replace(**{name: known[name] for name in names})
    setting = (
        "Step pipeline, 28 steps, 10 samples after 2 of warm-up, guidance 3, as published; sequential guidance is "
        "inferred from section 12. Interval, throughput and scaling leave out the fill, as theirs do."
    )
    runs = named(machine.split(base.replace(guidance_mode="sequential")))
    return Experiment("11", "Throughput", setting, runs, partial(_throughput_rows, machine))


_THROUGHPUT = {  # key of a result and of the published rows -> what it is called, and the unit
    "first_sample_time_s": ("first sample", "s"),
    "avg_sample_time_s": ("average interval", "s"),
    "throughput_samples_per_s": ("throughput", "/s"),
}


def _throughput_rows(machine: Machine, done: Done) -> list[Row]:
    found = []
    for key, (what, unit) in _THROUGHPUT.items():
        for count, name, run in _finished(done):
            why, alike = machine.why(run.config, count), run.config.layout.world_size == count
            published = figures.THROUGHPUT[count][key]
            found.append(Row("11", f"{what}, {name}", published, run.result[key], unit, why, alike))
    if one := done.get(ranks_text(1)):
        for count, name, run in _finished(done):
            gain = one.result["avg_sample_time_s"] / run.result["avg_sample_time_s"]
            alike = run.config.layout.world_size == count
            why = machine.why(run.config, count)
            found.append(Row("11", f"scaling, {name}", figures.SCALING[count], gain, "×", why, alike))
    return found


def memory_limits(machine: Machine) -> Experiment:
    """Section 12: eight rows, of which two run out of memory; FSDP brings one of them back."""
    runs = {_row_text(number): _memory_config(machine, number) for number in figures.MEMORY}
    setting = "28 steps of one sample, guidance 3, fp16. Sequential guidance is inferred: only so are their peaks met. "
    setting += "FSDP as theirs: all ranks compute the same sample. "
    if machine.small:
        ranks = ranks_text(min(figures.RANKS[-1], machine.cores))
        setting += f"Here the medium model (137 M random parameters), small videos in {SMALL_STEPS} steps (row 6: 1), "
        setting += f"{ranks} for seven GPUs"
    else:
        setting += "Here the published UNet with random weights"
    limit = next(iter(runs.values())).memory_limit_gib
    setting += f", and a limit of {limit:g} GiB that plays the card." if limit else "."
    rows = partial(_memory_rows, machine)
    return Experiment("12", "Memory and FSDP", setting, runs, rows, may_be_full=True)


def _row_text(number: int) -> str:
    row = figures.MEMORY[number]
    size = " × ".join(map(str, (row["frames"], *row["latent_hw"])))
    gpus = f"{row['gpus']} GPU{'s' * (row['gpus'] > 1)}"
    return f"row {number}: {size}, {gpus}" + ", FSDP" * (row["mode"] == "fsdp")


def _memory_config(machine: Machine, number: int) -> RunConfig:
    row = figures.MEMORY[number]
    sharded = row["mode"] == "fsdp"
    count = min(row["gpus"], machine.cores) if machine.small else machine.ranks(row["gpus"])
    small_steps = 1 if number == 6 else SMALL_STEPS
    base = machine.svd((1, 4, row["frames"], *row["latent_hw"]), (1, 4, *SMALL_MEMORY[number]), "medium")
    return base.replace(
        total_steps=small_steps if machine.small else figures.STEPS,
        warmup_samples=0,
        guidance_mode="sequential",
        fsdp_same_sample=sharded,
        parallel=Parallel(dp=count, fsdp=True) if sharded else Parallel(pp=count),
        memory_limit_gib=_limit_gib(machine),
    )


def _limit_gib(machine: Machine) -> float | None:
    """What plays an A5000; None where the cards are no larger."""
    if machine.small:
        return SMALL_LIMIT_GIB
    if machine.card_gib is not None and machine.card_gib < figures.CARD_GIB + 1:
        return None
    return round(figures.CARD_GIB - memory.CONTEXT_GIB, 2)  # the rest is outside PyTorch's allocator


def _memory_rows(machine: Machine, done: Done) -> list[Row]:
    peaks, times = dict[int, Row](), dict[int, Row]()
    for number, row in figures.MEMORY.items():
        if (run := done.get(_row_text(number))) is None:
            continue
        why, alike = machine.why(run.config, row["gpus"]), run.config.layout.world_size == row["gpus"]
        name, full = _row_text(number), "out of memory"
        published, here = row["peak_gb_per_gpu"] or full, run.result["max_peak_memory_gb"]
        peaks[number] = Row("12", f"peak, {name}", published, full if run.outcome == "oom" else here, "GB", why, alike)
        if run.outcome == "ok":
            step_s, known = run.result["first_sample_time_s"] / run.config.total_steps, row["first_sample_time_s"]
            published = None if known is None else known / figures.STEPS
            times[number] = Row("12", f"a step, {name}", published, step_s, "s", why, alike)
    return [*peaks.values(), *times.values(), *_fsdp_rows(peaks, times)]


def _fsdp_rows(peaks: Mapping[int, Row], times: Mapping[int, Row]) -> list[Row]:
    """What FSDP saves and costs: row 5 against row 2."""
    if not {2, 5} <= times.keys():
        return []
    (small, large), (slow, fast) = ([float(rows[n].here or 0) for n in (5, 2)] for rows in (peaks, times))
    why, alike = peaks[5].why, peaks[5].alike
    saved = Row(
        "12",
        "memory saved by FSDP, 25 × 72 × 128",
        100 * figures.FSDP_SAVES,
        100 * (1 - small / large),
        "%",
        why,
        alike,
    )
    return [
        saved,
        Row("12", "time of FSDP / one GPU, 25 × 72 × 128", figures.FSDP_SLOWER, slow / fast, "×", why, alike),
    ]


def comparison(machine: Machine) -> Experiment:
    """Section 13: the step pipeline and data parallel, with two models."""
    known = figures.COMPARISON
    more = {"total_steps": known["total_steps"], "num_samples": known["num_samples"], "guidance_scale": 1.0}
    small, dummy = (1, 4, 14, 20, 36), RunConfig(model="dummy", dtype="fp32", **machine.on_device)
    bases = {
        "DummyUNet": dummy.replace(latent_shape=small if machine.small else known["latent_shape"], **more),
        "SVD": machine.svd(known["latent_shape"], (1, 4, 4, 5, 9)).replace(**more),
    }
    runs = {
        _compared(model, split, count): config.replace(
            warmup_samples=math.ceil(known["warmup_samples"] / config.layout.dp)
        )
        for model, base in bases.items()
        for split, (axis, _) in SPLITS.items()
        for count, config in machine.split(base, axis).items()
    }
    setting = (
        "PP is the step pipeline, DP data parallel. 28 steps, 14 samples after 7 of warm-up, 14 × 40 × 72. They do not "
        "state guidance: their times fit one pass a step (guidance 1), used here. Throughput as they define it: "
        "1 / interval for PP, which leaves out the fill; samples / makespan for DP, which leaves out nothing."
    )
    title = "Step pipeline and data parallel"
    return Experiment("13", title, setting, runs, partial(_compared_rows, machine))


def _compared(model: str, split: str, count: int) -> str:
    return f"{model}, {split}, {ranks_text(count)}"


def _compared_rows(machine: Machine, done: Done) -> list[Row]:
    found, rates = list[Row](), dict[tuple[str, str, int], Row]()
    for model, published in MODELS.items():
        unit, factor = ("s", 1.0) if model == "SVD" else ("ms", 1e3)
        for split, (_, column) in SPLITS.items():
            averages = []
            for count, row in published.items():
                name = _compared(model, split, count)
                if (run := done.get(name)) is None:
                    continue
                why, alike = machine.why(run.config, count), run.config.layout.world_size == count
                known, here = row[f"{column}_samples_per_s"], run.result["throughput_samples_per_s"]
                rates[model, split, count] = Row("13", f"throughput, {name}", known, here, "/s", why, alike)
                here = run.result["avg_sample_time_s"] * factor
                averages.append(Row("13", f"average, {name}", row[f"{column}_avg_{unit}"], here, unit, why, alike))
            found += [row for (*both, _), row in rates.items() if both == [model, split]] + averages
    return found + _pipeline_over_data(rates)


def _pipeline_over_data(rates: Mapping[tuple[str, str, int], Row]) -> list[Row]:
    """The ratio of the two throughputs, which are defined differently."""
    found = []
    for (model, split, count), pipeline in rates.items():
        if split != "PP" or (data := rates.get((model, "DP", count))) is None:
            continue
        theirs, here = (float(getattr(pipeline, side)) / float(getattr(data, side)) for side in ("published", "here"))
        what = f"PP / DP, {model}, {ranks_text(count)}"
        found.append(Row("13", what, theirs, here, "×", pipeline.why, pipeline.alike))
    return found


def _cold(run: Measured) -> float | None:
    return run.phases["cold_step"]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
