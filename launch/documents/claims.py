"""Claims of the documents that need no run: what their own other numbers give."""

from __future__ import annotations

import math

from launch.documents import figures
from launch.documents.rows import Row, place
from vdpp_core.parallel.devices import GIB

T, S, M = figures.EXPECTED_STEP_S, figures.STEPS, 10  # seconds of a step, steps, samples of their expectations
SAMPLES = figures.COMPARISON["num_samples"]


def ten_samples_s(gpus: int) -> float:
    """Seconds of ten samples in a step pipeline with their expected seconds of a step: fill, then nine intervals."""
    return S * T + (M - 1) * S / gpus * T


def ten_measured_s(gpus: int) -> float:
    """Seconds of ten samples with the fill, from the first sample and the average interval of section 11."""
    row = figures.THROUGHPUT[gpus]
    return row["first_sample_time_s"] + (M - 1) * row["avg_sample_time_s"]


def data_parallel_per_s(gpus: int) -> float:
    """Samples per second of data parallel in section 13, from its rounds: ⌈14 / GPUs⌉ samples one after another."""
    return SAMPLES / (math.ceil(SAMPLES / gpus) * figures.SVD[gpus]["data_avg_s"])


def pipeline_per_s(gpus: int) -> float:
    """Samples per second of the step pipeline in section 13 with its fill counted, as data parallel's rounds are."""
    return SAMPLES / (figures.SVD[1]["pipeline_avg_s"] + (SAMPLES - 1) * figures.SVD[gpus]["pipeline_avg_s"])


def parameters_gb() -> float:
    """Parameters of the UNet in GB, from what sharding over seven GPUs saved in section 12."""
    one, seven = figures.MEMORY[2], figures.MEMORY[5]
    return (one["peak_gb_per_gpu"] - seven["peak_gb_per_gpu"]) / (1 - 1 / seven["gpus"])


def all_of() -> list[Row]:
    """A row for each claim, by section: `published` is the claim, `here` what their own numbers give, `why` the
    verdict."""
    found = [*_slower(), *_expectations(), *_memory(), *_throughput(), *_comparison(), *_readme_and_guide()]
    return sorted(found, key=lambda row: place(row.section))


def _memory() -> list[Row]:
    row, large, sharded = (figures.MEMORY[number] for number in (1, 2, 5))
    peak, saved = row["peak_gb_per_gpu"], 1 - sharded["peak_gb_per_gpu"] / large["peak_gb_per_gpu"]
    grew = " and ".join(str(frames * steps) for frames, steps in figures.STEPS_UNTIL_FULL.items())
    need = (
        f"wrong: row 1 of section 12 has 14 frames of nine times the pixels in {peak} GB of one card. Memory was full "
        f"after {grew} frames × steps: it grew with each step, as if gradients were kept"
    )
    download = f"too high: row 1 of section 12 needs {peak} GB in all; 10 GB is the size of the download"
    lost_gb = large["peak_gb_per_gpu"] - sharded["peak_gb_per_gpu"]
    own = f"too high: FSDP on 7 cards saved 6/7 of them, {lost_gb:.2f} GB"
    slower = sharded["first_sample_time_s"] / large["first_sample_time_s"]
    tensor = "the size of one tensor, 256 × 14 × 576 × 1024 × 4 bytes; the decoder's peak is several of them"
    one_tensor = 256 * 14 * 576 * 1024 * 4 / GIB
    parts = "right: rows 2 and 5"
    return [
        Row("5", "GPUs that 14 frames need", 7, row["gpus"], why=need),
        Row("10", "model on each GPU", figures.MODEL_GB, peak, "GB", download),
        Row("10", "decoding 14 frames at once", figures.DECODING_AT_ONCE_GIB, one_tensor, "GiB", tensor),
        Row("12", "parameters of the UNet", figures.PARAMETERS_GB, parameters_gb(), "GB", own),
        Row("12", "memory saved by FSDP", figures.FSDP_SAVES * 100, saved * 100, "%", parts),
        Row("12", "time of FSDP / one GPU", figures.FSDP_SLOWER, slower, "×", parts),
    ]


def _expectations() -> list[Row]:
    found = []
    for gpus, expected in figures.EXPECTED_TEN_S.items():
        gives = ten_samples_s(gpus)
        means = f"{expected / gives - 1:+.0%}: fill and nine intervals, steps of {T} s" if gpus > 1 else "right"
        found.append(Row("9", f"10 samples, {_gpus(gpus)}", expected, gives, "s", means))
    for gpus, gain in figures.EXPECTED_GAIN.items():
        if gpus > 1:
            gives, measured = figures.EXPECTED_TEN_S[1] / figures.EXPECTED_TEN_S[gpus], _measured_gain(gpus)
            means = f"right for those times; section 11 measured {measured:.2f} with the fill"
            found.append(Row("9", f"gain, {_gpus(gpus)}", gain, gives, "×", means))
    one, short, long = figures.EXPECTED_TEN_S[1], figures.EXPECTED_TEN_S[7], figures.EXPECTED_TEN_ON_SEVEN_S
    seven, steady = figures.EXPECTED_LATENCY_S + (M - 1) * S / 7 * T, 7 / (S * T)
    total = f"fits a first sample of 8 s, and contradicts the {short} s of section 9"
    rate = f"right for 10 samples in {long} s; in the steady state the same steps give {steady:.2f}"
    times = f"right for {long} s; {one / short:.1f} for the {short} s of section 9"
    return [
        *found,
        Row("8", "10 samples, 7 GPUs", long, seven, "s", total),
        Row("8", "throughput, 7 GPUs", figures.EXPECTED_SAMPLES_PER_S, M / long, "/s", rate),
        Row("8", "7 GPUs against one", figures.EXPECTED_TIMES_FASTER, one / long, "×", times),
    ]


