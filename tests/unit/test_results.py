"""A run folder written by hand -> its result, its progress, and the first cause of a bad end."""

import json
import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest

import launch
from launch.widgets import watch
from tests.unit.inputs import as_event
from vdpp_core import Parallel, RunConfig
from vdpp_core.cli import show
from vdpp_core.compare import tables
from vdpp_core.predict import prediction, schedule
from vdpp_core.runs import event_types as kinds
from vdpp_core.runs import failure, processes, progress, results, runfolder
from vdpp_core.runs.run import Run

FACTS = {"device": "cpu", "dtype": "float32", "backend": "gloo", "threads": 1}
MEMORY = {"allocated_gb": 0.5, "resident_gb": 1.5}


def process_facts(process):
    return {"pid": process.pid, "created": processes.created_s(process.pid), "host": socket.gethostname()}


HERE = process_facts(psutil.Process())


VIDEO = {"sample": 1, "seconds": 0.7}


@pytest.fixture(scope="module")
def gone():
    """A process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    facts = process_facts(psutil.Process(child.pid))
    child.communicate(b"\n")
    return facts


@pytest.fixture
def folder(tmp_path):
    """Two stages of two steps, two samples, a step takes 1 s."""
    config = RunConfig(total_steps=4, num_samples=2, parallel=Parallel(pp=2), output_dir=tmp_path / "run")
    return runfolder.create(config)


def start(rank, process=HERE):
    steps = [0, 2] if rank == 0 else [2, 4]
    return [
        (90.0, "start", FACTS | process | {"steps": steps}),
        (95.0, "loaded", {}),
        (96.0, "warm", {"seconds": 0.5}),
        (100.0 + rank / 100, "clock", {}),
    ]


def stage(rank, sample, begin, waited=0.0):
    """A sample on a stage: taken up, and two steps of 1 s."""
    first = 2 * rank
    return [
        (begin, "take", {"sample": sample, "seconds": waited}),
        (begin + 1, "step", {"sample": sample, "step": first, "seconds": 1.0}),
        (begin + 2, "step", {"sample": sample, "step": first + 1, "seconds": 1.0}),
    ]


RANK_0 = [
    *stage(0, 0, 100.0),
    (102.0, "send", {"sample": 0, "seconds": 0.0}),
    *stage(0, 1, 102.0),
    (104.5, "send", {"sample": 1, "seconds": 0.5}),
]
RANK_1 = [
    *stage(1, 0, 102.0, waited=2.0),
    (104.0, "sample", {"sample": 0}),
    *stage(1, 1, 105.0, waited=1.0),
    (107.0, "sample", {"sample": 1}),
]


def first_cause(folder, exits):
    run = Run(folder)
    return failure.first_cause(run.config, run.events(), exits)


def done(t):
    return t, "done", {"memory": MEMORY}


@pytest.fixture
def finished(folder, write_events):
    write_events(folder, 0, *start(0), *RANK_0, done(104.6))
    write_events(folder, 1, *start(1), *RANK_1, done(107.1))
    return folder


def test_a_normal_end(finished):
    result = results.write(Run(finished), "ok", predict_times=schedule.run_times)
    assert result["outcome"] == "ok"
    assert "failure" not in result
    assert result["samples_finished"] == 2
    assert result["makespan_s"] == pytest.approx(7.0)
    assert result["first_sample_time_s"] == pytest.approx(4.0)
    assert result["latency_s"] == pytest.approx([4.0, 5.0])
    assert result["interval_s"] == pytest.approx([3.0])
    assert result["utilisation_per_rank"] == pytest.approx([4 / 7, 4 / 7])
    assert result["bubble"] == pytest.approx(3 / 7)
    assert result["handoff_wait_s_per_rank"] == pytest.approx([0.5, 3.0])
    assert result["steady_handoff_wait_share_per_rank"] == pytest.approx([0.25, 0.5])
    assert (result["disturbed"], result["other_ranks_at_work"]) == ([], None)  # nobody looked for other ranks
    assert result["peak_memory_gb_per_rank"] == [0.5, 0.5]
    assert result["max_peak_memory_gb"] == 0.5
    assert (result["world_size"], result["parallel"]) == (2, Parallel(pp=2).model_dump())
    assert (result["total_steps"], result["steps_per_gpu"], result["steps_per_stage"]) == (4, 2, [2, 2])
    assert result["latent_shape"] == [1, 4, 14, 8, 8]
    assert result["predicted"]["step_s_per_stage"] == [0.5, 0.5]
    assert result["predicted"]["makespan_s"] == pytest.approx(3.0)
    assert json.loads((finished / "result.json").read_text()) == result
    assert [path.name for path in finished.iterdir() if path.name.startswith(".")] == []


def test_measured_and_predicted_numbers_have_the_same_keys(finished):
    result = results.summarise(Run(finished), schedule.run_times)
    assert set(result["predicted"]) - {"source", "step_s_per_stage"} <= set(result)


def test_warm_up_samples_are_not_samples(folder, write_events):
    def warm_up(rank, begin):
        return [(t, kind, facts | {"sample": -1, "seconds": 0.2}) for t, kind, facts in stage(rank, 0, begin)]

    write_events(folder, 0, *start(0)[:3], *warm_up(0, 96.0), start(0)[3], *RANK_0, done(104.6))
    write_events(folder, 1, *start(1)[:3], *warm_up(1, 97.0), start(1)[3], *RANK_1, done(107.1))
    result = results.summarise(Run(folder), schedule.run_times)
    assert result["samples_finished"] == 2
    assert result["makespan_s"] == pytest.approx(7.0)
    assert result["latency_s"] == pytest.approx([4.0, 5.0])
    assert result["handoff_wait_s_per_rank"] == pytest.approx([0.5, 3.0])
    assert result["predicted"]["step_s_per_stage"] == [0.2, 0.2]  # from the warm-up samples, not the warm-up step
    far = progress.progress(Run(folder))
    assert [rank["steps_done"] for rank in far["ranks"]] == [4, 4]


def test_a_rank_that_raised(folder, write_events):
    write_events(
        folder,
        0,
        *start(0),
        *RANK_0,
        (105.5, "error", {"error": "LostRankError: lost rank 1: connection closed", "lost_rank": 1}),
    )
    write_events(folder, 1, *start(1), *RANK_1[:6], (106.5, "error", {"error": "ValueError: NaN in step 3"}))
    result = results.settle(Run(folder))
    assert result["outcome"] == "failed"
    assert result["failure"] == {"rank": 1, "sample": 1, "step": 3, "cause": "ValueError: NaN in step 3"}
    assert result["samples_finished"] == 1
    assert result["makespan_s"] == pytest.approx(4.0)
    assert Run(folder).result() == result


def test_the_earliest_own_fault_is_the_first_cause(folder, write_events):
    write_events(folder, 0, *start(0), *RANK_0[:2], (101.5, "error", {"error": "OSError: one"}))
    write_events(folder, 1, *start(1), (101.4, "error", {"error": "OSError: two"}))
    assert first_cause(folder, {}) == {"rank": 1, "sample": None, "step": None, "cause": "OSError: two"}


def test_a_rank_that_vanished(folder, write_events, gone):
    write_events(folder, 0, *start(0, gone), *RANK_0[:6])
    write_events(
        folder,
        1,
        *start(1),
        *RANK_1[:4],
        (104.2, "error", {"error": "LostRankError: lost rank 0: connection closed", "lost_rank": 0}),
    )
    result = results.settle(Run(folder))
    assert result["outcome"] == "failed"
    assert (result["failure"]["rank"], result["failure"]["sample"], result["failure"]["step"]) == (0, 1, 1)
    assert "killed" in result["failure"]["cause"]
    assert result["samples_finished"] == 1


def test_how_a_rank_ended_is_told_by_its_launcher(folder, write_events, gone):
    write_events(folder, 0, *start(0, gone), *RANK_0[:2])
    write_events(folder, 1, *start(1), (101.2, "terminated", {"signal": "SIGTERM"}))
    result = results.settle(Run(folder), exits={0: "SIGKILL"})
    assert result["failure"] == {"rank": 0, "sample": 0, "step": 1, "cause": "SIGKILL"}


ABORTED = -signal.SIGABRT


@pytest.mark.parametrize(
    ("ranks", "exits", "rank", "cause"),
    [
        (2, {0: ABORTED, 1: -signal.SIGKILL}, 1, "killed by SIGKILL"),
        (2, {0: 3, 1: ABORTED}, 0, "ended with exit code 3"),
        (3, {0: ABORTED, 1: ABORTED, 2: 1}, 2, "ended with exit code 1"),
        (3, {0: ABORTED, 1: -signal.SIGSEGV, 2: -signal.SIGKILL}, 1, "killed by SIGSEGV"),
        (8, dict.fromkeys(range(8), ABORTED) | {5: -signal.SIGKILL}, 5, "killed by SIGKILL"),
        (8, dict.fromkeys(range(7), ABORTED), 7, "ended without a word: killed, out of memory, or crashed"),
        (8, dict.fromkeys(range(8), ABORTED), 0, "killed by SIGABRT"),  # nobody else is there
    ],
)
def test_ranks_that_the_watchdog_of_nccl_aborted_are_no_cause(ranks, exits, rank, cause, tmp_path, write_events, gone):
    """They wait for one that is lost, and none of them has a last word."""
    config = RunConfig(total_steps=8, num_samples=2, parallel=Parallel(pp=ranks), output_dir=tmp_path / "run")
    folder = runfolder.create(config)
    for each in range(ranks):
        write_events(folder, each, *start(each, gone), (100.0, "take", {"sample": 0, "seconds": 0.0}))
    failure = results.settle(Run(folder), exits)["failure"]
    assert (failure["rank"], failure["sample"], failure["cause"]) == (rank, 0, cause)


def test_an_aborted_rank_comes_after_one_that_somebody_ended_and_before_losses(folder, write_events, gone):
    write_events(folder, 0, *start(0, gone))
    lost = (101.0, "error", {"error": "LostRankError: lost rank 0: closed", "lost_rank": 0})
    write_events(folder, 1, *start(1), lost)
    assert first_cause(folder, {0: ABORTED})["cause"] == "killed by SIGABRT"
    three = RunConfig(total_steps=6, parallel=Parallel(pp=3), output_dir=folder.parent / "three")
    folder = runfolder.create(three)
    write_events(folder, 0, *start(0, gone))
    write_events(folder, 1, *start(1, gone), (100.5, "terminated", {"signal": "SIGTERM"}))
    write_events(folder, 2, *start(2), (101.0, "error", lost[2] | {"lost_rank": 1}))
    assert first_cause(folder, {0: ABORTED})["rank"] == 1


@pytest.mark.parametrize("ended", [-signal.SIGTERM, 128 + signal.SIGTERM])
def test_those_that_the_agent_ended_are_no_cause(ended, folder):
    """Killed while they start, ranks have said nothing yet; the agent tells the others to end."""
    failure = results.settle(Run(folder), {0: ended, 1: -signal.SIGKILL})["failure"]
    assert (failure["rank"], failure["cause"]) == (1, "killed by SIGKILL")


def test_where_nobody_else_is_known_one_that_was_ended_is_named(folder):
    assert first_cause(folder, {0: -signal.SIGTERM, 1: ABORTED})["rank"] == 1
    assert first_cause(folder, {0: -signal.SIGTERM})["cause"] == "killed by SIGTERM"


def test_of_ranks_that_were_all_told_to_end_the_one_that_was_not_aborted_is_named(folder, write_events):
    for rank in range(2):
        write_events(folder, rank, *start(rank), (101.0, "terminated", {"signal": "SIGTERM"}))
    assert first_cause(folder, {0: ABORTED, 1: -signal.SIGKILL})["rank"] == 1


def test_a_rank_that_was_blamed_by_another(folder, write_events):
    write_events(folder, 0, *start(0), *RANK_0[:2])
    write_events(folder, 1, *start(1), (110.0, "error", {"error": "stalled: no event for 5 s", "blamed": 0}))
    result = results.settle(Run(folder))
    assert result["failure"] == {"rank": 0, "sample": 0, "step": 1, "cause": "stalled: no event for 5 s"}


def test_a_rank_on_another_host_is_not_taken_for_dead(tmp_path, write_events, gone):
    """Whether it is there cannot be known from here; the rank that is known to be gone is the cause."""
    config = RunConfig(total_steps=4, parallel=Parallel(pp=3), output_dir=tmp_path / "run")
    folder = runfolder.create(config)
    write_events(folder, 0, *start(0, HERE | {"host": "elsewhere"}), *stage(0, 0, 100.0))
    write_events(folder, 1, *start(1, gone), (102.0, "take", {"sample": 0, "seconds": 2.0}))
    write_events(folder, 2, *start(2), (103.0, "error", {"error": "LostRankError: lost rank 1", "lost_rank": 1}))
    assert first_cause(folder, {})["rank"] == 1


def test_the_rank_that_was_lost_is_the_cause_also_while_its_process_is_still_ending(folder, write_events):
    """A killed process closes its connections before it is gone, so its neighbour may look too early."""
    write_events(folder, 0, *start(0, HERE), *RANK_0[:6])
    lost = {"error": "LostRankError: lost rank 0: connection closed", "lost_rank": 0}
    write_events(folder, 1, *start(1), *RANK_1[:4], (104.2, "error", lost))
    assert first_cause(folder, {})["rank"] == 0


def test_a_rank_that_was_told_to_end_is_no_failure_also_if_it_wrote_one_step_more(folder, write_events, gone):
    """The guard's thread writes the last word while the main thread computes."""
    late = (103.7, "step", {"sample": 1, "step": 1, "seconds": 1.0})
    write_events(folder, 0, *start(0, gone), *RANK_0[:6], (103.6, "terminated", {"signal": "SIGTERM"}), late)
    write_events(folder, 1, *start(1, gone), *RANK_1[:3], (104.1, "terminated", {"signal": "SIGTERM"}))
    assert results.settle(Run(folder), reason="stopped")["outcome"] == "stopped"


