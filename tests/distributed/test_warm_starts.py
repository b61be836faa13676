"""Supervisors and ranks that are forked: as if they had been started, sooner, and nothing of it stays."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import launch
from launch import warm_start
from vdpp_core import Parallel, RunConfig

WaitUntil = Callable[[Callable[[], Any], float], Any]
SHORT = RunConfig(model="dummy", total_steps=4, num_samples=3, latent_shape=(1, 4, 2, 8, 8), device="cpu")
PACKAGES = Path(warm_start.__file__).parents[1]


def servers(kind: str = "server") -> list[psutil.Process]:
    """The servers, or nurseries, of this module, or of the folder that a test has for its own."""
    found = []
    for process in psutil.process_iter():
        try:
            is_one = process.cmdline()[1:] == ["-m", "launch.warm_start", kind]
            if is_one and process.environ().get("XDG_RUNTIME_DIR") == os.environ["XDG_RUNTIME_DIR"]:
                found.append(process)
        except psutil.Error:
            continue
    return found


def launcher_of(job: launch.Job) -> psutil.Process:
    launcher = job.run.launcher()
    assert launcher is not None
    return psutil.Process(launcher["pid"])


def log_of(job: launch.Job) -> str:
    return (job.folder / "logs" / "launcher.log").read_text()


def finish(job: launch.Job, wait_until: WaitUntil) -> None:
    assert job.wait(120)["outcome"] == "ok", log_of(job)
    wait_until(lambda: not job.run.launcher_alive(), 30)


@pytest.fixture(scope="module", autouse=True)
def folder_of_this_module() -> Iterator[None]:
    """A folder for sockets without the servers that other tests have left, in other environments."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", folder)
        yield


@pytest.fixture
def server(tmp_path: Path, wait_until: WaitUntil) -> psutil.Process:
    """The server of this module's tests."""
    if not servers():
        finish(launch.start(SHORT.replace(output_dir=tmp_path / "first")), wait_until)
    (found,) = servers()
    return found


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for sockets that no server has."""
    folder = tmp_path / "sockets"
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder
    for process in servers():
        process.kill()


def test_warm_ranks_are_as_cold_ones(
    tmp_path: Path, server: psutil.Process, doubles: Path, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
):
    """The same latents, threads, memory and names; the caller's folder and environment; the doubles are in force."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SAID_BY", "the caller")
    latents, threads, peaks = {}, {}, {}
    for way in ("cold", "warm"):
        if way == "cold":
            monkeypatch.setenv(warm_start.COLD, "1")
        else:
            monkeypatch.delenv(warm_start.COLD)
        config = RunConfig(total_steps=24, num_samples=3, num_frames=3, save_latents=True, parallel=Parallel(pp=2))
        # under a limit freed memory is given back: what glibc keeps without one varies by 6 MB from run to run
        job = launch.start(config.replace(output_dir=Path(way) / "a run", memory_limit_gib=4.0))
        launcher = launcher_of(job)
        wait_until(lambda job=job: sum(each.kind == "sample" for each in job.run.events()), 120)
        starts = [event for event in job.run.events() if event.kind == "start"]
        starts.sort(key=lambda event: event.rank)
        ranks = [psutil.Process(start.pid) for start in starts]
        assert launcher.cmdline() == [sys.executable, "-m", "launch.supervisor", str(job.folder)]
        assert [rank.cmdline() for rank in ranks] == [[sys.executable, "-m", "vdpp_core", "run", str(job.folder)]] * 2
        assert [rank.parent() for rank in ranks] == [launcher] * 2
        assert {process.cwd() for process in [launcher, *ranks]} == {str(tmp_path)}
        assert [rank.environ()["RANK"] for rank in ranks] == ["0", "1"]
        assert {process.environ()["SAID_BY"] for process in [launcher, *ranks]} == {"the caller"}
        assert {os.getsid(rank.pid) for rank in ranks} == {rank.pid for rank in ranks}
        threads[way] = [start.threads for start in starts]
        assert (launcher.parent() == server) == (way == "warm")
        finish(job, wait_until)
        assert ("cold start: VDPP_COLD is set" in log_of(job)) == (way == "cold")
        assert (doubles / f"{ranks[0].pid}.jsonl").exists()
        peaks[way] = job.result()["max_peak_memory_gb"]
        latents[way] = [job.run.load_latents(sample) for sample in range(3)]
    assert threads["warm"] == threads["cold"]
    assert peaks["warm"] == pytest.approx(peaks["cold"], abs=0.004)
    assert all(map(torch.equal, latents["warm"], latents["cold"]))


