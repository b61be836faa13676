"""The predicted schedule against closed forms, and against what the user's documents measured."""

import itertools
import math

import pytest

from vdpp_core import Parallel, RunConfig, split
from vdpp_core.schedule import Span, even_makespan, numbers, predict, spans

STEP_S = 0.3

# fmt: off
# The user's documents, pipeline against data parallel: SVD fp16, 28 steps, 14 samples on A5000s.
# ranks, pipeline samples/s, data parallel samples/s, pipeline average s, data parallel average s
DOCUMENTED = [
    (1, 0.118, 0.117, 8.49, 8.54),
    (2, 0.234, 0.234, 4.28, 8.53),
    (4, 0.490, 0.409, 2.04, 8.55),
    (7, 0.855, 0.817, 1.17, 8.57),
]
# The same documents, throughput at 14×72×128: average sample in s, samples/s, ms of each sample.
# Of their two warm-up samples the second is here: for their ten timed ones it is what our first sample is.
DOCUMENTED_TIMES = [
    (54.8414, 0.0182, [53946.79, 54550.99, 54775.82, 54839.04, 54879.59, 54892.14, 54886.2, 54889.78, 54882.01,
                       54910.34, 54908.0]),
    (27.5037, 0.0364, [26571.24, 27453.74, 27537.86, 27528.72, 27519.97, 27511.92, 27498.93, 27504.48, 27504.58,
                       27479.94, 27496.73]),
    (13.6105, 0.0735, [13022.17, 13094.21, 13148.31, 13282.91, 13663.25, 13802.88, 13817.14, 13820.85, 13798.44,
                       13828.35, 13849.05]),
    (7.561, 0.1323, [7487.1, 7467.46, 7476.47, 7506.11, 7531.1, 7543.78, 7569.81, 7588.49, 7628.79,
                     7641.03, 7656.71]),
]
# fmt: on


def schedule(total_steps, num_samples, dp=1, pp=1, step_s=STEP_S):
    layout = Parallel(dp=dp, pp=pp)
    sizes = [len(steps) for steps in split(total_steps, pp)]
    planned = spans(layout, sizes, num_samples, [step_s] * pp if isinstance(step_s, float) else step_s)
    return planned, numbers(planned, layout)


@pytest.mark.parametrize("num_samples", [1, 2, 3, 14])
@pytest.mark.parametrize("stages", range(1, 8))
@pytest.mark.parametrize("total_steps", [25, 28])
def test_step_pipeline(total_steps, stages, num_samples):
    planned, result = schedule(total_steps, num_samples, pp=stages)
    longest = math.ceil(total_steps / stages) * STEP_S
    makespan = total_steps * STEP_S + (num_samples - 1) * longest
    assert result["makespan_s"] == pytest.approx(makespan)
    assert even_makespan(total_steps, stages, num_samples, STEP_S) == pytest.approx(makespan)
    assert result["samples_finished"] == num_samples
    assert result["samples_per_s"] == pytest.approx(num_samples / makespan)
    assert result["first_sample_time_s"] == pytest.approx(total_steps * STEP_S)
    assert result["interval_s"] == pytest.approx([longest] * (num_samples - 1))
    # the longest stages come first, so a sample never waits on its way: latency has no queueing in it
    assert result["latency_s"] == pytest.approx([total_steps * STEP_S] * num_samples)
    assert sum(result["utilisation_per_rank"]) == pytest.approx(num_samples * total_steps * STEP_S / makespan)
    assert result["bubble"] == pytest.approx(1 - num_samples * total_steps * STEP_S / makespan / stages)
    if num_samples == 1:
        assert result["steady_state_samples_per_s"] is None
    else:
        assert result["steady_state_samples_per_s"] == pytest.approx(1 / longest)
    assert len(planned) == stages * num_samples


