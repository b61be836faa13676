"""A run folder -> its result: metrics from the event log, and after a bad end what was the first cause."""

from __future__ import annotations

import signal
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from vdpp_core.config import RunConfig
from vdpp_core.runs import disturbed, machine, metrics, processes, resuming, runfolder
from vdpp_core.runs.events import ENDS, Event, Follower, clock_starts, position
from vdpp_core.runs.metrics import Span

PredictTimes = Callable[[RunConfig, list[float]], dict[str, Any]]

# How ranks end when another one is gone: by NCCL's watchdog, or by torchrun's agent.
_CONSEQUENCES = (-signal.SIGABRT, -signal.SIGTERM, 128 + signal.SIGTERM)


def measured_spans(events: Sequence[Event]) -> list[Span]:
    """One span for each sample on each rank, warm-up left out, in seconds since the clock started."""
    zero = clock_starts(events)
    return [
        Span(
            rank,
            sample,
            start=part[0]["t"] - part[0]["seconds"] - zero[rank],
            end=part[-1]["t"] - zero[rank],
            busy=sum(event["seconds"] for event in part),
        )
        for (rank, sample), part in measured_steps(events).items()
        if rank in zero
    ]


def measured_steps(events: Sequence[Event]) -> dict[tuple[int, int], list[Event]]:
    """(rank, sample) -> the events of its steps there, warm-up left out."""
    steps: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["kind"] == "step" and event["sample"] >= 0:
            steps[event["rank"], event["sample"]].append(event)
    return steps


def write(
    folder: Path,
    outcome: str,
    failure: dict[str, Any] | None = None,
    predict_times: PredictTimes | None = None,
) -> dict[str, Any]:
    """Compute the result of a run folder and write result.json, the last of its files.

    Where it cannot be written, it is returned all the same: whoever asks later computes it again.
    """
    result = summarise(folder, predict_times) | {"outcome": outcome} | ({"failure": failure} if failure else {})
    try:
        runfolder.write_result(folder, result)
    except OSError as error:  # no room, or somebody else's folder
        warnings.warn(f"{folder / 'result.json'} was not written: {error}", stacklevel=2)
    return result


def summarise(folder: Path, predict_times: PredictTimes | None = None) -> dict[str, Any]:
    """All that a run's events tell, finished or not, with what it ran on."""
    config, log = RunConfig.read(folder), Follower(folder)
    events, layout, work = log.events(), config.layout, resuming.work(folder, config)
    finished = {event["sample"] for event in events if event["kind"] == "sample"}
    spans = [span for span in measured_spans(events) if span.sample in finished]
    whole = len({event["rank"] for event in events}) == layout.world_size  # not on a machine that lost the others
    started = {event["rank"]: event for event in events if event["kind"] == "start"}
    memory = {event["rank"]: event["memory"] for event in events if event["kind"] == "done"}
    sent = {event["rank"]: event["sent_bytes"] / 1e9 for event in events if "sent_bytes" in event}
    peaks = [memory[rank]["allocated_gb"] for rank in sorted(memory)]
    hardware = machine.hardware()
    return {
        "run_id": folder.name,
        "outcome": None,
        "world_size": layout.world_size,
        "parallel": layout.model_dump(),
        "total_steps": config.total_steps,
        "steps_per_gpu": max(len(steps) for steps in config.stages()),
        "steps_per_stage": [len(steps) for steps in config.stages()],
        "latent_shape": list(config.shape),
        "num_samples": config.num_samples,
        "fsdp": layout.fsdp,
        **(numbers := metrics.numbers(spans, layout) if whole else {"samples_finished": len(finished)}),
        "samples_finished": len(work.kept) + numbers["samples_finished"],
        "resumed": {"attempt": work.attempt, "samples_kept": len(work.kept)} if work.attempt > 1 else None,
        "damaged": log.damaged,
        "disturbed": disturbed.reasons(config, events, hardware["cores"]),
        "other_ranks_at_work": disturbed.other_ranks(events),
        **_waits(events, config, work.latents),
        "peak_memory_gb_per_rank": peaks,
        "max_peak_memory_gb": max(peaks, default=None),
        "lockstep_gb_per_step_per_rank": [sent[rank] for rank in sorted(sent)],
        "memory_per_rank": [memory[rank] for rank in sorted(memory)],
        "predicted": _predicted(folder, config, events, len(work.latents), predict_times),
        **_videos(events, config),
        "threads_per_rank": [started[rank]["threads"] for rank in sorted(started)],
        "device": next((event["device"] for event in started.values()), None),
        "dtype": next((event["dtype"] for event in started.values()), None),
        "backend": next((event["backend"] for event in started.values()), None),
        "hosts": sorted({event["host"] for event in started.values() if "host" in event}),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "hardware": hardware,
        "versions": machine.versions(),
        "git_commit": machine.git_commit(),
    }