def test_who_forks_has_one_thread(tmp_path: Path, server: psutil.Process, wait_until: WaitUntil):
    job = launch.start(SHORT.replace(output_dir=tmp_path / "run", num_samples=100, total_steps=400))
    try:
        wait_until(lambda: job.run.events(), 60)
        (nursery,) = servers("nursery")
        assert nursery.parent() == launcher_of(job)
        assert (server.num_threads(), nursery.num_threads()) == (1, 1)
    finally:
        job.stop()
    wait_until(lambda: not nursery.is_running(), 15)
    assert server.is_running()


def test_a_process_with_threads_is_not_forked():
    event = threading.Event()
    thread = threading.Thread(target=event.wait)
    thread.start()
    try:
        with pytest.raises(warm_start.StartError, match="threads"):
            warm_start._import_all()
    finally:
        event.set()
        thread.join()


def test_a_killed_server_is_replaced_by_one_however_many_start(
    tmp_path: Path, server: psutil.Process, wait_until: WaitUntil
):
    server.kill()
    wait_until(lambda: not servers(), 5)
    jobs = [launch.start(SHORT.replace(output_dir=tmp_path / name)) for name in "ab"]
    for job in jobs:
        finish(job, wait_until)
    (another,) = servers()
    job = launch.start(SHORT.replace(output_dir=tmp_path / "c"))
    assert launcher_of(job).parent() == another
    finish(job, wait_until)


def test_a_run_outlives_the_server(tmp_path: Path, server: psutil.Process, wait_until: WaitUntil):
    job = launch.start(SHORT.replace(output_dir=tmp_path / "run", num_samples=50, total_steps=20, threads=1))
    wait_until(lambda: job.run.events(), 60)
    server.kill()
    finish(job, wait_until)


def test_an_idle_server_ends_and_leaves_nothing(
    own_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
):
    monkeypatch.setenv(warm_start.IDLE, "1")
    job = launch.start(SHORT.replace(output_dir=tmp_path / "run"))
    wait_until(servers, 60)
    wait_until(lambda: not servers(), 15)
    assert list((own_folder / f"vdpp-{os.getuid()}").iterdir()) == []
    finish(job, wait_until)


@pytest.mark.slow
def test_a_server_ends_with_its_version_of_the_sources(own_folder: Path, tmp_path: Path, wait_until: WaitUntil):
    for package in ("launch", "vdpp_core"):
        shutil.copytree(PACKAGES / package, tmp_path / "sources" / package)
    facts = SHORT.replace(output_dir=tmp_path / "run").model_dump(mode="json", exclude_none=True)
    code = f"import launch; from vdpp_core import RunConfig; print(launch.start(RunConfig(**{facts!r})).wait(100))"
    paths = [str(tmp_path / "sources"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "sources", env=environment, check=True, timeout=200)
    (old,) = servers()
    (tmp_path / "sources" / "launch" / "sweep.py").touch()
    wait_until(lambda: not old.is_running(), 15)


def test_the_key_is_that_of_the_sources_and_of_what_libraries_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for package in ("launch", "vdpp_core"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "one.py").write_text("")
    monkeypatch.setattr(warm_start, "_ROOT", tmp_path)
    keys = [warm_start.key()]
    os.utime(tmp_path / "launch" / "one.py", (1, 1))
    keys.append(warm_start.key())
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    keys.append(warm_start.key())
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    keys.append(warm_start.key())
    assert len(set(keys)) == 4
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpriority", lambda *_: 19)
        assert warm_start.key() not in keys
    with monkeypatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda _: (1, 1))
        assert warm_start.key() not in keys
    monkeypatch.setenv("SAID_BY", "the caller")
    assert warm_start.key() == keys[-1]