@pytest.mark.parametrize("num_samples", [1, 4, 5, 14])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 7])
def test_data_parallel(replicas, num_samples):
    _, result = schedule(28, num_samples, dp=replicas)
    sample_s = 28 * STEP_S
    rounds = math.ceil(num_samples / replicas)
    assert result["makespan_s"] == pytest.approx(rounds * sample_s)
    assert result["latency_s"] == pytest.approx([sample_s] * num_samples)
    assert result["first_sample_time_s"] == pytest.approx(sample_s)
    assert result["avg_sample_time_s"] == pytest.approx(sample_s)
    assert result["per_sample_times_ms"] == pytest.approx([sample_s * 1000] * num_samples)
    busy_ranks = [len(range(rank, num_samples, replicas)) / rounds for rank in range(replicas)]
    assert result["utilisation_per_rank"] == pytest.approx(busy_ranks)
    assert result["bubble"] == pytest.approx(1 - num_samples / replicas / rounds)


@pytest.mark.parametrize("num_samples", [1, 3, 5, 7, 14])
@pytest.mark.parametrize("ranks", range(1, 8))
@pytest.mark.parametrize("total_steps", [25, 28])
def test_on_equal_ranks_a_step_pipeline_is_never_sooner_done_than_data_parallel(total_steps, ranks, num_samples):
    pipeline, data = (schedule(total_steps, num_samples, **axes)[1] for axes in ({"pp": ranks}, {"dp": ranks}))
    assert data["makespan_s"] <= pipeline["makespan_s"] + 1e-9


