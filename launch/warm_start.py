"""Supervisors and ranks that start in a fraction of a second, as forks of a process that has imported everything.

To import torch and diffusers takes a process 4 s, or 15 where others do the same; to fork takes milliseconds.

- The first supervisor imports for all. Before it begins it forks a *server*, which stays, one for each user,
  environment and version of the sources, and ends when nothing was asked of it for IDLE_S.
- `start` has the server fork every later supervisor. Where it cannot, a Python is started, as for the first one.
- Each supervisor forks a *nursery* before it has a second thread, and the nursery forks the ranks. Their parent is the
  supervisor, which gets their exit codes as if torchrun's agent had started them.

A fork has only the thread that called it, and CUDA does not survive one: server and nursery have one thread and have
never touched CUDA, or there is none and everything starts cold.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import importlib
import os
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from launch import forking
from launch.forking import PATIENCE_S, StartError
from vdpp_core.cli import arguments

COLD, IDLE = "VDPP_COLD", "VDPP_WARM_IDLE_S"  # environment variables
STARTED_BY = "VDPP_STARTED_BY"  # an environment variable for `terminate.end_started_by`
IDLE_S = 600.0
_LOOK_S = 2.0  # how often a server looks whether it is still of use
_POLL_S = 0.01
_ROOT = Path(__file__).parents[1]
_MAINS = {  # what can be forked, and the module whose `main` it is
    "launch.supervisor": "launch.supervisor",
    "vdpp_core": "vdpp_core.__main__",
    "vdpp_core.compare.link_probe": "vdpp_core.compare.link_probe",
    "vdpp_core.cli.local_torchrun": "vdpp_core.cli.local_torchrun",
}
_AGENTS = ("launch.supervisor", "vdpp_core.cli.local_torchrun")  # those that start others
_IMPORTED = [
    *_MAINS.values(),
    "diffusers.models.unets.unet_spatio_temporal_condition",
    "diffusers.pipelines.stable_video_diffusion.pipeline_stable_video_diffusion",
    "diffusers.schedulers.scheduling_euler_discrete",
    "imageio.v3",
    "imageio_ffmpeg",
    "vdpp_core.engine.videos",
    "vdpp_core.engine.worker",
]
# While they are imported, OpenBLAS must not make threads, and nobody may ask the CUDA driver for devices.
_WHILE_IMPORTING = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_NAMES = "VDPP_WHILE_IMPORTING"  # which of them the caller had not set
_KEY = "VDPP_KEY"  # what the caller's key was when it started a Python
# Variables that libraries read when they are loaded: a server for each set of them.
_READ_ON_IMPORT = (
    *("ACCELERATE", "CUBLAS", "CUDA", "DIFFUSERS", "DNNL", "GOMP", "HF_", "HOME", "HUGGINGFACE", "KMP", "LANG", "LC_"),
    *(
        "LD_",
        "MALLOC",
        "MKL",
        "NUM",
        "NVIDIA",
        "OMP",
        "ONEDNN",
        "OPENBLAS",
        "PYTHON",
        "PYTORCH",
        "SAFETENSORS",
        "TORCH",
    ),
    *("TRANSFORMERS", "USE_", "VDPP", "XDG_CACHE", "NPY_"),
    *("LSB_JOBID", "PBS_JOBID", "SLURM_JOB"),  # a batch system ends the server with the job that left it
)
_NOT_READ = (COLD, STARTED_BY, _NAMES, _KEY, "TORCHINDUCTOR_CACHE_DIR")  # the last one is set by torch itself

_nursery: int | None = None


def start(words: Sequence[str], stdout: int, stderr: int, note: Callable[[int], None] | None = None) -> int:
    """Start `python -m words…` in the background, in a session of its own, and return its pid.

    Args:
        stdout: file descriptor; a line in it says why a server that is there was of no use.
        note: called with the pid; until then a fork does nothing, and a Python that has ended is still in the process
            table.
    """
    environment = dict(os.environ)
    if _why_cold(words) is None:
        try:
            return _from_server(words, [stdout, stderr], note)
        except (FileNotFoundError, ConnectionRefusedError):  # there is none
            pass
        except (OSError, StartError, psutil.NoSuchProcess) as error:
            reason = f"not forked from the server: {error or type(error).__name__}\n"
            os.write(stdout, reason.encode(errors="backslashreplace"))
        if words[0] == "launch.supervisor":
            added = {name: value for name, value in _WHILE_IMPORTING.items() if name not in environment}
            environment |= added | {_NAMES: " ".join(added)}
            with contextlib.suppress(OSError):  # a file has just been removed
                environment[_KEY] = key()
    process = subprocess.Popen(
        [sys.executable, "-m", *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )
    if note is not None:
        note(process.pid)
    return process.pid


def run() -> None:
    """Run the supervisor that this process was started as; see the module for what it leaves behind and forks."""
    words = ["launch.supervisor", *sys.argv[1:]]
    arguments.begin()
    wanted = os.environ.pop(_KEY, None)
    try:
        if reason := _why_cold(words):
            raise StartError(reason)
        _import_all()
        words = _leave_server(wanted) or words
        if words[0] in _AGENTS:
            words = _raise_ranks() or words
    except (OSError, StartError) as error:
        print(f"cold start: {error}", flush=True)
    importlib.import_module(_MAINS[words[0]]).main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # to take all that was imported apart takes half a second


def nursery() -> int | None:
    """The pid of the process that forks this one's ranks; None where there is none."""
    return _nursery


