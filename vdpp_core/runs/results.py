"""A run folder -> its result: metrics from the event log and, after a bad end, its first cause."""

from __future__ import annotations

import itertools
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from vdpp_core.config import RunConfig
from vdpp_core.runs import disturbed, machine, metrics, processes, runfolder
from vdpp_core.runs import event_types as kinds
from vdpp_core.runs.event_types import Event, clock_starts
from vdpp_core.runs.events import Follower
from vdpp_core.runs.failure import first_cause
from vdpp_core.runs.metrics import Span
from vdpp_core.runs.run import Run
from vdpp_core.runs.time_spent import time_spent

_BESIDE = {"video": "decoding", "encode": "encoding"}  # event -> what its span shows
PredictTimes = Callable[[RunConfig, list[float], float, float], dict[str, Any]]


def measured_spans(events: Sequence[Event]) -> list[Span]:
    """One span for each visit of a sample to a rank, without warm-up, in seconds since the clock started; then one for
    each decoding, each encoding of a manifest's row, and each loading of an expert."""
    zero = clock_starts(events)
    return (
        [
            Span(
                rank,
                sample,
                part[0].t - part[0].seconds - zero[rank],
                part[-1].t - zero[rank],
                sum(e.seconds for e in part),
            )
            for (rank, sample, _), part in measured_steps(events).items()
            if rank in zero
        ]
        + [
            Span(event.rank, event.sample, end - event.seconds, end, event.seconds, beside=_BESIDE[event.kind])
            for event in events
            if isinstance(event, kinds.Video | kinds.Encode) and event.rank in zero
            for end in (event.t - zero[event.rank],)
        ]
        + [
            Span(event.rank, -1, end - event.seconds, end, event.seconds, beside="swapping")
            for event in kinds.of(events, kinds.Swapped)
            if event.rank in zero
            for end in (event.t - zero[event.rank],)
            if end > event.seconds
        ]
    )


def measured_steps(events: Sequence[Event]) -> dict[tuple[int, int, int], list[kinds.Step]]:
    """(rank, sample, visit) -> the events of its steps there, without warm-up. A sample visits a rank twice where its
    experts are swapped."""
    steps: dict[tuple[int, int, int], list[kinds.Step]] = defaultdict(list)
    visits: Counter[tuple[int, int]] = Counter()
    for event in events:
        if isinstance(event, kinds.Take) and event.sample >= 0:
            visits[event.rank, event.sample] += 1
        if isinstance(event, kinds.Step) and event.sample >= 0:
            steps[event.rank, event.sample, visits[event.rank, event.sample]].append(event)
    return steps


def write(
    run: Run, outcome: str, failure: dict[str, Any] | None = None, predict_times: PredictTimes | None = None
) -> dict[str, Any]:
    """Compute the result of a run and write result.json, the last of its files.

    Where the file cannot be written, the result is returned all the same, and can be computed again later.
    """
    result = summarise(run, predict_times) | {"outcome": outcome} | ({"failure": failure} if failure else {})
    try:
        runfolder.write_result(run.folder, result)
    except OSError as error:  # the disk is full, or the folder is another user's
        warnings.warn(f"{run.folder / 'result.json'} was not written: {error}", stacklevel=2)
    return result


