"""Several machines: what is refused before anything starts, what crosses the network, and who waits for whom."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from launch import resuming
from launch.__main__ import main
from launch.job import Job
from launch.machines.coordinator import Others
from launch.machines.nodes import Nodes
from launch.machines.silence import awaited
from vdpp_core import Parallel, RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.execution import resolve
from vdpp_core.runs import files, origin, processes, results, runfolder
from vdpp_core.runs.run import Run

JOB = sys.modules["launch.job"]
HERE = socket.gethostname()
START = {"pid": 2**22 + 1, "created": 0.0, "threads": 1, "device": "cpu", "dtype": "float32", "backend": "gloo"}
SHORT = {"model": "dummy", "total_steps": 4, "num_samples": 4, "latent_shape": (1, 4, 2, 8, 8), "device": "cpu"}


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"nnodes": 0}, "nnodes"),
        ({"nproc": 5000}, "nproc"),
        ({"endpoint": "10.77.0.1"}, "rdzv_endpoint"),
        ({"endpoint": "10.77.0.1:port"}, "rdzv_endpoint"),
        ({"endpoint": "10.77.0.1:70000"}, "rdzv_endpoint"),
        ({"endpoint": "10.77.0.1:80/path"}, "rdzv_endpoint"),
        ({"endpoint": "no-such-host.invalid:29400"}, "rdzv_endpoint"),
        ({"endpoint": "127.0.0.1:29400"}, "rdzv_endpoint"),  # no other machine reaches that
        ({"run_id": ""}, "rdzv_id"),
        ({"run_id": "../elsewhere"}, "rdzv_id"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(changes: dict[str, Any], argument: str):
    good = {"nnodes": 2, "nproc": 1, "endpoint": "10.77.0.1:29400", "run_id": "run"}
    with pytest.raises(ConfigError) as refused:
        Nodes(**good | changes).check()
    assert refused.value.argument == argument


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--nnodes", "2"], "--nnodes 2"),
        (["--rdzv-id", "run"], "--rdzv-id run"),
        (["--nnodes", "2", "--rdzv-endpoint", "localhost:29400", "--rdzv-id", "run"], "--rdzv-endpoint"),
    ],
)
def test_flags_are_refused_before_anything_starts(
    flags: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["start", *flags, "benchmark"])
    written = capsys.readouterr().err
    assert (ended.value.code, written.count("\n")) == (2, 1)
    assert named in written
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--nproc", "2"], "--nproc 2: only with --rdzv-endpoint"),
        (["--nnodes", "2"], "--nnodes 2: needs --rdzv-endpoint"),
        (
            ["--nnodes", "1", "--nproc", "3", "--rdzv-endpoint", "127.0.0.1:1"],
            "must be the number of ranks of the run, 2",
        ),
        (
            ["--nnodes", "1", "--nproc", "2", "--rdzv-endpoint", "127.0.0.1:1"],
            "has not ended (starting)",
        ),  # it never began
    ],
)
def test_so_is_what_cannot_be_resumed(
    flags: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    runfolder.create(RunConfig(**SHORT, output_dir=tmp_path / "runs" / "one").for_ranks(2))
    with pytest.raises(SystemExit) as ended:
        main(["resume", "one", *flags])
    written = capsys.readouterr().err
    assert (ended.value.code, written.count("\n")) == (2, 1)
    assert named in written


@pytest.mark.filterwarnings("ignore:.*waiting until ")
def test_a_machine_joins_a_run_that_was_taken_up_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    launched: list[list[Path]] = []
    monkeypatch.setattr(JOB, "MEETING_PATIENCE_S", 0.0)
    monkeypatch.setattr(JOB, "launch", lambda folders, **_: launched.append(folders))
    monkeypatch.setattr(Nodes, "address", property(lambda _: ("10.77.0.2", False)))  # towards the endpoint
    folder = runfolder.create(RunConfig(**SHORT, save_latents=True, output_dir=tmp_path / "run").for_ranks(2))
    results.settle(Run(folder), reason="stopped")
    job, nodes = Job(folder), Nodes(2, 1, "10.77.0.1:29400", "run")
    with pytest.raises(ConfigError, match="was not resumed at the endpoint"):
        job.resume(nodes)
    resuming.begin(Run(folder))
    with pytest.raises(ConfigError, match="has not ended"):  # on one machine alone
        job.resume(nodes)
    results.settle(Run(folder), reason="stopped")
    resuming.begin(Run(folder), asdict(nodes))
    (folder / "job-another.json").touch()
    with pytest.raises(ConfigError, match="has not ended"):  # on others
        job.resume(replace(nodes, run_id="another"))
    assert not runfolder.logs_path(folder).exists()
    job.resume(nodes)
    assert launched == [[folder]]
    with pytest.raises(ConfigError, match="have joined already"):
        job.resume(nodes)
    (folder / "job-third.json").touch()
    runfolder.logs_path(folder).rmdir()
    with pytest.raises(ConfigError, match="have joined already"):
        job.resume(nodes)


def test_a_machine_does_not_join_with_other_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What the samples that are there were made from is compared on each machine, before anything starts."""
    monkeypatch.setattr(JOB, "MEETING_PATIENCE_S", 0.0)
    monkeypatch.setattr(Nodes, "address", property(lambda _: ("10.77.0.2", False)))
    config = RunConfig(**SHORT, save_latents=True, output_dir=tmp_path / "run").for_ranks(2)
    folder = runfolder.create(config)
    origin.begin(folder, config, resolve(config))
    results.settle(Run(folder), reason="stopped")
    files.write_atomically(folder / "config.json", config.replace(total_steps=3, seed=1).to_json())
    with pytest.raises(ConfigError, match=r"run run: (seed|total_steps) was .* when its samples were made"):
        Job(folder).resume(Nodes(2, 1, "10.77.0.1:29400", "run"))