def _waits(events: Sequence[Event], config: RunConfig, samples: Sequence[int]) -> dict[str, Any]:
    """Seconds that ranks waited for latents to come or to leave; in the steady state: without a rank's first sample."""
    layout = config.layout
    total, steady, busy = ([0.0] * layout.world_size for _ in range(3))
    firsts = [config.samples(replica, samples)[:1] for replica in range(layout.dp)]
    for event in events:
        rank, sample = event["rank"], event.get("sample", -1)
        if sample < 0 or event["kind"] not in ("take", "send", "step"):
            continue
        later = sample not in firsts[layout.place(rank).replica]
        if event["kind"] == "step":
            busy[rank] += event["seconds"] * later
        else:
            total[rank] += event["seconds"]
            steady[rank] += event["seconds"] * later
    shares = [wait / work if work else None for wait, work in zip(steady, busy, strict=True)]
    return {"handoff_wait_s_per_rank": total, "steady_handoff_wait_share_per_rank": shares}


def _videos(events: Sequence[Event], config: RunConfig) -> dict[str, Any]:
    """What `generate` made after the last step; None where it made none."""
    videos = sorted((event for event in events if event["kind"] == "video"), key=lambda event: event["sample"])
    compared = [event for event in events if event["kind"] == "official"]
    peaks = {event["rank"]: event["decode_memory"] for event in events if "decode_memory" in event}
    return {
        "videos_written": len(videos) * config.shape[0],
        "decode_s": [event["seconds"] for event in videos],
        "decode_peak_memory_gb_per_rank": [peaks[rank]["allocated_gb"] for rank in sorted(peaks)],
        "official": {
            "samples": len(compared),
            "equal_latents": sum(event["equal_latents"] for event in compared),
            "equal_frames": sum(event["equal_frames"] for event in compared),
            "max_latent_difference": max(event["max_latent_difference"] for event in compared),
            "max_frame_difference": max(event["max_frame_difference"] for event in compared),
            "max_batch_difference": max(
                (event["max_batch_difference"] for event in compared if "max_batch_difference" in event), default=None
            ),
        }
        if compared
        else None,
    }


def _predicted(
    folder: Path, config: RunConfig, events: Sequence[Event], samples: int, predict_times: PredictTimes | None
) -> dict[str, Any] | None:
    """The predicted peak memory of a rank; and, from the steps before the clock started (of the warm-up samples, else
    the warm-up step), the predicted times."""
    layout = config.layout
    expected = runfolder.read_prediction(folder)
    if expected is None:  # runs of earlier versions
        expected = next((event["predicted_memory"] for event in events if "predicted_memory" in event), None)
    memory = {"memory": expected, "max_peak_memory_gb": expected["peak_gb"]} if expected else {}
    step_s: dict[int, list[float]] = defaultdict(list)
    for event in events:
        if event["kind"] == "step" and event["sample"] < 0:
            step_s[layout.place(event["rank"]).stage].append(event["seconds"])
    for event in events:
        stage = layout.place(event["rank"]).stage
        if event["kind"] == "warm" and not step_s[stage]:
            step_s[stage].append(event["seconds"])
    if predict_times is None or not samples or not all(step_s[stage] for stage in range(layout.pp)):
        return memory or None
    seconds = [median(step_s[stage]) for stage in range(layout.pp)]
    known = {"source": "the steps before the clock started", "step_s_per_stage": seconds}
    return memory | known | predict_times(config.replace(num_samples=samples), seconds)


def settle(
    folder: Path,
    exits: Mapping[int, int | str] | None = None,
    reason: str | None = None,
    again: bool = False,
    predict_times: PredictTimes | None = None,
) -> dict[str, Any]:
    """Write the result of a run that did not reach its end, unless there is one already.

    Args:
        exits: what the launcher saw of ranks that ended by themselves: rank -> exit code, below 0 the signal that
            killed it; or, in words, how.
        reason: what ended the run where no rank did: "stopped" by somebody, or the launcher's end.
        predict_times: config and seconds of a step on each stage -> the predicted times, in the names of the result.
        again: replace the account of a bad end that a rank gave before this one, when less was known.
    """
    result = runfolder.read_result(folder)
    if result is not None and (not again or result["outcome"] == "ok"):
        return result
    if _all_done(folder):  # the result itself was lost
        return write(folder, "ok", None, predict_times)
    failure = first_cause(folder, exits or {})
    if reason == "stopped" and not _own_fault(folder):  # that some ranks lost others is then no wonder
        failure = None
    if failure is not None and not (reason and _all_vanished(folder)):
        return write(folder, "oom" if "oom" in failure else "failed", failure, predict_times)
    if reason is None or reason == "stopped":
        return write(folder, "stopped", None, predict_times)
    return write(folder, "failed", {"rank": None, "sample": None, "step": None, "cause": reason}, predict_times)