@pytest.mark.parametrize("place", ["a file", "open to others", "open to others, with a name that is not UTF-8"])
def test_without_a_folder_for_sockets_ranks_start_all_the_same(
    place: str, own_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
):
    if place == "a file":
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    else:
        if place != "open to others":
            own_folder = own_folder / os.fsdecode(b"\xff")
            own_folder.mkdir()
            monkeypatch.setenv("XDG_RUNTIME_DIR", str(own_folder))
        (own_folder / f"vdpp-{os.getuid()}").mkdir()
        (own_folder / f"vdpp-{os.getuid()}").chmod(0o755)
    job = launch.start(SHORT.replace(output_dir=tmp_path / "run"))
    finish(job, wait_until)
    assert "no server for later starts: " in log_of(job)
    assert servers() == []


@pytest.mark.usefixtures("own_folder")
def test_no_server_is_left_by_sources_that_changed_while_they_were_imported(capsys: pytest.CaptureFixture[str]):
    assert warm_start._leave_server(wanted="the key before") is None
    assert "have changed while they were imported" in capsys.readouterr().out
    assert servers() == []


@pytest.mark.usefixtures("own_folder")
def test_no_server_is_left_for_a_time_that_is_no_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(warm_start.IDLE, "ten")
    assert warm_start._leave_server(wanted=None) is None
    assert "no server for later starts: could not convert string to float: 'ten'" in capsys.readouterr().out
    assert servers() == []


def test_sockets_are_in_no_folder_that_depends_on_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert warm_start._folder() == tmp_path / f"vdpp-{os.getuid()}"


@pytest.mark.usefixtures("server")
def test_a_fork_does_nothing_before_its_pid_is_noted(tmp_path: Path):
    """It would be gone from the process table before a slow caller has looked there when it began."""
    seen = []

    def note(pid: int) -> None:
        time.sleep(1)
        seen.append((psutil.Process(pid).is_running(), (tmp_path / "log").read_text()))

    with (tmp_path / "log").open("w") as log:
        pid = warm_start.start(["launch.supervisor", "--help"], log.fileno(), log.fileno(), note)
    assert seen == [(True, "")]
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(30)
    assert "usage:" in (tmp_path / "log").read_text()


def test_a_server_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, server: psutil.Process, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
):
    """And what was asked of it is not done later, beside what was started instead."""
    monkeypatch.setattr(warm_start.forking, "PATIENCE_S", 1.0)
    server.send_signal(signal.SIGSTOP)
    try:
        job = launch.start(SHORT.replace(output_dir=tmp_path / "run"))
    finally:
        server.send_signal(signal.SIGCONT)
    finish(job, wait_until)
    assert "not forked from the server: timed out" in log_of(job)
    wait_until(lambda: server.children() == [], 15)
    assert len([event for event in job.run.events() if event.kind == "start"]) == 1


def test_a_fork_takes_on_what_a_child_inherits(tmp_path: Path):
    """Asked for by a process with another folder, umask, priority, limit, environment and log."""
    code = """
import json, os, resource, socket, sys, tempfile
from launch import forking
tempfile.gettempdir()
ours, theirs = socket.socketpair()
if os.fork() == 0:
    words = forking.become(theirs)
    facts = {
        "words": words, "argv": sys.argv, "folder": os.getcwd(), "umask": os.umask(0), "environment": dict(os.environ),
        "nice": os.nice(0), "files": resource.getrlimit(resource.RLIMIT_NOFILE), "session": os.getsid(0) == os.getpid(),
        "temporary": tempfile.gettempdir(),
    }
    print(json.dumps(facts), flush=True)
    os.system("echo said by a child; echo and to stderr >&2")
    os._exit(0)
os.chdir(sys.argv[1])
os.umask(0o027)
os.nice(3)
resource.setrlimit(resource.RLIMIT_NOFILE, (99, 999))
with open("out", "w") as out, open("err", "w") as err:
    forking.ask(ours, ["module", "a word"], {"A": "b c", "TMPDIR": sys.argv[1]}, [out.fileno(), err.fileno()])
os.wait()
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    line, said = (tmp_path / "out").read_text().splitlines()
    assert json.loads(line) == {
        "words": ["module", "a word"],
        "argv": ["module", "a word"],
        "folder": str(tmp_path),
        "umask": 0o027,
        "environment": {"A": "b c", "TMPDIR": str(tmp_path)},
        "nice": 3,
        "files": [99, 999],
        "session": True,
        "temporary": str(tmp_path),
    }
    assert said == "said by a child"
    assert (tmp_path / "err").read_text() == "and to stderr\n"