def test_only_losses(folder, write_events):
    for rank in range(2):
        lost = {"error": f"LostRankError: lost rank {1 - rank}", "lost_rank": 1 - rank}
        write_events(folder, rank, *start(rank), (101.0 + rank, "error", lost))
    assert results.settle(Run(folder))["failure"]["cause"] == "LostRankError: lost rank 1"


def test_all_terminated_is_stopped(folder, write_events):
    write_events(folder, 0, *start(0), *RANK_0[:6], (103.6, "terminated", {"signal": "SIGTERM"}))
    write_events(folder, 1, *start(1), *RANK_1[:3], (104.1, "terminated", {"signal": "SIGTERM"}))
    assert first_cause(folder, {}) is None
    result = results.settle(Run(folder))
    assert result["outcome"] == "stopped"
    assert "failure" not in result
    assert result["samples_finished"] == 0
    assert result["peak_memory_gb_per_rank"] == []
    assert result["max_peak_memory_gb"] is None


def test_the_end_of_the_launcher_is_a_cause(folder, write_events):
    for rank in range(2):
        write_events(folder, rank, *start(rank), (101.0, "terminated", {"signal": "the launcher is gone"}))
    result = results.settle(Run(folder), reason="the launcher was killed")
    assert result["outcome"] == "failed"
    assert result["failure"] == {"rank": None, "sample": None, "step": None, "cause": "the launcher was killed"}


