"""What a forked process needs to pass for one that was started: its state, and its name in the process table.

Linux only.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

PATIENCE_S = 10.0  # for each message of the other side

_PR_SET_MM, _PR_SET_MM_MAP, _PR_SET_CHILD_SUBREAPER = 35, 14, 36  # linux/prctl.h
_LENGTH = struct.Struct("<I")
_STDOUT_AND_STDERR = 2
_MADV_POPULATE_READ = 22  # Linux 5.14
_PRESENT, _OF_A_FILE = 1 << 63, 1 << 61  # proc_pid_pagemap(5)
_pages: list[tuple[int, int]] = []
_shown: ctypes.Array[ctypes.c_char] | None = None  # what the process table shows; it has to stay where it is


class StartError(RuntimeError):
    """A process could not be forked as it was asked for: the reason, for the log."""


class _Map(ctypes.Structure):
    """struct prctl_mm_map of linux/prctl.h."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data", "start_brk", "brk")),
        *((name, ctypes.c_uint64) for name in ("start_stack", "arg_start", "arg_end", "env_start", "env_end", "auxv")),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


def threads() -> int:
    """Threads of this process, those of C libraries included."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def remember_pages() -> None:
    """Note which pages of libraries this process holds: its forks hold none of them until they touch them again.

    They hold them from the beginning, as a process that has imported the libraries itself: otherwise the resident
    memory of a rank would grow by those, too, and its measured peak with it.
    """
    page = resource.getpagesize()
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, _, _, _, inode = line.split()[:5]
            if inode != "0":
                begin, end = (int(address, 16) for address in addresses.split("-"))
                pagemap.seek(begin // page * 8)
                _pages.extend(_ranges(begin, page, pagemap.read((end - begin) // page * 8)))


def _ranges(begin: int, page: int, entries: bytes) -> Iterator[tuple[int, int]]:
    """Address and length of what is held of one file."""
    bits = np.frombuffer(entries, np.uint64)
    held = (bits & np.uint64(_PRESENT) > 0) & (bits & np.uint64(_OF_A_FILE) > 0)
    edges = np.flatnonzero(np.diff(held.astype(np.int8), prepend=0, append=0))
    for first, last in edges.reshape(-1, 2).tolist():
        yield begin + first * page, (last - first) * page


def _hold_pages() -> None:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for address, length in _pages:
        madvise(address, length, _MADV_POPULATE_READ)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def show(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Have the process table show another command line and environment for this process.

    Raises:
        StartError: the kernel was built without CONFIG_CHECKPOINT_RESTORE.
    """
    global _shown
    words = b"".join(os.fsencode(word) + b"\0" for word in command)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    _shown = ctypes.create_string_buffer(words + variables)
    begin = ctypes.addressof(_shown)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start_code, end_code, start_stack, start_data, end_data, start_brk = (
        int(fields[number - 3]) for number in (26, 27, 28, 45, 46, 47)  # numbered from 1 as in proc(5)
    )  # fmt: skip
    libc = ctypes.CDLL(None)
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_long]
    code, data = (start_code, end_code), (start_data, end_data, start_brk, libc.sbrk(0))
    middle, end = begin + len(words), begin + len(words) + len(variables)
    layout = _Map(*code, *data, start_stack, begin, middle, middle, end, 0, 0, 0xFFFFFFFF)
    _prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.addressof(layout), ctypes.sizeof(layout))


def _prctl(option: int, *arguments: int) -> None:
    call = ctypes.CDLL(None, use_errno=True).prctl
    call.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    if call(option, *arguments, *[0] * (4 - len(arguments))):
        raise StartError(f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def confines() -> list[Any]:
    """What a process cannot take on: hard limits and a priority that only root may lift, and namespaces."""
    limits = [resource.getrlimit(kind)[1] for kind in _limits()]
    spaces = sorted(str(path.readlink()) for path in Path("/proc/self/ns").iterdir())
    return [os.getpriority(os.PRIO_PROCESS, 0), limits, spaces]


def ask(
    connection: socket.socket,
    words: Sequence[str],
    environment: Mapping[str, str],
    files: Sequence[int],
    note: Callable[[int], None] | None = None,
) -> int:
    """Have the process at the other end become `python -m words…`, with this one's folder, limits and priority.

    Args:
        files: its stdout and stderr.
        note: called with its pid, before it does anything.

    Returns:
        Its pid. It does nothing before the caller has it, so that one that nobody waits for any more never runs.

    Raises:
        StartError: it cannot.
        OSError: no answer, TimeoutError after PATIENCE_S.
    """
    connection.settimeout(PATIENCE_S)
    _send(connection, {"words": list(words), "environment": dict(environment)} | _state(), files)
    answer = _receive(connection)[0]
    if "error" in answer:
        raise StartError(answer["error"])
    pid = int(answer["pid"])
    if note is not None:
        note(pid)
    _send(connection, {})
    return pid


def become(connection: socket.socket) -> list[str]:
    """In a process that was just forked: become what is asked for at the other end, and return its words."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection.settimeout(PATIENCE_S)
    try:
        try:
            request, files = _receive(connection, _STDOUT_AND_STDERR)
            _take_on(request, files)
        except Exception as error:
            _send(connection, {"error": f"{type(error).__name__}: {error}"})
            raise
        _send(connection, {"pid": os.getpid()})
        _receive(connection)
    except BaseException:
        os._exit(1)  # whoever asked has the reason, or is gone
    connection.close()
    return list(request["words"])


def _state() -> dict[str, Any]:
    """What a child that is started, not forked, inherits."""
    umask = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask"))
    return {
        "folder": str(Path.cwd()),
        "umask": int(umask.split()[1], 8),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "limits": [[kind, *resource.getrlimit(kind)] for kind in _limits()],
    }


def _limits() -> list[int]:
    return sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})


def _take_on(request: Mapping[str, Any], files: Sequence[int]) -> None:
    for number, file in enumerate(files, start=1):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    os.umask(request["umask"])
    if os.getpriority(os.PRIO_PROCESS, 0) != request["niceness"]:
        os.setpriority(os.PRIO_PROCESS, 0, request["niceness"])
    for kind, *limits in request["limits"]:
        if resource.getrlimit(kind) != tuple(limits):
            resource.setrlimit(kind, tuple(limits))
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    tempfile.tempdir = None  # what TMPDIR was for who imported
    _hold_pages()
    np.random.seed()  # Python's own generator sees to itself, and torch's starts with the same numbers everywhere
    sys.argv = list(request["words"])
    show([sys.executable, "-m", *request["words"]], request["environment"])


def _send(connection: socket.socket, message: Mapping[str, Any], files: Sequence[int] = ()) -> None:
    data = json.dumps(message).encode()
    socket.send_fds(connection, [_LENGTH.pack(len(data))], list(files))
    connection.sendall(data)


def _receive(connection: socket.socket, files: int = 0) -> tuple[dict[str, Any], list[int]]:
    head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, files)
    if len(head) < _LENGTH.size:
        raise ConnectionResetError("the other side ended")
    left, parts = _LENGTH.unpack(head)[0], []
    while left:
        parts.append(connection.recv(left))
        if not parts[-1]:
            raise ConnectionResetError("the other side ended")
        left -= len(parts[-1])
    return json.loads(b"".join(parts)), descriptors