@pytest.mark.parametrize(("dp", "pp", "num_samples"), [(2, 2, 5), (3, 2, 7), (2, 3, 2)])
def test_replicas_of_pipelines(dp, pp, num_samples):
    planned, result = schedule(24, num_samples, dp=dp, pp=pp)
    rounds = math.ceil(num_samples / dp)
    assert result["makespan_s"] == pytest.approx(even_makespan(24, pp, rounds, STEP_S))
    assert {span.rank // pp for span in planned if span.sample % dp == 1} == {1}


def test_replicas_without_a_sample_are_idle():
    planned, result = schedule(28, 3, dp=5)
    assert {span.rank for span in planned} == {0, 1, 2}
    assert result["utilisation_per_rank"] == pytest.approx([1, 1, 1, 0, 0])
    assert result["bubble"] == pytest.approx(0.4)
    assert result["makespan_s"] == pytest.approx(28 * STEP_S)
    assert result["samples_per_s"] == pytest.approx(3 / (28 * STEP_S))


def test_an_unequal_stage_sets_the_interval():
    _, result = schedule(28, 5, pp=2, step_s=[0.1, 0.3])
    assert result["interval_s"] == pytest.approx([14 * 0.3] * 4)
    assert result["makespan_s"] == pytest.approx(14 * 0.1 + 5 * 14 * 0.3)
    # stage 0 runs ahead: sample m is taken up at m·1.4 s and leaves at 1.4 + (m+1)·4.2 s, waiting included
    assert result["latency_s"] == pytest.approx([1.4 + (m + 1) * 4.2 - m * 1.4 for m in range(5)])
    assert result["utilisation_per_rank"] == pytest.approx([7 / 22.4, 21 / 22.4])

    _, slow_first = schedule(28, 5, pp=2, step_s=[0.3, 0.1])
    assert slow_first["latency_s"] == pytest.approx([5.6] * 5)
    assert slow_first["makespan_s"] == pytest.approx(result["makespan_s"])


def test_nothing_overlaps_on_a_rank_and_no_stage_starts_early():
    planned, _ = schedule(25, 6, dp=2, pp=3, step_s=[0.2, 0.5, 0.1])
    for rank in range(6):
        own = sorted((span for span in planned if span.rank == rank), key=lambda span: span.start)
        assert all(later.start >= earlier.end - 1e-9 for earlier, later in itertools.pairwise(own))
    for sample in range(6):
        path = sorted((span for span in planned if span.sample == sample), key=lambda span: span.rank)
        assert [span.rank for span in path] == [sample % 2 * 3 + stage for stage in range(3)]
        assert all(later.start >= earlier.end - 1e-9 for earlier, later in itertools.pairwise(path))


def test_numbers_of_a_schedule_written_by_hand():
    layout = Parallel(pp=2)
    written = [
        Span(0, 0, 0.0, 1.0, 0.9),
        Span(0, 1, 1.0, 2.0, 1.0),
        Span(1, 0, 1.5, 3.0, 1.5),
        Span(1, 1, 3.0, 5.0, 2.0),
    ]
    result = numbers(written, layout)
    assert result["latency_s"] == [3.0, 4.0]
    assert result["interval_s"] == [2.0]
    assert result["makespan_s"] == 5.0
    assert result["utilisation_per_rank"] == pytest.approx([1.9 / 5, 3.5 / 5])
    assert result["bubble"] == pytest.approx(1 - 5.4 / 10)
    assert result["per_sample_times_ms"] == [3000.0, 2000.0]
    assert result["avg_sample_time_s"] == 2.0  # the documents leave the first sample out
    assert result["throughput_samples_per_s"] == 0.5
    assert result["samples_per_s"] == 0.4
    assert numbers([], layout) == {"samples_finished": 0}
    assert numbers([Span(0, 0, 0.0, 1.0, 1.0)], layout) == {"samples_finished": 0}


def test_predict_of_a_configuration():
    config = RunConfig(total_steps=28, num_samples=3, parallel=Parallel(pp=2), stage_weights=(3, 1))
    result = predict(config, [0.1, 0.3])  # 21 · 0.1 = 7 · 0.3
    assert result["makespan_s"] == pytest.approx(2.1 * 4)
    assert result["utilisation_per_rank"] == pytest.approx([0.75, 0.75])


@pytest.mark.parametrize(("ranks", "_", "samples_per_s", "__", "average_s"), DOCUMENTED)
def test_the_documents_data_parallel_throughput(ranks, _, samples_per_s, __, average_s):
    """14 samples of 8.55 s on 4 ranks: four rounds, 0.409 samples/s."""
    _, result = schedule(28, 14, dp=ranks, step_s=average_s / 28)
    if ranks > 1:  # one rank is a pipeline as well, with its definition
        assert result["throughput_samples_per_s"] == pytest.approx(result["samples_per_s"])
    assert result["samples_per_s"] == pytest.approx(samples_per_s, rel=0.01)
    assert result["avg_sample_time_s"] == pytest.approx(average_s)


@pytest.mark.parametrize(("ranks", "samples_per_s", "_", "average_s", "__"), DOCUMENTED)
def test_the_documents_pipeline_throughput_leaves_the_fill_out(ranks, samples_per_s, _, average_s, __):
    """Their 0.490 on 4 ranks is one over the average interval; with the fill 14 samples take 17 intervals."""
    _, result = schedule(28, 14, pp=ranks, step_s=average_s * ranks / 28)
    assert result["throughput_samples_per_s"] == pytest.approx(samples_per_s, rel=0.01)
    assert result["steady_state_samples_per_s"] == pytest.approx(samples_per_s, rel=0.01)
    assert result["samples_per_s"] == pytest.approx(14 / ((14 + ranks - 1) * average_s))


@pytest.mark.parametrize(("average_s", "samples_per_s", "times_ms"), DOCUMENTED_TIMES)
def test_the_documents_definitions(average_s, samples_per_s, times_ms):
    """A replica's first sample is left out of the average, as their warm-up samples are; throughput is its inverse."""
    ends = list(itertools.accumulate(milliseconds / 1000 for milliseconds in times_ms))
    starts = [0.0, *ends[:-1]]
    rebuilt = [Span(0, m, start, end, end - start) for m, (start, end) in enumerate(zip(starts, ends, strict=True))]
    result = numbers(rebuilt, Parallel())
    assert result["avg_sample_time_s"] == pytest.approx(average_s, abs=1e-4)
    assert result["throughput_samples_per_s"] == pytest.approx(samples_per_s, abs=1e-4)
    assert result["per_sample_times_ms"] == pytest.approx(times_ms)