def test_a_run_that_never_started_can_be_settled(folder):
    result = results.settle(Run(folder), exits={1: "exit code 1"})
    assert result["failure"] == {"rank": 1, "sample": None, "step": None, "cause": "exit code 1"}
    assert result["samples_finished"] == 0
    assert result["predicted"] is None


def test_settle_never_overwrites(finished):
    results.write(Run(finished), "ok")
    before = (finished / "result.json").read_bytes()
    assert results.settle(Run(finished), exits={0: "SIGKILL"}, reason="stopped")["outcome"] == "ok"
    assert (finished / "result.json").read_bytes() == before


def test_a_half_written_last_line(folder, write_events):
    write_events(folder, 0, *start(0), *RANK_0)
    write_events(folder, 1, *start(1), *RANK_1[:4])
    whole = progress.progress(Run(folder))
    with (folder / "events" / "rank-1.jsonl").open("a") as file:
        file.write('{"t": 105.0, "rank": 1, "kind": "take", "sam')
    assert progress.progress(Run(folder)) == whole
    assert results.summarise(Run(folder))["samples_finished"] == 1


@pytest.mark.parametrize("cut", range(1, 60))
def test_a_line_cut_anywhere(folder, write_events, cut):
    write_events(folder, 0, *start(0), *RANK_0)
    write_events(folder, 1, *start(1), *RANK_1)
    path = folder / "events" / "rank-1.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    assert results.summarise(Run(folder))["samples_finished"] == 1