def key() -> str:
    """What a server and those that ask it must have in common: sources, packages, confines, variables that are read."""
    sources = [path for package in ("launch", "vdpp_core") for path in sorted((_ROOT / package).rglob("*.py"))]
    versions = [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in sources]
    installed = Path(sysconfig.get_path("purelib")).stat().st_mtime_ns  # changes with every package
    variables = sorted(
        (name, value)
        for name, value in os.environ.items()
        if name.startswith(_READ_ON_IMPORT) and name not in _NOT_READ
    )
    cores = sorted(os.sched_getaffinity(0))  # OpenMP counts them when it is loaded
    facts = [sys.prefix, sys.version, installed, versions, cores, variables, forking.confines()]
    return hashlib.sha256(repr(facts).encode(errors="surrogateescape")).hexdigest()[:16]


def _why_cold(words: Sequence[str]) -> str | None:
    if os.environ.get(COLD):
        return f"{COLD} is set"
    if sys.platform != "linux":
        return f"processes are not forked on {sys.platform}"
    return "several machines" if "--nnodes" in words else None


def _folder() -> Path:
    """Where the sockets are, which nobody else can reach.

    Raises:
        OSError: it is somebody else's.
    """
    root = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    folder = (root if root.is_absolute() else Path(tempfile.gettempdir())) / f"vdpp-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user alone")
    return folder


def _is_own(connection: socket.socket) -> bool:
    """Whether the process at the other end is this user's."""
    credentials = struct.Struct("3i")
    facts = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    return credentials.unpack(facts)[1] == os.getuid()


def _from_server(words: Sequence[str], files: Sequence[int], note: Callable[[int], None] | None) -> int:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(str(_folder() / key()))
        if not _is_own(connection):
            raise StartError("the server is another user's")
        return forking.ask(connection, words, os.environ, files, note)


def _import_all() -> None:
    """Import what supervisors and ranks need.

    Raises:
        StartError: this process cannot be forked afterwards.
    """
    arguments.quiet()
    for module in _IMPORTED:
        importlib.import_module(module)
    for name in os.environ.pop(_NAMES, "").split():
        os.environ.pop(name, None)
    import torch

    if forking.threads() > 1:
        raise StartError(f"the imports have made {forking.threads() - 1} threads, which a fork would lose")
    trial = os.fork()
    if trial == 0:
        os._exit(torch.cuda._is_in_bad_fork())
    if os.waitpid(trial, 0)[1] or torch.cuda.is_initialized():
        raise StartError("the imports have touched CUDA, which does not survive a fork")
    forking.remember_pages()
    gc.collect()
    gc.freeze()


def _fork() -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    return os.fork()