def _own_fault(folder: Path) -> bool:
    """Whether a rank failed by itself and not by the loss of another."""
    events = runfolder.read_events(folder)
    return any(event["kind"] == "error" and event.get("lost_rank") is None for event in events)


def _all_done(folder: Path) -> bool:
    events = runfolder.read_events(folder)
    done = {event["rank"] for event in events if event["kind"] == "done"}
    whole = len(done) == RunConfig.read(folder).layout.world_size
    return whole and not any(event["kind"] in ("error", "terminated") for event in events)


def _all_vanished(folder: Path) -> bool:
    """Whether no rank left a last word, as when the machine went down."""
    return not any(event["kind"] in ENDS for event in runfolder.read_events(folder))


def all_ended(folder: Path) -> bool:
    """Whether ranks have started, and each has had its last word or is known to be gone."""
    events = runfolder.read_events(folder)
    ended = {event["rank"] for event in events if event["kind"] in ("error", "terminated")}
    starts = [event for event in events if event["kind"] == "start"]
    return bool(starts) and all(start["rank"] in ended or processes.has_vanished(start) for start in starts)


def first_cause(folder: Path, exits: Mapping[int, int | str]) -> dict[str, Any] | None:
    """The rank that failed first, where it was and why; None where every rank was ended from outside.

    In this order: the earliest error that is not the loss of another rank; a rank that is gone without a last word;
    a rank without a last word that another one lost, or the only such where the lost one is not known; a rank killed by
    SIGABRT, with which NCCL's watchdog ends those that wait for a lost one, or by SIGTERM, as torchrun's agent ends the
    others; the first loss.
    """
    config = RunConfig.read(folder)
    by_rank: dict[int, list[Event]] = {rank: [] for rank in range(config.layout.world_size)}
    for event in runfolder.read_events(folder):
        if event["rank"] in by_rank:
            by_rank[event["rank"]].append(event)
    ends = [event for own in by_rank.values() for event in own if event["kind"] in ENDS]
    errors = sorted((event for event in ends if event["kind"] == "error"), key=lambda event: event["t"])
    own_faults = [event for event in errors if event.get("lost_rank") is None]
    silent = sorted(by_rank.keys() - {event["rank"] for event in ends})
    gone = [rank for rank in silent if rank in exits]
    starts = {event["rank"]: event for own in by_rank.values() for event in own if event["kind"] == "start"}
    gone += [rank for rank in silent if rank in starts and processes.has_vanished(starts[rank])]
    lost = {event.get("lost_rank") for event in errors}
    gone += [rank for rank in silent if rank in lost or (lost == {"unknown"} and len(silent) == 1)]
    ended = sorted((rank for rank in gone if exits.get(rank) in _CONSEQUENCES), key=lambda rank: _turn(exits[rank]))
    gone = [rank for rank in gone if rank not in ended]
    terminated = {event["rank"] for event in ends if event["kind"] == "terminated"}
    more: dict[str, Any] = {}
    told = [event["lost_rank"] for event in errors if event.get("lost_rank") in terminated]
    if own_faults:
        fault = own_faults[0]
        rank, cause = fault["blamed"] if "blamed" in fault else fault["rank"], fault["error"]
        more = {"oom": fault["oom"]} if "oom" in fault else {}
    elif gone:
        rank, cause = gone[0], _ending(exits.get(gone[0], "ended without a word: killed, out of memory, or crashed"))
    elif told:
        rank, cause = told[0], "ended from outside by a signal"
    elif ended:
        rank, cause = ended[0], _ending(exits[ended[0]])
    elif errors:
        rank, cause = errors[0]["rank"], errors[0]["error"]
    elif exits:
        rank = min(exits, key=lambda rank: _turn(exits[rank]))
        cause = _ending(exits[rank])
    else:
        return None
    sample, step = position(by_rank[rank], config.stages()[config.layout.place(rank).stage])
    return {"rank": rank, "sample": sample, "step": step, "cause": cause, **more}


def _turn(known: int | str) -> int:
    """Of ends that may all be consequences, which is the likelier cause: the lower number."""
    return _CONSEQUENCES.index(known) + 1 if known in _CONSEQUENCES else 0


def _ending(known: int | str) -> str:
    """In words, how a process ended."""
    if isinstance(known, str):
        return known
    if known >= 0:
        return f"ended with exit code {known}"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-known, f'signal {-known}')}"