def test_events_are_in_the_order_of_time(finished):
    times = [event.t for event in Run(finished).events()]
    assert times == sorted(times)
    assert len(times) == len(start(0)) * 2 + len(RANK_0) + len(RANK_1) + 2


def test_progress(folder, write_events):
    assert progress.progress(Run(folder)) == {
        "phase": "starting",
        "samples_finished": 0,
        "num_samples": 2,
        "share": 0,
        "seconds_left": None,
        "stalled": None,
        "ranks": [
            {"rank": rank, "phase": "starting", "sample": None, "step": None, "steps_done": 0, "steps": 4}
            for rank in range(2)
        ],
    }
    write_events(folder, 0, *start(0), *RANK_0[:6])
    write_events(folder, 1, *start(1), *RANK_1[:3])
    far = progress.progress(Run(folder))
    assert [(rank["phase"], rank["sample"], rank["step"]) for rank in far["ranks"]] == [
        ("step", 1, 1),
        ("step", 0, 3),
    ]
    assert [rank["steps_done"] for rank in far["ranks"]] == [3, 2]
    assert far["phase"] == "running"
    assert far["share"] == pytest.approx(5 / 8)
    assert far["seconds_left"] == pytest.approx(4.0 * 3 / 5)
    write_events(folder, 1, *start(1), *RANK_1, done(107.1))
    assert progress.progress(Run(folder))["samples_finished"] == 2


