"""Several machines: two network namespaces of this one, each with its own address and name, joined by a bridge."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vdpp_core import Parallel, RunConfig
from vdpp_core.engine import worker
from vdpp_core.runs import events
from vdpp_core.runs.run import Run

WaitUntil = Callable[[Callable[[], Any], float], Any]
ENDPOINT = "10.77.0.1:29400"
TIMEOUT_S = 5
LONG = ["benchmark", "--num-samples", "250", "--total-steps", "8", "--timeout-s", str(TIMEOUT_S), "--pp", "2"]


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


class Machine:
    """A network namespace. What runs in it has a host name of its own, too."""

    def __init__(self, number: int, folder: Path) -> None:
        self.name, self.folder = f"lab-{os.getpid()}-{number}", folder
        self.folder.mkdir()

    def launch(self, *arguments: str) -> subprocess.Popen[str]:
        inside = ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"']
        command = [*inside, self.name, sys.executable, "-m", "launch", *arguments]
        return subprocess.Popen(command, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def pids(self) -> list[int]:
        return [int(pid) for pid in ip("netns", "pids", self.name).split()]

    def run(self, name: str) -> Path:
        return self.folder / "runs" / name


class Machines(list[Machine]):
    def __init__(self, folder: Path) -> None:
        super().__init__(Machine(number, folder / str(number)) for number in (1, 2))
        self.switch = f"lab-{os.getpid()}-switch"

    def connect(self) -> None:
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        for number, machine in enumerate(self, start=1):
            ip("netns", "add", machine.name)
            port = ("link", "add", f"port{number}", "netns", self.switch)
            ip(*port, "type", "veth", "peer", "name", "eth0", "netns", machine.name)
            ip("-n", self.switch, "link", "set", f"port{number}", "master", "bridge", "up")
            ip("-n", machine.name, "address", "add", f"10.77.0.{number}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", machine.name, "link", "set", device, "up")
        self.link("up")

    def link(self, state: str) -> None:
        """A link that is down swallows all packets; nobody is told."""
        ip("-n", self.switch, "link", "set", "bridge", state)

    def start(self, name: str, *arguments: str) -> None:
        small = ["--num-frames", "4", "--threads", "1", "--warmup-samples", "0", "--save-latents"]
        self.everywhere("start", name, *arguments, *small)

    def resume(self, name: str) -> None:
        self.everywhere("resume", name, name)

    def everywhere(self, action: str, name: str, *arguments: str) -> None:
        nodes = ["--nnodes", "2", "--rdzv-endpoint", ENDPOINT, "--rdzv-id", name]
        for called in [machine.launch(action, *nodes, *arguments) for machine in self]:
            printed, errors = called.communicate(timeout=200)
            assert called.returncode == 0, errors
            assert printed.startswith(name)

    def pids(self) -> list[int]:
        return [pid for machine in self for pid in machine.pids()]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    if not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("needs the commands ip and unshare")
    two = Machines(tmp_path)
    try:
        try:
            two.connect()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
        yield two
    finally:
        for name in set(ip("netns", "list").split()) & {two.switch, *(machine.name for machine in two)}:
            for pid in ip("netns", "pids", name).split():
                os.kill(int(pid), signal.SIGKILL)
            ip("netns", "delete", name)


def results_of(folders: list[Path], wait_until: WaitUntil, seconds: float) -> list[dict[str, Any]]:
    wait_until(lambda: all((folder / "result.json").exists() for folder in folders), seconds)
    return [json.loads((folder / "result.json").read_text()) for folder in folders]


def wait_for_samples(folder: Path, wait_until: WaitUntil) -> None:
    """Until some are finished, which the last stage says: the second machine."""
    wait_until(lambda: samples_in(folder) >= 2, 120)


def test_a_step_pipeline_over_two_machines_gives_the_same_bits_and_is_gathered(
    machines: Machines, tmp_path: Path, wait_until: WaitUntil
):
    machines.start("videos", "--nproc", "2", "generate", "--total-steps", "4", "--num-samples", "2", "--pp", "4")
    first, second = (machine.run("videos") for machine in machines)
    config = RunConfig(command="generate", total_steps=4, num_samples=2, num_frames=4, threads=1)
    alone = worker.run(config.replace(output_dir=tmp_path / "alone"))
    results = results_of([first, second], wait_until, 120)
    assert results[0] == results[1]
    assert (results[0]["outcome"], results[0]["samples_finished"], results[0]["videos_written"]) == ("ok", 2, 2)
    for sample in range(2):
        assert torch.equal(Run(first).load_latents(sample), Run(alone).load_latents(sample))
    for path in (alone / "videos").iterdir():
        assert path.read_bytes() == (first / "videos" / path.name).read_bytes()
    assert len(events.events_paths(first)) == 4
    assert len(events.events_paths(second)) == 2
    assert len(list(first.glob("logs/*/launcher.log"))) == 2
    wait_until(lambda: not machines.pids(), 15)


@pytest.mark.slow
def test_frames_over_two_machines_with_a_shared_folder(machines: Machines, tmp_path: Path, wait_until: WaitUntil):
    arguments = ["benchmark", "--total-steps", "3", "--frames", "2", "--output-dir", str(tmp_path / "shared")]
    machines.start("shared", *arguments)
    config = RunConfig(total_steps=3, num_frames=4, save_latents=True, warmup_samples=0, threads=1)
    alone = Run(worker.run(config.replace(output_dir=tmp_path / "alone"))).load_latents(0)
    (result,) = results_of([tmp_path / "shared"], wait_until, 120)
    assert (result["outcome"], result["parallel"]) == ("ok", Parallel(frames=2).model_dump())
    assert result["hosts"] == [machine.name for machine in machines]
    latents = Run(tmp_path / "shared").load_latents(0)
    assert (latents - alone).abs().max() <= 1e-5 * alone.abs().max()
    assert not list((tmp_path / "shared").glob(".*"))
    wait_until(lambda: not machines.pids(), 15)


def test_both_machines_resume_a_run_in_a_shared_folder(machines: Machines, tmp_path: Path, wait_until: WaitUntil):
    folder = tmp_path / "shared"
    for machine in machines:
        (machine.folder / "runs").symlink_to(tmp_path)
    arguments = ["--total-steps", "12", "--num-samples", "6", "--dp", "2", "--output-dir", str(folder)]
    machines.start("shared", "generate", *arguments)
    wait_until(lambda: samples_in(folder) >= 2, 120)
    (start,) = [event for event in Run(folder).events() if event.kind == "start" and event.rank == 1]
    os.kill(start.pid, signal.SIGKILL)
    (result,) = results_of([folder], wait_until, 30)
    assert (result["outcome"], result["failure"]["rank"]) == ("failed", 1)
    wait_until(lambda: not machines.pids(), 15)
    kept = {path.name for path in folder.glob("latents/*.safetensors")}
    machines.resume("shared")
    (result,) = results_of([folder], wait_until, 120)
    assert (result["outcome"], result["hosts"]) == ("ok", [machine.name for machine in machines])
    assert result["resumed"] == {"attempt": 2, "samples_kept": len(kept)}
    assert samples_in(folder) == 6 - len(kept) > 0
    config = RunConfig(command="generate", total_steps=12, num_samples=6, num_frames=4, threads=1)
    alone = worker.run(config.replace(output_dir=tmp_path / "alone"))
    for sample in range(6):
        assert torch.equal(Run(folder).load_latents(sample), Run(alone).load_latents(sample))
    for path in (alone / "videos").iterdir():
        assert path.read_bytes() == (folder / "videos" / path.name).read_bytes()
    assert len(list(folder.glob("logs/*/launcher.log"))) == len(list(folder.glob("attempts/1/logs/*"))) == 2
    wait_until(lambda: not machines.pids(), 15)


def test_a_link_that_is_cut_in_mid_run_is_reported_on_both_sides(machines: Machines, wait_until: WaitUntil):
    machines.start("cut", *LONG)
    folders = [machine.run("cut") for machine in machines]
    wait_for_samples(folders[1], wait_until)
    machines.link("down")
    results = results_of(folders, wait_until, TIMEOUT_S + 12)
    for rank, result in enumerate(results):
        failure = result["failure"]
        assert (result["outcome"], failure["rank"]) == ("failed", 1 - rank)
        assert failure["cause"].startswith("nothing was heard of it for"), failure  # who waits at that time may differ
    wait_until(lambda: not machines.pids(), 5)


def in_mid_run(machines: Machines, run_id: str, wait_until: WaitUntil) -> list[Path]:
    """Each machine's folder of a long run, when some samples are done."""
    machines.start(run_id, *LONG)
    folders = [machine.run(run_id) for machine in machines]
    wait_for_samples(folders[1], wait_until)
    return folders