def summarise(run: Run, predict_times: PredictTimes | None = None) -> dict[str, Any]:
    """Everything that a run's events say, finished or not, and what it ran on. The names carry the units."""
    config, work, log = run.config, run.work, Follower(run.folder)
    events, layout = log.events(), config.layout
    finished = {event.sample for event in kinds.of(events, kinds.Finished)}
    spans = [span for span in measured_spans(events) if span.sample in finished]
    whole = len({event.rank for event in events}) == layout.world_size  # not on a machine that lost the others
    first, starts = (
        next(iter(kinds.of(events, kinds.Start)), None),
        kinds.last_of(events, kinds.Start).values(),
    )
    done = kinds.last_of(events, kinds.Done).values()
    memory = [each.memory for each in done]
    peaks = [each["allocated_gb"] for each in memory]
    warms = kinds.last_of(events, kinds.Warm)
    sent = [warm.sent_bytes for warm in warms.values()]
    predicted = _predicted_before(run, events)
    if "makespan_s" not in predicted:  # times that were predicted before the run stay what they were
        predicted |= _predicted_times(config, events, work.latents, predict_times)
    hardware = machine.hardware()
    numbers = metrics.numbers(spans, layout, config.swap_batch) if whole else {"samples_finished": len(finished)}
    return {
        "run_id": run.id,
        "outcome": None,
        "world_size": layout.world_size,
        "parallel": layout.model_dump(),
        "total_steps": config.total_steps,
        "steps_per_gpu": max(len(steps) for steps in config.stages()),
        "steps_per_stage": [len(steps) for steps in config.stages()],
        "latent_shape": list(config.shape),
        "num_samples": config.num_samples,
        "fsdp": layout.fsdp,
        **numbers,
        "samples_finished": len(work.kept) + numbers["samples_finished"],
        "resumed": {"attempt": work.attempt, "samples_kept": len(work.kept)} if work.attempt > 1 else None,
        "damaged": log.damaged,
        "disturbed": disturbed.reasons(config, events, hardware["cores"]),
        "other_ranks_at_work": disturbed.other_ranks(events),
        **_waits(events, config, work.latents),
        "handoff_bytes_per_rank": _handoff_bytes(events, layout.world_size),
        "peak_memory_gb_per_rank": peaks,
        "max_peak_memory_gb": max(peaks, default=None),
        "device_use_per_rank": [each.device_use for each in done],
        "lockstep_gb_per_step_per_rank": [number / 1e9 for number in sent if number is not None],
        "memory_per_rank": memory,
        "predicted": predicted or None,
        **_videos(events, config),
        "time_s_per_rank": [
            time_spent([event for event in events if event.rank == rank]) for rank in range(layout.world_size)
        ],
        "cold_step_s_per_rank": [warms[rank].cold_s if rank in warms else None for rank in range(layout.world_size)],
        "threads_per_rank": [start.threads for start in starts],
        "device": first and first.device,
        "dtype": first and first.dtype,
        "backend": first and first.backend,
        "hosts": sorted({start.host for start in starts}),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "hardware": hardware,
        "versions": machine.versions(),
        "git_commit": machine.git_commit(),
    }


def _waits(events: Sequence[Event], config: RunConfig, samples: Sequence[int]) -> dict[str, Any]:
    """Seconds that ranks waited to receive or hand on latents; in the steady state without a rank's first sample."""
    layout = config.layout
    total, steady, busy = ([0.0] * layout.world_size for _ in range(3))
    firsts = [config.samples_at(layout.place(rank), samples)[:1] for rank in range(layout.world_size)]
    for event in events:
        if not isinstance(event, kinds.Take | kinds.Send | kinds.Step) or event.sample < 0:
            continue
        later = event.sample not in firsts[event.rank]
        if isinstance(event, kinds.Step):
            busy[event.rank] += event.seconds * later
        else:
            total[event.rank] += event.seconds
            steady[event.rank] += event.seconds * later
    shares = [wait / work if work else None for wait, work in zip(steady, busy, strict=True)]
    return {"handoff_wait_s_per_rank": total, "steady_handoff_wait_share_per_rank": shares}


def _handoff_bytes(events: Sequence[Event], ranks: int) -> list[int | None]:
    """Bytes of the largest message with which each rank handed a sample on; None where it handed none on."""
    found: list[int | None] = [None] * ranks
    for event in kinds.of(events, kinds.Send):
        found[event.rank] = max(found[event.rank] or 0, event.size or 0) or None
    return found


def _videos(events: Sequence[Event], config: RunConfig) -> dict[str, Any]:
    """What `generate` made after the last step, and how it compares with the official pipeline where that was asked."""
    videos = sorted(kinds.of(events, kinds.Video), key=lambda event: event.sample)
    compared = kinds.of(events, kinds.Official)
    memory = [done.decode_memory for done in kinds.last_of(events, kinds.Done).values()]
    zero = clock_starts(events)
    made_s = [event.t - zero[event.rank] for event in videos if event.rank in zero]
    batches = [event.max_batch_difference for event in compared if event.max_batch_difference is not None]
    relative = [each.relative_latent_difference for each in compared if each.relative_latent_difference is not None]
    return {
        "videos_written": len(videos) * config.shape[0],
        "time_to_first_video_s": min(made_s, default=None),
        "decode_s": [event.seconds for event in videos],
        "decode_peak_memory_gb_per_rank": [each["allocated_gb"] for each in memory if each],
        "official": {
            "samples": len(compared),
            "equal_latents": sum(event.equal_latents for event in compared),
            "equal_frames": sum(event.equal_frames for event in compared),
            "max_latent_difference": max(event.max_latent_difference for event in compared),
            "relative_latent_difference": max(relative, default=None),
            "max_frame_difference": max(event.max_frame_difference for event in compared),
            "max_batch_difference": max(batches, default=None),
        }
        if compared
        else None,
    }