def test_a_run_that_goes_on_is_not_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Nodes, "address", property(lambda _: ("10.77.0.2", False)))
    folder = runfolder.create(RunConfig(**SHORT, save_latents=True, output_dir=tmp_path / "run").for_ranks(2))
    with pytest.raises(ConfigError, match="has not ended"):
        Job(folder).resume(Nodes(2, 1, "10.77.0.1:29400", "run"))


@pytest.mark.parametrize(("age_s", "waits"), [(0.0, True), (60.0, False)])
def test_other_machines_have_a_moment_to_leave(age_s: float, waits: bool, tmp_path: Path, monkeypatch):
    """Of their launchers nothing is known; but there is the result."""
    monkeypatch.setattr(JOB, "STOP_PATIENCE_S", 0.0)
    monkeypatch.setattr(JOB, "launch", lambda *_, **__: None)
    folder = runfolder.create(RunConfig(**SHORT, save_latents=True, output_dir=tmp_path / "run").for_ranks(2))
    launcher = {"pid": 1, "created": 0.0, "host": "another"}
    (folder / "job-another.json").write_text(json.dumps(launcher))
    results.settle(Run(folder), reason="stopped")
    os.utime(folder / "result.json", (time.time() - age_s,) * 2)
    if waits:
        with pytest.raises(ConfigError, match="has not ended yet"):
            Job(folder).resume()
    else:
        Job(folder).resume()
    assert (folder / "result.json").exists() == waits


@pytest.mark.parametrize(
    ("nproc", "parallel", "crossing"),
    [
        (1, Parallel(frames=2), ["frames 2"]),
        (2, Parallel(dp=2, frames=2), []),
        (2, Parallel(cfg=2, frames=2), ["cfg 2"]),
        (2, Parallel(pp=4), []),
        (1, Parallel(dp=2, fsdp=True), ["fsdp"]),
        (2, Parallel(pp=2, dp=2, fsdp=True), ["fsdp"]),
        (2, Parallel(pp=2, cfg=2, fsdp=True), []),
    ],
    ids=str,
)
def test_what_crosses_machines_is_said(nproc: int, parallel: Parallel, crossing: list[str]):
    said = Nodes(2, nproc, "10.77.0.1:29400", "run").crossings(RunConfig(num_frames=4, parallel=parallel))
    assert [line.partition(" crosses")[0] for line in said] == crossing


def test_the_first_machine_makes_a_shared_folder_and_others_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = RunConfig(**SHORT, output_dir=tmp_path / "run").for_ranks(2)
    folder = runfolder.join(config)
    processes.write_launcher(folder, 1, alone=False)
    with pytest.raises(ConfigError, match="exists already"):
        runfolder.join(config)
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert runfolder.join(config) == folder
    assert Run(folder).launcher_alive()  # nothing is known of the other machine's
    for changed, name in ((config.replace(seed=7), "seed"), (config.replace(parallel=Parallel(dp=2)), "dp")):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: f"of another {name}")
        with pytest.raises(ConfigError, match="the machine that came first") as refused:
            runfolder.join(changed)
        assert refused.value.argument == name
        assert runfolder.join(config) == folder  # with the arguments put right
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_machines_with_folders_of_their_own_compare_their_arguments(tmp_path: Path):
    store = HashStore()
    for name, seed, nproc, refused in (("a", 0, 1, None), ("b", 0, 1, None), ("c", 7, 1, "seed"), ("d", 0, 2, "nproc")):
        folder = runfolder.join(RunConfig(**SHORT, seed=seed, output_dir=tmp_path / name).for_ranks(2))
        others = Others(Nodes(1, nproc, "127.0.0.1:29400", "run"), folder)
        if refused is None:
            others.compare(store)
        else:
            with pytest.raises(ConfigError) as error:
                others.compare(store)
            assert error.value.argument == refused


