"""Which rank keeps the others waiting: events written by hand, looked at some seconds later."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys

import psutil
import pytest

from tests.unit.inputs import as_event
from vdpp_core import Parallel, RunConfig
from vdpp_core.runs import processes, runfolder, stalls
from vdpp_core.runs.run import Run, Work

STEPS = 4
FACTS = {"threads": 1, "device": "cpu", "dtype": "float32", "backend": "gloo", "host": socket.gethostname()}


def config(num_samples=3, **axes):
    return RunConfig(
        total_steps=STEPS, num_samples=num_samples, parallel=Parallel(**axes), timeout_s=30, stall_steps=10
    )


def begun(rank, pid=None, created=0.0):
    return [
        {"t": 90.0, "rank": rank, "kind": "start", **FACTS, "pid": pid or 2**22 + rank, "created": created},
        {"t": 95.0, "rank": rank, "kind": "warm", "seconds": 1.0},
        {"t": 100.0, "rank": rank, "kind": "clock"},
    ]


def work(rank, sample, t, steps, end=None):
    """A sample taken up at t, some steps of a second each, and what follows the last of them."""
    events = [{"t": t, "rank": rank, "kind": "take", "sample": sample, "seconds": 0.0}]
    for number, step in enumerate(steps, start=1):
        events.append({"t": t + number, "rank": rank, "kind": "step", "sample": sample, "step": step, "seconds": 1.0})
    return events + (
        [{"t": t + len(steps), "rank": rank, "kind": end, "sample": sample, "seconds": 0.0}] if end else []
    )


def look(of, *events, at, todo=None):
    events = sorted((as_event(event) for some in events for event in some), key=lambda event: event.t)
    return stalls.look(of, Work(1, range(of.num_samples) if todo is None else todo), events, at)


def test_a_rank_in_the_middle_of_its_steps():
    events = begun(0), work(0, 0, 100.0, [0, 1])
    assert look(config(), *events, at=111.9) is None  # less than ten of its own steps ago
    stall = look(config(), *events, at=112.1)
    assert (stall.rank, stall.sample, stall.step, stall.waiting) == (0, 0, 2, ())
    assert stall.silent_s == pytest.approx(10.1)
    assert str(stall) == "rank 0 has been silent for 10.1 s at sample 0, step 2, 10 of its own steps"


def test_the_run_ends_after_timeout_or_five_steps_of_a_slow_rank():
    assert look(config(), begun(0), work(0, 0, 100.0, [0]), at=140).limit_s == 30
    slow = work(0, 0, 100.0, [0])
    slow[-1]["seconds"] = 20.0
    assert look(config(), begun(0)[:1], begun(0)[2:], slow, at=400).limit_s == 100


def test_a_stage_that_waits_is_not_stalled():
    """The second stage has nothing to do while the first one does slow work, and is named as the one that waits."""
    first, second = work(0, 0, 100.0, [0, 1], "send") + work(0, 1, 102.0, [0]), work(1, 0, 102.0, [2, 3], "sample")
    pp = config(pp=2)
    assert look(pp, begun(0), begun(1), [*first, first[-1] | {"t": 130.0}], second, at=131.0) is None
    stall = look(pp, begun(0), begun(1), first, second, at=120.0)
    assert (stall.rank, stall.sample, stall.step, stall.waiting) == (0, 1, 1, (1,))
    assert str(stall).endswith("17 of its own steps; rank 1 waits for it")


def test_a_stage_that_has_no_room_to_send_is_not_stalled():
    first, second = work(0, 2, 100.0, [0, 1]), work(1, 0, 90.0, [2])
    stall = look(config(pp=2), begun(0), begun(1), first, second, at=120.0)
    assert (stall.rank, stall.step, stall.waiting) == (1, 3, (0,))


def test_replicas_that_are_done_do_not_hide_one_that_is_not():
    done = [{"t": 105.0, "rank": 0, "kind": "done", "memory": {}}]
    dp = config(num_samples=2, dp=2)
    stall = look(dp, begun(0), begun(1), work(0, 0, 100.0, range(4), "sample"), done, work(1, 1, 100.0, [0]), at=130)
    assert (stall.rank, stall.sample, stall.step, stall.waiting) == (1, 1, 1, ())


def test_nothing_is_stalled_before_the_clock_or_after_the_end():
    loading = begun(0)[:1], begun(1)[:2]
    assert look(config(pp=2), *loading, at=500.0) is None
    assert look(config(pp=2), *loading, at=90 + processes.PATIENCE_S + 10).rank == 0
    over = [{"t": 200.0, "rank": 0, "kind": "done", "memory": {}}]
    assert look(config(), begun(0), over, at=1e6) is None


def test_loading_the_decoder_is_no_stall():
    """All samples are done; generate goes on, and no pace is known of what it does."""
    first = [event for sample in range(3) for event in work(0, sample, 100.0 + 2 * sample, [0, 1], "send")]
    second = [event for sample in range(3) for event in work(1, sample, 102.0 + 2 * sample, [2, 3], "sample")]
    assert look(config(pp=2), begun(0), begun(1), first, second, at=500.0) is None


@pytest.mark.parametrize("todo", [[0], []], ids=str)
@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 1, "pp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_a_rank_without_samples_is_no_stall(axes, todo):
    """It waits at the clock until the others have made their videos, as when few samples of a run are resumed."""
    of = config(num_samples=2, **axes)
    busy = work(0, 0, 100.0, range(STEPS // of.layout.pp), "send" if of.layout.pp > 1 else "sample") if todo else []
    if todo and of.layout.pp > 1:
        busy += work(1, 0, 102.0, [2, 3], "sample")
    assert look(of, *(begun(rank) for rank in range(of.layout.world_size)), busy, at=900.0, todo=todo) is None


def test_the_fill_of_a_pipeline_over_machines_is_no_stall():
    """The last stage hears nothing until the first sample went through all the others, here on another machine."""
    of = RunConfig(total_steps=40, num_samples=3, parallel=Parallel(pp=4), timeout_s=30)
    theirs = [
        event | {"host": "elsewhere"} if event["kind"] == "start" else event
        for rank in range(3)
        for event in begun(rank)
    ]
    assert look(of, theirs, begun(3), at=100.0 + 30 * 1.1) is None
    assert look(of, theirs, begun(3), at=100.0 + 3 * 40 * 1.1).rank == 2


def test_replicas_that_are_through_do_not_take_the_blame_for_others():
    of = config(num_samples=2, dp=2, pp=2)
    through = work(2, 1, 100.0, [0, 1], "send"), work(3, 1, 102.0, [2, 3], "sample")
    waiting = work(0, 0, 100.0, [0, 1]), work(1, 0, 103.0, [2])
    stall = look(of, *(begun(rank) for rank in range(4)), *through, *waiting, at=150.0)
    assert stall.rank == 1


@pytest.mark.parametrize("freezes", [{}, {3: 8.1}, {3: 60.0}, {1: 4.0, 5: 9.9, 19: 0.7}, dict.fromkeys(range(21), 0.2)])
def test_nobody_is_to_blame_for_the_time_in_which_the_watchdog_itself_stood_still(
    freezes, tmp_path, write_events, monkeypatch
):
    """It looks twice a second; after some looks it stands still, and the next one comes later by so many seconds."""
    one = config().replace(output_dir=tmp_path / "run", timeout_s=5)
    write_events(runfolder.create(one), 0, *((e["t"], e["kind"], e) for e in [*begun(0), *work(0, 0, 100.0, [0])]))
    t = heard = 101.0  # of a rank that takes a second a step
    monkeypatch.setattr(stalls, "now", lambda: t)
    monkeypatch.setattr(Run, "silence_s", lambda _: t - heard)
    watchdog = stalls.Watchdog(Run(tmp_path / "run"))
    assert watchdog.fatal() is None
    for number in range(20):
        t += 0.5 + freezes.get(number, 0.0)
        assert watchdog.fatal() is None, number
    t += 0.5 + freezes.get(20, 0.0)
    stall = watchdog.fatal()
    assert (stall.rank, stall.silent_s) == (0, pytest.approx(10.5))


@pytest.mark.parametrize("axes", [{"pp": 2}, {"frames": 2}], ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_a_rank_of_another_machine_is_named_when_the_run_ends(axes, shared):
    """The link to it is cut. What it wrote, on shared storage or not at all, says nothing: its clock is its own."""
    steps = [0, 1] if "pp" in axes else [0]
    theirs = [*begun(1), *work(1, 0, 500.0, [0])] if shared else []
    if theirs:
        theirs[0]["host"] = "elsewhere"
    events = begun(0), work(0, 1, 100.0, steps), theirs
    assert look(config(**axes), *events, at=125.0) is None
    stall = look(config(**axes), *events, at=135.0)
    assert (stall.rank, stall.sample, stall.waiting) == (1, 1, (0,))
    assert stall.cause.startswith("nothing was heard of it for 3")  # what the other side's silence is called, too
    assert stall.cause.endswith("s (timeout_s); rank 0 waits for it at sample 1, step 1")
    assert re.fullmatch(r"rank 1 has been silent for 3\d\.\d s; rank 0 waits for it", str(stall))
    assert stall.ends_run
    assert stall.limit_s == 30


def test_ranks_that_wait_for_each_other_have_lost_their_connection():
    first, second = work(0, 0, 100.0, [0, 1], "send"), work(1, 0, 103.0, [2, 3], "sample")
    first += work(0, 1, 102.0, [0, 1])
    stall = look(config(pp=2), begun(0), begun(1), first, second, at=130.0)
    assert (stall.rank, stall.waiting) == (0, (1,))


def test_of_ranks_in_lockstep_the_stopped_one_is_to_blame():
    """All of them are in the middle of a step; which one does not move only its process tells."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = psutil.Process(child.pid)
    second = begun(1, process.pid, processes.created_s(process.pid))
    frames = config(frames=2)
    try:
        events = begun(0), second, work(0, 0, 100.0, [0]), work(1, 0, 100.5, [0])
        assert look(frames, *events, at=130.0).rank == 0
        process.suspend()
        while process.status() != psutil.STATUS_STOPPED:
            pass
        assert look(frames, *events, at=130.0).rank == 1
        loading = look(frames, begun(0)[:1], second[:1], at=100.0)  # also before anything has a pace
        assert (loading.rank, loading.waiting) == (1, (0,))
    finally:
        process.resume()
        child.communicate(b"\n")


def test_a_watchdog_keeps_little_and_sees_the_same(tmp_path, write_events):
    one = config(num_samples=100).replace(output_dir=tmp_path / "run")
    folder = runfolder.create(one)
    events = begun(0) + [
        event for sample in range(99) for event in work(0, sample, 100.0 + 4 * sample, range(4), "sample")
    ]
    events += work(0, 99, 500.0, [0, 1])
    write_events(folder, 0, *((e["t"], e["kind"], {k: v for k, v in e.items() if k != "t"}) for e in events))
    watchdog = stalls.Watchdog(Run(folder))
    assert len(watchdog.events()) < 2 * stalls.KEPT < len(events)
    assert watchdog.events() == watchdog.events()
    os.utime(folder / "events" / "rank-0.jsonl", (0, 0))  # written to for the last time long ago
    stall = watchdog.fatal()
    assert (stall.rank, stall.sample, stall.step, stall.step_s) == (0, 99, 2, 1.0)