def test_a_rank_that_somebody_ended_is_the_cause_of_its_neighbours_loss(folder, write_events, gone):
    write_events(folder, 0, *start(0, gone), *RANK_0[:6], (103.6, "terminated", {"signal": "SIGTERM"}))
    lost = (104.1, "error", {"error": "LostRankError: lost rank 0: closed", "lost_rank": 0})
    write_events(folder, 1, *start(1, gone), *RANK_1[:3], lost)
    assert first_cause(folder, {})["rank"] == 0
    assert results.settle(Run(folder), reason="stopped")["outcome"] == "stopped"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], (None, None)),
        (RANK_1[:1], (0, 2)),
        (RANK_1[:2], (0, 3)),
        (RANK_1[:3], (0, 3)),  # its last step is done, what it is at is still that sample
        (RANK_1[:5], (1, 2)),
        (RANK_1[:6], (1, 3)),
    ],
)
def test_position(rows, expected):
    own = [as_event({"t": t, "rank": 1, "kind": kind, **facts}) for t, kind, facts in rows]
    assert kinds.position(own, range(2, 4)) == expected


def test_position_in_a_sample_that_is_taken_again_for_the_next_expert():
    take, step = {"sample": 0, "seconds": 0.0}, {"sample": 0, "seconds": 1.0}
    rows = [("take", take), ("step", step | {"step": 0}), ("step", step | {"step": 1}), ("take", take)]
    own = [as_event({"t": float(t), "rank": 0, "kind": kind, **facts}) for t, (kind, facts) in enumerate(rows)]
    assert kinds.position(own, range(4)) == (0, 2)
    assert kinds.position(own, range(2)) == (0, 0)  # warm-up samples share a number


def test_who_was_lost_is_not_known_but_one_is_silent(folder, write_events):
    """Ranks that gather together lose the group; one that was killed may not be gone yet when its neighbour looks."""
    write_events(folder, 0, *start(0, HERE), *RANK_0[:2])
    lost = {"error": "LostRankError: lost rank unknown: connection closed", "lost_rank": "unknown"}
    write_events(folder, 1, *start(1), *RANK_1[:2], (104.2, "error", lost))
    assert first_cause(folder, {})["rank"] == 0