def _leave_server(wanted: str | None) -> list[str] | None:
    """Fork the server, unless there is one; what to run, in a process that the server has forked.

    Args:
        wanted: the key before anything was imported, if it is known.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        idle_s = float(os.environ.get(IDLE, IDLE_S))
        place = _folder() / key()
        if wanted not in (None, place.name):
            raise OSError("sources, packages or variables have changed while they were imported")
        lock = _locked(place.with_suffix(".lock"))
        if lock is None:
            return None
        _clear(place.parent)
        place.unlink(missing_ok=True)
        listener.bind(str(place))
        listener.listen()
    except (OSError, ValueError) as error:  # ValueError: IDLE is no number
        print(f"no server for later starts: {error}", flush=True)
        return None
    middle = _fork()
    if middle:
        os.waitpid(middle, 0)
        listener.close()
        os.close(lock)
        return None
    os.setsid()
    if os.fork():
        os._exit(0)  # its child belongs to nobody
    try:
        connection = _serve(listener, place, idle_s)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    listener.close()
    os.close(lock)
    return forking.become(connection)


def _locked(path: Path) -> int | None:
    """A file descriptor that holds the lock, as long as it is open; None where a living server has it."""
    file = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file


def _clear(folder: Path) -> None:
    """Remove the files of servers that were killed."""
    for path in folder.glob("*.lock"):
        if (lock := _locked(path)) is not None:
            _remove(path.with_suffix(""))
            os.close(lock)


def _remove(place: Path) -> None:
    for path in (place, place.with_suffix(".log"), place.with_suffix(".lock")):
        path.unlink(missing_ok=True)


def _serve(listener: socket.socket, place: Path, idle_s: float) -> socket.socket:
    """Be the server, to its end; a connection to who asked, in a process that it has forked for that."""
    _detach(place.with_suffix(".log"))
    inode, used = place.stat().st_ino, time.monotonic()
    while time.monotonic() - used < idle_s:
        if select.select([listener], [], [], min(idle_s, _LOOK_S))[0]:
            used = time.monotonic()
            connection = listener.accept()[0]
            if forking.threads() > 1:
                break
            if _is_own(connection) and os.fork() == 0:
                return connection
            connection.close()
        elif _has_children():
            used = time.monotonic()
        if _inode(place) != inode:  # it was removed, or is another server's
            os._exit(0)
        if key() != place.name:  # the sources or packages are others now
            break
    _remove(place)
    os._exit(0)


def _detach(log: Path) -> None:
    """Let go of what belongs to the process that this one was forked from."""
    _show_as("server")
    os.chdir(os.sep)
    files = [os.open(os.devnull, os.O_RDWR), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)]
    for number, file in enumerate((files[0], *files)):
        os.dup2(file, number)
    for file in files:
        os.close(file)


def _show_as(name: str) -> None:
    """What forks for others neither waits for its children nor is taken for a supervisor."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    forking.show([sys.executable, "-m", "launch.warm_start", name], os.environ)


def _has_children() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def _inode(place: Path) -> int | None:
    with contextlib.suppress(FileNotFoundError):
        return place.stat().st_ino
    return None


def _raise_ranks() -> list[str] | None:
    """Fork the nursery, and have torchrun's agent start ranks there; what to run, in a rank."""
    global _nursery
    forking.adopt_orphans()
    ours, theirs = socket.socketpair()
    pid = _fork()
    if pid == 0:
        ours.close()
        try:
            connection = _nurse(theirs)
        except BaseException:
            os._exit(1)
        theirs.close()
        return forking.become(connection)
    theirs.close()
    _nursery = pid
    _start_there(ours)
    return None


def _nurse(channel: socket.socket) -> socket.socket:
    """Be the nursery, as long as the supervisor is there; a connection to it, in a process that is its child."""
    _show_as("nursery")
    supervisor = os.getppid()
    while True:
        request, files, _, _ = socket.recv_fds(channel, 1, 1)
        if not request:
            os._exit(0)
        connection = socket.socket(fileno=files[0])
        if os.fork() == 0:
            if os.fork():
                os._exit(0)  # its child becomes the supervisor's, which adopts orphans
            _wait_for(supervisor)
            return connection
        connection.close()


def _wait_for(parent: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while os.getppid() != parent:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.001)


def _start_there(channel: socket.socket) -> None:
    """Have torchrun's agent in this process fork what the nursery can, and start as ever what it cannot."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler  # `start` needs no agent

    started: Any = SubprocessHandler._popen

    def forked(handler: Any, command: tuple[str, ...], environment: dict[str, str]) -> Any:
        words = command[2:] if command[1:2] == ("-u",) else command[1:]  # a fork flushes what it prints when it ends
        if command[0] == sys.executable and words[0] == "-m" and words[1] in _MAINS:
            files = [(handler._stdout or sys.stdout).fileno(), (handler._stderr or sys.stderr).fileno()]
            try:
                ours, theirs = socket.socketpair()
                with ours:
                    with theirs:
                        socket.send_fds(channel, [b"."], [theirs.fileno()])
                    return _Forked(forking.ask(ours, words[1:], environment, files))
            except (OSError, StartError) as error:
                print(f"cold start of a rank: {error or type(error).__name__}", flush=True)
        return started(handler, command, environment)

    SubprocessHandler._popen = forked  # type: ignore[method-assign, assignment]


class _Forked:
    """What torchrun's agent uses of a `subprocess.Popen`, for a child that another process has forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(_POLL_S)
        return code