def test_there_may_be_something_else(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").touch()
    with pytest.raises(ConfigError, match="exists already"):
        runfolder.join(RunConfig(**SHORT, output_dir=tmp_path / "run").for_ranks(2))


@pytest.mark.parametrize(
    ("parallel", "last", "blamed"),
    [
        (Parallel(pp=2), [(0, "step", {"sample": 3, "step": 1})], {1: "sample 3, step 1"}),  # hands on
        (Parallel(pp=2), [(0, "step", {"sample": 3, "step": 0})], {}),  # computes
        (Parallel(pp=2), [(1, "sample", {"sample": 2})], {0: ""}),  # waits for the next one
        (Parallel(dp=2), [(0, "done", {})], {1: ""}),
        (Parallel(cfg=2), [(1, "step", {"sample": 0, "step": 2})], {0: "sample 0, step 3"}),
        (Parallel(pp=4), [(0, "step", {"sample": 1, "step": 0}), (1, "send", {"sample": 0})], {}),  # 1 waits for 0
        (
            Parallel(pp=4),
            [(0, "step", {"sample": 3, "step": 0}), (1, "step", {"sample": 1, "step": 1})],
            {2: "sample 1"},
        ),
    ],
    ids=str,
)
def test_who_waits_for_another_machine(
    parallel: Parallel,
    last: list[tuple[int, str, dict[str, Any]]],
    blamed: dict[int, str],
    tmp_path: Path,
    write_events,
):
    arguments = SHORT | {"model": "tiny", "output_dir": tmp_path / "run", "parallel": parallel}
    folder = runfolder.create(RunConfig(**arguments))
    for rank, kind, facts in last:
        start = START | {"host": HERE}
        take = {"sample": facts.get("sample", 0)}
        write_events(folder, rank, (0.0, "start", start), (1.0, "take", take), (2.0, kind, {"seconds": 0.0} | facts))
    named = awaited(Run(folder), 7.0)
    assert named.keys() == blamed.keys()
    for rank, words in named.items():
        assert "nothing was heard of it for 7 s" in words
        assert blamed[rank] in words
    assert awaited(Run(folder), 7.0, certain=True).keys() <= set(range(parallel.world_size)) - {last[0][0]}
    assert awaited(Run(folder), 7.0, certain=True)


def test_clocks_of_machines_may_differ(tmp_path: Path, write_events):
    folder = runfolder.create(RunConfig(**SHORT | {"num_samples": 1}, output_dir=tmp_path / "run").for_ranks(2))
    for rank, ahead in ((0, 0.0), (1, 1000.0)):
        steps = [
            (ahead + 2 * rank + s, "step", {"sample": 0, "step": 2 * rank + s - 1, "seconds": 1.0}) for s in (1, 2)
        ]
        start = START | {"host": f"machine-{rank}"}
        more = [(ahead + 4.0, "sample", {"sample": 0})] * rank
        write_events(folder, rank, (ahead - 1, "start", start), (ahead, "clock", {}), *steps, *more)
    spans = results.measured_spans(Run(folder).events())
    assert [(span.rank, span.start, span.end) for span in spans] == [(0, 0.0, 2.0), (1, 2.0, 4.0)]


@pytest.mark.parametrize("freezes", [{}, {3: 8.1}, {3: 60.0, 8: 4.0}], ids=str)
def test_no_machine_is_given_up_for_the_time_in_which_this_one_stood_still(freezes, tmp_path, monkeypatch):
    """Another one was heard when this one began to listen, and not again; both look twice a second."""
    config = RunConfig(**SHORT, parallel=Parallel(pp=2), timeout_s=5, output_dir=tmp_path / "run")
    others = Others(Nodes(2, 1, "10.77.0.1:29400", "run"), runfolder.create(config))
    t, looks = 1000.0, 0
    others.beats = {2: (1, t)}
    given_up: list[int] = []

    def wait(_: float) -> bool:
        nonlocal t, looks
        t += 0.5 + freezes.get(looks, 0.0)
        looks += 1
        return bool(given_up) or looks > 100

    monkeypatch.setattr("launch.machines.coordinator.now", lambda: t)
    monkeypatch.setattr("launch.machines.silence.now", lambda: t)
    monkeypatch.setattr(others.over, "wait", wait)
    monkeypatch.setattr(others, "end_here", lambda _: given_up.append(looks))
    others._act()
    assert given_up == [11]