def test_out_of_memory_is_an_outcome_of_its_own(folder, write_events, gone):
    facts = {"requested_gb": 2.95, "free_gb": 2.9, "limit_gib": None, "layer": "up_blocks.3", "phase": "running"}
    full = (104.2, "error", {"error": "out of memory while running, …", "oom": facts})
    write_events(folder, 0, *start(0, gone), *RANK_0[:6])
    write_events(folder, 1, *start(1, gone), *RANK_1[:2], full)
    result = results.settle(Run(folder))
    assert result["outcome"] == "oom"
    failure = result["failure"]
    assert (failure["rank"], failure["cause"], failure["oom"]) == (1, full[2]["error"], facts)
    assert (failure["sample"], failure["step"]) == kinds.position(
        [event for event in Run(folder).events() if event.rank == 1], range(2, 4)
    )


def test_a_run_that_makes_videos(folder, write_events):
    """After its last step a rank is at the sample that it decodes."""
    decoding = [(110.0, "decode", {"sample": 2}), (110.5, "chunk", {"sample": 2})]
    write_events(folder, 0, *start(0), *RANK_0, *decoding)
    write_events(folder, 1, *start(1), *RANK_1, (110.2, "decode", {"sample": 1}), (110.9, "video", VIDEO))
    far = progress.progress(Run(folder))
    assert far["phase"] == "decoding"
    assert [(rank["phase"], rank["sample"], rank["step"]) for rank in far["ranks"]] == [
        ("chunk", 2, None),
        ("video", 1, None),
    ]
    result = results.summarise(Run(folder))
    assert (result["videos_written"], result["decode_s"], result["official"]) == (1, [0.7], None)
    write_events(folder, 0, *start(0), *RANK_0, *decoding, (111.0, "comparing", {"sample": 2, "step": 0}))
    assert progress.progress(Run(folder))["phase"] == "comparing"
    write_events(folder, 0, *start(0), *RANK_0, *decoding, (111.0, "error", {"error": "FloatingPointError: black"}))
    failure = {"rank": 0, "sample": 2, "step": None, "cause": "FloatingPointError: black"}
    assert first_cause(folder, {}) == failure


@pytest.fixture
def as_ready(folder, write_events):
    """The last stage decodes each sample, in 1 s, before it takes the next one."""
    made = RunConfig.read(folder).replace(command="generate", decode="as-ready")
    (folder / "config.json").write_text(made.to_json())

    def decoded(sample, begin):
        sending = [(begin, "sample", {"sample": sample}), (begin, "decode", {"sample": sample})]
        return [*sending, (begin + 1, "video", {"sample": sample, "seconds": 1.0})]

    write_events(folder, 0, *start(0), *RANK_0, done(104.6))
    rank_1 = [*stage(1, 0, 102.0), *decoded(0, 104.0), *stage(1, 1, 105.0), *decoded(1, 107.0)]
    write_events(folder, 1, *start(1), *rank_1, done(108.1))
    return folder


def test_decoding_between_samples_is_predicted_and_drawn_as_a_span_of_its_own(as_ready):
    result = results.write(Run(as_ready), "ok", predict_times=schedule.run_times)
    predicted = result["predicted"]
    assert predicted["source"] == "the steps before the clock started and the first decoding"
    assert (result["makespan_s"], predicted["makespan_s"]) == pytest.approx((7.0, 4.0))
    assert (result["time_to_first_video_s"], predicted["time_to_first_video_s"]) == pytest.approx((5.0, 3.0))
    assert predicted["interval_s"] == pytest.approx([2.0])
    assert predicted["utilisation_per_rank"] == pytest.approx([0.5, 0.5])  # decoding is no step
    spans = [span for span in results.measured_spans(Run(as_ready).events()) if span.beside]
    assert [(span.rank, span.sample) for span in spans] == [(1, 0), (1, 1)]
    assert [at for span in spans for at in (span.start, span.end)] == pytest.approx([4.0, 5.0, 7.0, 8.0])
    assert "last step after 7 s" in launch.timeline([launch.Job(as_ready)]).get_suptitle()
    table = launch.compare([launch.Job(as_ready)])["run"]
    assert (table["time_to_first_video_s"], table["predicted_time_to_first_video_s"]) == (5.0, 3.0)