@pytest.mark.slow
def test_a_killed_rank_is_named_on_both_sides(machines: Machines, wait_until: WaitUntil):
    folders = in_mid_run(machines, "killed", wait_until)
    (start,) = [event for event in Run(folders[1]).events() if event.kind == "start"]
    os.kill(start.pid, signal.SIGKILL)
    results = results_of(folders, wait_until, 15)
    failures = [result["failure"] for result in results]
    assert failures[0] == failures[1]
    assert (failures[0]["rank"], failures[0]["cause"]) == (1, "killed by SIGKILL")
    assert failures[0]["sample"] >= 1
    wait_until(lambda: not machines.pids(), 15)


@pytest.mark.slow
def test_a_folder_that_is_gone_on_one_machine_ends_the_run_on_both(machines: Machines, wait_until: WaitUntil):
    folders = in_mid_run(machines, "gone", wait_until)
    while folders[0].exists():
        shutil.rmtree(folders[0], ignore_errors=True)
    (result,) = results_of(folders[1:], wait_until, 15)
    assert (result["outcome"], result["failure"]["rank"]) == ("failed", 0)
    wait_until(lambda: not machines.pids(), 15)
    assert not folders[0].exists()


def samples_in(folder: Path) -> int:
    return sum(event.kind == "sample" for event in Run(folder).events())


@pytest.mark.slow
def test_a_stop_on_one_machine_ends_all(machines: Machines, wait_until: WaitUntil):
    folders = in_mid_run(machines, "stopped", wait_until)
    assert "stopped" in machines[0].launch("stop", "stopped").communicate(timeout=200)[0]
    results = results_of(folders, wait_until, 10)
    assert [result["outcome"] for result in results] == ["stopped", "stopped"]
    assert results[0]["samples_finished"] == results[1]["samples_finished"] >= 2
    wait_until(lambda: not machines.pids(), 10)
