"""The commands, as they are called from a terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.patience import wait_for_end
from vdpp_core import Parallel, RunConfig
from vdpp_core.runs.run import Run

OF_THE_DOCUMENTS = {
    "world_size",
    "total_steps",
    "steps_per_gpu",
    "first_sample_time_s",
    "avg_sample_time_s",
    "throughput_samples_per_s",
    "per_sample_times_ms",
    "peak_memory_gb_per_rank",
    "max_peak_memory_gb",
    "fsdp",
    "latent_shape",
}
OURS = {
    "outcome",
    "parallel",
    "makespan_s",
    "latency_s",
    "interval_s",
    "steady_state_samples_per_s",
    "utilisation_per_rank",
    "bubble",
    "handoff_wait_s_per_rank",
    "predicted",
}


def command(*arguments):
    line = [sys.executable, "-m", "vdpp_core", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=480)


@pytest.fixture(scope="module")
def benchmark_on_7(forked_torchrun, tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmark") / "run"
    log = folder.parent / "log"
    arguments = (
        *("benchmark", "--model", "tiny", "--world-size", 7, "--total-steps", 28, "--num-samples", 3),
        *("--latent-shape", 1, 4, 2, 4, 4, "--device", "cpu", "--json", "--output-dir", folder),
    )
    wait_for_end(forked_torchrun(log, 7, *arguments), 240)
    return folder, log.read_text()


def test_simulate_under_torchrun(torchrun, tmp_path):
    """The line of the user's documents."""
    line = ["simulate", "--total-steps", "28", "--device", "cpu", "--dtype", "fp32"]
    process = torchrun(4, *line, "--output-dir", tmp_path / "run")
    assert process.returncode == 0, process.stderr
    result = Run(tmp_path / "run").result()
    assert (result["outcome"], result["world_size"], result["steps_per_gpu"]) == ("ok", 4, 7)
    assert (result["dtype"], result["device"], result["backend"]) == ("float32", "cpu", "gloo")
    for rank, steps in enumerate(("0–6", "7–13", "14–20", "21–27")):
        assert f"rank {rank}, replica 0: steps {steps} " in process.stdout
    assert process.stdout.count("final result") == 1
    assert str(tmp_path / "run") in process.stdout


def test_simulate_without_torchrun(tmp_path):
    process = command("simulate", "--world-size", 2, "--total-steps", 28, "--output-dir", tmp_path / "run")
    assert process.returncode == 0, process.stderr
    result = Run(tmp_path / "run").result()
    assert (result["world_size"], result["steps_per_gpu"], result["steps_per_stage"]) == (2, 14, [14] * 2)
    assert RunConfig.read(tmp_path / "run").model == "dummy"


def test_benchmark_on_seven_ranks(benchmark_on_7):
    folder, _ = benchmark_on_7
    result = Run(folder).result()
    assert (result["outcome"], result["samples_finished"]) == ("ok", 3)
    assert (result["world_size"], result["steps_per_gpu"], result["steps_per_stage"]) == (7, 4, [4] * 7)
    assert len(result["utilisation_per_rank"]) == len(result["peak_memory_gb_per_rank"]) == 7
    assert len(result["handoff_wait_s_per_rank"]) == 7
    assert (len(result["latency_s"]), len(result["interval_s"])) == (3, 2)
    assert 0 < result["bubble"] < 1
    assert result["makespan_s"] >= max(result["latency_s"])
    assert result["makespan_s"] == pytest.approx(result["first_sample_time_s"] + sum(result["interval_s"]))
    assert result["samples_per_s"] == pytest.approx(3 / result["makespan_s"])


def test_json(benchmark_on_7):
    folder, stdout = benchmark_on_7
    printed = json.loads(stdout)
    assert printed == Run(folder).result()
    assert set(printed) >= OF_THE_DOCUMENTS | OURS
    assert printed["latent_shape"] == [1, 4, 2, 4, 4]
    assert printed["parallel"] == Parallel(pp=7).model_dump()
    of_the_schedule = OF_THE_DOCUMENTS & set(printed["predicted"])
    assert of_the_schedule >= {"first_sample_time_s", "avg_sample_time_s", "throughput_samples_per_s"}
    assert {"makespan_s", "latency_s", "interval_s", "utilisation_per_rank", "bubble"} <= set(printed["predicted"])


def test_warm_up_is_before_the_clock(benchmark_on_7):
    folder, _ = benchmark_on_7
    events = Run(folder).events()
    assert RunConfig.read(folder).warmup_samples == 1
    clocks = {event.rank: event.t for event in events if event.kind == "clock"}
    warm = [event.t for event in events if event.kind == "step" and event.sample < 0]
    timed = [event for event in events if event.kind == "step" and event.sample >= 0]
    assert (len(clocks), len(warm), len(timed)) == (7, 28, 3 * 28)
    assert max(warm) < min(clocks.values())
    assert all(clocks[event.rank] < event.t for event in timed)  # each rank starts its own


def test_a_mistake_under_torchrun_is_said_once(forked_torchrun, tmp_path):
    log = tmp_path / "log"
    wait_for_end(forked_torchrun(log, 2, "simulate", "--total-steps", 1, "--output-dir", tmp_path / "run"), 60)
    said = [line for line in log.with_suffix(".err").read_text().splitlines() if line.startswith("error: ")]
    assert said == [
        "error: torchrun's ranks 2: must be at most total_steps, 1 (every rank is a pipeline stage unless flags say "
        "otherwise)"
    ]
    assert not (tmp_path / "run").exists()


def test_ranks_of_the_packages_own_torchrun_are_forked(forked_in_background, tmp_path, wait_until):
    words = ["simulate", "--num-samples", "500", "--output-dir", str(tmp_path / "run")]
    with forked_in_background(2, *words) as agent:
        wait_until(lambda: len(Run(tmp_path / "run").events()) >= 2, 60)
        ranks = [child for child in agent.children() if "simulate" in child.cmdline()]
        assert [rank.cmdline() for rank in ranks] == [[sys.executable, "-m", "vdpp_core", *words]] * 2  # started: -u


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_settles_a_run_that_is_still_starting(ranks, tmp_path, wait_until):
    folder = tmp_path / "run"
    line = ["simulate", "--world-size", ranks, "--num-samples", 1_000, "--output-dir", folder]
    process = subprocess.Popen(
        [sys.executable, "-m", "vdpp_core", *map(str, line)], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_until((folder / "predicted.json").exists, 120)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of the group
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "Traceback" not in said
    assert said.count("stopped by Ctrl-C") <= 1  # a rank that computes already ends without a word
    assert Run(folder).result()["outcome"] == "stopped"