def test_what_is_handed_on_stands_beside_its_prediction(folder, write_events, capsys):
    prediction.record(folder)
    sent = [(t, kind, facts | ({"size": 14336} if kind == "send" else {})) for t, kind, facts in RANK_0]
    write_events(folder, 0, *start(0), *sent, done(104.6))
    write_events(folder, 1, *start(1), *RANK_1, done(107.1))
    result = results.write(Run(folder), "ok")
    assert result["handoff_bytes_per_rank"] == result["predicted"]["handoff_bytes_per_rank"] == [14336, None]
    assert result["predicted"]["solver"] == "EulerDiscreteScheduler"
    (row,) = tables.table([folder]).to_dict("records")
    assert row["handoff_mb"] == row["predicted_handoff_mb"] == 0.014336
    show.run(folder, as_json=False)
    said = capsys.readouterr().out
    assert "hand-off of each rank (MB)         0.01434, –" in said
    assert "predicted hand-off (MB)            0.01434, – (EulerDiscreteScheduler)" in said


def test_a_rank_that_decodes_says_which_sample(as_ready, write_events):
    write_events(as_ready, 1, *start(1), *stage(1, 0, 102.0), (104.0, "decode", {"sample": 0}))
    assert "decoding sample 0" in watch.page(launch.Job(as_ready))


def test_a_replica_without_samples(tmp_path, write_events):
    config = RunConfig(total_steps=2, num_samples=1, parallel=Parallel(dp=2), output_dir=tmp_path / "run")
    folder = runfolder.create(config)
    steps = [
        (100.0, "take", {"sample": 0, "seconds": 0.0}),
        (101.0, "step", {"sample": 0, "step": 0, "seconds": 1.0}),
        (102.0, "step", {"sample": 0, "step": 1, "seconds": 1.0}),
        (102.0, "sample", {"sample": 0}),
    ]
    write_events(folder, 0, *start(0), *steps, done(102.1))
    write_events(folder, 1, start(1)[0], (100.0, "clock", {}), done(100.1))
    result = results.summarise(Run(folder))
    assert result["utilisation_per_rank"] == pytest.approx([1.0, 0.0])
    assert result["makespan_s"] == pytest.approx(2.0)
    assert progress.progress(Run(folder))["share"] == 1.0


def test_table(finished, tmp_path, write_events):
    results.write(Run(finished), "ok")
    second = runfolder.create(RunConfig.read(finished).replace(output_dir=tmp_path / "second"))
    write_events(second, 0, *start(0), (101.0, "terminated", {"signal": "SIGTERM"}))
    results.settle(Run(second))
    unsettled = runfolder.create(RunConfig.read(finished).replace(output_dir=tmp_path / "third"))
    rows = tables.table([finished, second, unsettled])
    assert list(rows.run_id) == ["run", "second"]
    assert list(rows.outcome) == ["ok", "stopped"]
    assert rows.makespan_s[0] == pytest.approx(7.0)
    assert rows.latency_s[0] == pytest.approx(4.5)
    assert list(rows.layout) == ["pp 2", "pp 2"]


def test_which_process_is_a_rank(gone):
    def start_of(process):
        return as_event({"t": 90.0, "rank": 0, "kind": "start"} | FACTS | process)

    assert processes.is_rank(start_of(HERE))
    assert not processes.is_rank(start_of(gone))
    later = HERE | {"created": HERE["created"] - 60}  # the number was given to a later process
    assert not processes.is_rank(start_of(later))
    assert not processes.is_rank(start_of(HERE | {"host": "elsewhere"}))


def test_a_zombie_is_no_rank():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = as_event({"t": 90.0, "rank": 0, "kind": "start"} | FACTS | process_facts(psutil.Process(child.pid)))
    assert processes.is_rank(start)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and not yet waited for
    assert not processes.is_rank(start)
    child.communicate()


def test_the_launcher_of_a_run(folder):
    assert Run(folder).launcher() is None
    assert not Run(folder).launcher_alive()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    processes.write_launcher(folder, child.pid)
    assert Run(folder).launcher_alive()
    child.communicate(b"\n")
    assert not Run(folder).launcher_alive()