def _measured_gain(gpus: int) -> float:
    """How much sooner ten samples of section 11 are ready, the fill counted."""
    return ten_measured_s(1) / ten_measured_s(gpus)


def _slower() -> list[Row]:
    times, why = figures.DUMMY_TOTAL_S, "right, but of start-up: 28 steps of 0.5 ms are 14 ms of the 3.93 s"
    return [
        Row("8", f"one sample slower, {_gpus(gpus)}", slower * 100, 100 * (times[gpus] / times[1] - 1), "%", why)
        for gpus, slower in figures.SLOWER.items()
    ]


def _readme_and_guide() -> list[Row]:
    one, seven = figures.THROUGHPUT[1], figures.THROUGHPUT[7]
    alone, first, interval = one["first_sample_time_s"], seven["first_sample_time_s"], seven["avg_sample_time_s"]
    bounds = [f"{least} – {most} s" for least, most in (figures.README_ONE_GPU_S, figures.README_STEADY_S)]
    never = f"wrong: a sample still runs all its steps, {alone:.1f} s on one GPU (section 11)"
    found = [
        Row("README", "a sample, 1 GPU", bounds[0], alone, "s", "right (section 11)"),
        Row("README", "first sample, 7 GPUs", figures.README_FIRST_S, first, "s", never),
        Row("README", "interval, 7 GPUs", bounds[1], interval, "s", "a little better than that (section 11)"),
    ]
    for gpus, gain in figures.GUIDE_GAIN.items():
        gives = one["avg_sample_time_s"] / figures.THROUGHPUT[gpus]["avg_sample_time_s"]
        means = f"right without the fill (section 11); 10 samples with it: {_measured_gain(gpus):.2f}"
        found.append(Row("guide", f"throughput, {_gpus(gpus)} against one", gain, gives, "×", means))
    return found


def _throughput() -> list[Row]:
    one, seven = figures.THROUGHPUT[1], figures.THROUGHPUT[7]
    exact, to_first = (one[key] / seven["avg_sample_time_s"] for key in ("avg_sample_time_s", "first_sample_time_s"))
    rounded = seven["throughput_samples_per_s"] / one["throughput_samples_per_s"]
    slows = " to ".join(f"{one['per_sample_times_ms'][sample] / 1e3:.1f}" for sample in (0, -1))
    means = (
        f"{rounded:.2f} divides rounded throughputs, the times give {exact:.2f}. The one GPU slows from {slows} s as "
        f"it runs: against its first sample it is {to_first:.2f}"
    )
    found = [Row("11", "scaling, 7 GPUs", figures.SCALING[7], exact, "×", means)]
    for gpus, seconds in figures.TEN_SAMPLES_S.items():
        means = "leaves out the fill" if gpus > 1 else "right"
        found.append(Row("11", f"10 samples, {_gpus(gpus)}", seconds, ten_measured_s(gpus), "s", means))
    return found


def _comparison() -> list[Row]:
    one, four, seven = (figures.SVD[gpus] for gpus in (1, 4, 7))
    alone, first = (figures.THROUGHPUT[gpus]["first_sample_time_s"] for gpus in (1, 7))
    latency = (
        f"wrong: {seven['pipeline_avg_s']} s is an interval, {seven['data_avg_s']} s a latency. A sample runs all 28 "
        f"steps in both: in section 11 {alone:.1f} s on one GPU, {first:.1f} s on seven"
    )
    fill = (
        f"leaves out the fill on one side: {four['data_samples_per_s']} is 14 samples in 4 rounds of "
        f"{four['data_avg_s']} s; with {one['pipeline_avg_s']} s of fill the pipeline has {pipeline_per_s(4):.3f}"
    )
    found = [Row("13", "latency, data parallel / pipeline, 7 GPUs", figures.LATENCY_GAIN, alone / first, "×", latency)]
    for gpus, means in ((4, fill), (7, "the same: with the fill, data parallel is ahead")):
        row = figures.SVD[gpus]
        ahead = row["pipeline_samples_per_s"] / row["data_samples_per_s"]
        really = pipeline_per_s(gpus) / data_parallel_per_s(gpus)
        found.append(Row("13", f"pipeline / data parallel, {_gpus(gpus)}", ahead, really, "×", means))
    rounds = "right, and no loss of speed: 14 samples take 4 rounds, the last half empty"
    known = figures.SCALING_OF_FOUR["data"]
    return [*found, Row("13", "scaling of data parallel, 4 GPUs", known, SAMPLES / math.ceil(SAMPLES / 4), "×", rounds)]


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count > 1)}"