def _predicted_before(run: Run, events: Sequence[Event]) -> dict[str, Any]:
    """What was predicted before the run: the peak memory of a rank in GB, the bytes that ranks hand on, and the times
    where they were (None: nobody knew)."""
    of_earlier_versions = ({"memory": event.predicted_memory} for event in kinds.of(events, kinds.Predicted))
    found = run.prediction or next(of_earlier_versions, None)
    return found | {"max_peak_memory_gb": found["memory"]["peak_gb"]} if found else {}


def _predicted_times(
    config: RunConfig, events: Sequence[Event], samples: Sequence[int], predict_times: PredictTimes | None
) -> dict[str, Any]:
    """Times predicted from the steps before the clock started: of the warm-up samples, else the warm-up step; and from
    the first decoding, before which none is timed."""
    stages: list[list[Event]] = [[] for _ in range(config.layout.pp)]
    for event in events:
        stages[config.layout.place(event.rank).stage].append(event)
    step_s = [_seconds_before_the_clock(stage) for stage in stages]
    if predict_times is None or not samples or not all(step_s):
        return {}
    seconds, video = list(map(median, step_s)), next(iter(kinds.of(events, kinds.Video)), None)
    before = itertools.takewhile(lambda event: not isinstance(event, kinds.Clock), events)
    swaps = [swap.seconds for swap in kinds.of(before, kinds.Swapped)]  # each rank begins with one
    source = "the steps before the clock started" + " and the first decoding" * (video is not None)
    known = {"source": source, "step_s_per_stage": seconds}
    decode_s, swap_s = video.seconds if video else 0.0, median(swaps or [0.0])
    return known | predict_times(config.replace(num_samples=len(samples)), seconds, decode_s, swap_s)


def _seconds_before_the_clock(stage: Sequence[Event]) -> list[float]:
    warm_up_samples = [step.seconds for step in kinds.of(stage, kinds.Step) if step.sample < 0]
    return warm_up_samples or [warm.seconds for warm in kinds.of(stage, kinds.Warm)][:1]


def settle(
    run: Run,
    exits: Mapping[int, int | str] | None = None,
    reason: str | None = None,
    again: bool = False,
    predict_times: PredictTimes | None = None,
) -> dict[str, Any]:
    """Write the result of a run that did not reach its end, unless it has one already.

    Args:
        exits: how ranks ended that the launcher saw end by themselves: rank -> exit code, negative for the signal that
            killed it, or the cause in words.
        reason: what ended the run where no rank did: "stopped" by the user, or how the launcher ended.
        again: replace the account of a bad end that a rank wrote earlier, when less was known.
        predict_times: config, seconds of a step on each stage and of decoding a sample (0: not known) -> the predicted
            times, named as in the result.
    """
    result = run.result()
    if result is not None and (not again or result["outcome"] == "ok"):
        return result
    events = run.events()
    if _all_done(events, run.config):  # the result itself was lost
        return write(run, "ok", None, predict_times)
    failure = first_cause(run.config, events, exits or {})
    own_fault = any(error.lost_rank is None for error in kinds.of(events, kinds.Error))
    all_vanished = not kinds.of(events, kinds.LastWord)  # as when the machine went down
    if failure and not (reason == "stopped" and not own_fault) and not (reason and all_vanished):
        return write(run, "oom" if "oom" in failure else "failed", failure, predict_times)
    if reason is None or reason == "stopped":
        return write(run, "stopped", None, predict_times)
    return write(run, "failed", {"rank": None, "sample": None, "step": None, "cause": reason}, predict_times)


def _all_done(events: Sequence[Event], config: RunConfig) -> bool:
    done = kinds.last_of(events, kinds.Done)
    return len(done) == config.layout.world_size and not kinds.of(events, kinds.BadEnd)


def all_ended(run: Run) -> bool:
    """Whether ranks have started, and each has failed, was terminated or is known to be gone."""
    events = run.events()
    ended, starts = kinds.last_of(events, kinds.BadEnd), kinds.of(events, kinds.Start)
    return bool(starts) and all(start.rank in ended or processes.has_vanished(start) for start in starts)
