"""The words of PyTorch, CUDA and the libraries below for a lack of memory, and words that only look like them.

Taken from their sources and from reports of users; those of the CPU were provoked here.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed import DistBackendError

from vdpp_core import Parallel, RunConfig
from vdpp_core.engine import worker
from vdpp_core.engine.memory_limit import Device, OutOfMemoryError
from vdpp_core.parallel.devices import GIB, is_out_of_memory
from vdpp_core.parallel.world import LostRankError, communication
from vdpp_core.runs import results, runfolder
from vdpp_core.runs.run import Run

MIB = 2**20
ASYNCHRONOUS = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable "
    "device-side assertions.\n"
)
NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, "
CUDA_CALL = (
    f"{NCCL}unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)
SYSTEM_CALL = (
    f"{NCCL}unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n"
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. \n"
    "Last error:\n"
)
REMOTE = (
    f"{NCCL}remote process exited or there was a network error, NCCL version 2.27.5\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
    "Last error:\nsocketProgressOpt: Call to recv from 10.0.0.2<33759> failed : Connection reset by peer"
)
WATCHDOG = (
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=64214, OpType=ALLGATHER, NumelIn=1, "
    "NumelOut=32, Timeout(ms)=600000) ran for 600081 milliseconds before timing out."
)
MPS = (
    "MPS backend out of memory (MPS allocated: {}, other allocations: {}, max allowed: {}). Tried to allocate {} on "
    "private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory allocations (may cause "
    "system failure)."
)
ONEDNN_HINT = "Run workload with environment variable ONEDNN_VERBOSE=all to get additional diagnostic information."


class Full(NamedTuple):
    error: BaseException
    requested: float | None  # bytes, where it says so


def full(kind: type[BaseException], text: str, requested: float | None = None) -> Full:
    return Full(kind(text), requested)


FULL = [
    full(
        torch.OutOfMemoryError,
        "CUDA out of memory. Tried to allocate 52.00 MiB. GPU 0 has a total capacity of 31.74 GiB of which 39.62 MiB "
        "is free. Process 101553 has 1.19 GiB memory in use. Including non-PyTorch memory, this process has 13.82 GiB "
        "memory in use. Of the allocated memory 11.54 GiB is allocated by PyTorch, and 677.26 MiB is reserved by "
        "PyTorch but unallocated.",
        52 * MIB,
    ),
    full(torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.75 GiB. GPU 0 has …", 2.75 * GIB),
    full(torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate more than 1EB memory."),
    full(torch.OutOfMemoryError, "Allocation on device 0 would exceed allowed memory. (out of memory)"),
    full(torch.AcceleratorError, f"CUDA error: out of memory{ASYNCHRONOUS}"),
    full(
        torch.AcceleratorError,
        "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in "
        f"https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.{ASYNCHRONOUS}",
    ),
    full(RuntimeError, "CUDA driver error: out of memory"),  # expandable segments
    full(torch.OutOfMemoryError, "HIP out of memory. Tried to allocate 20.00 MiB. GPU 0 has …", 20 * MIB),
    full(torch.OutOfMemoryError, "XPU out of memory. Tried to allocate 512 bytes. GPU 0 has …", 512),
    full(RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    full(RuntimeError, "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    full(RuntimeError, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    full(RuntimeError, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    full(RuntimeError, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    full(DistBackendError, f"{CUDA_CALL}Cuda failure 2 'out of memory'"),
    full(DistBackendError, f"{CUDA_CALL}Cuda failure 'out of memory'"),  # before NCCL 2.20
    full(DistBackendError, f"{CUDA_CALL}Failed to CUDA calloc 6291456 bytes", 6291456),
    full(DistBackendError, f"{CUDA_CALL}Failed to CUDA calloc async 608 bytes", 608),
    full(DistBackendError, f"{CUDA_CALL}Failed to CUDA host alloc 4923392 bytes", 4923392),
    full(DistBackendError, f"{SYSTEM_CALL}Failed to malloc 33554432 bytes", 33554432),
    full(RuntimeError, MPS.format("9.57 GiB", "17.35 GiB", "27.20 GiB", "292.50 MiB"), 292.5 * MIB),
    full(RuntimeError, MPS.format("16.91 GB", "2.77 MB", "18.13 GB", "1.28 GB"), 1.28 * GIB),  # the same unit as GiB
    full(RuntimeError, MPS.format("16.00 GB", "3.31 GB", "18.13 GB", "256 bytes"), 256),
    full(
        RuntimeError,
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 4000000000000000 bytes. Error code 12 (Cannot allocate memory)",
        4e15,
    ),
    full(
        RuntimeError,  # under Windows
        "[enforce fail at alloc_cpu.cpp:116] data. DefaultCPUAllocator: not enough memory: you tried to allocate "
        "3221225472 bytes.",
        3221225472,
    ),
    full(RuntimeError, "unable to mmap 6111 bytes from file <unet.safetensors>: Cannot allocate memory (12)", 6111),
    full(RuntimeError, "std::bad_alloc"),
    full(MemoryError, "bad allocation"),
    full(MemoryError, ""),
    full(MemoryError, "Unable to allocate 2.5 PiB for an array with shape (1000,) and data type float64", 2.5 * 2**50),
    Full(OSError(errno.ENOMEM, "Cannot allocate memory"), None),
    full(RuntimeError, "could not create a primitive"),
    full(RuntimeError, "could not execute a primitive"),
    full(RuntimeError, "could not create a memory object"),
]
OWN_FAULTS = [  # of this rank's device, seen when it is waited for
    torch.AcceleratorError(f"CUDA error: an illegal memory access was encountered{ASYNCHRONOUS}"),
    torch.AcceleratorError(f"CUDA error: device-side assert triggered{ASYNCHRONOUS}"),
    torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
]
LOSSES = [
    DistBackendError(f"{CUDA_CALL}Cuda failure 999 'unknown error'"),
    DistBackendError(f"{CUDA_CALL}Cuda failure 1 'invalid argument'"),
    DistBackendError(
        f"{SYSTEM_CALL}Error while creating shared memory segment /dev/shm/nccl-KWfVyt (size 5967872), "
        "error: No space left on device (28)"
    ),
    DistBackendError(f"{SYSTEM_CALL}Call to connect returned Connection refused, retrying"),
    DistBackendError(REMOTE),
    DistBackendError(WATCHDOG),
    RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"),
    RuntimeError("Socket Timeout"),
    RuntimeError(),
]
OTHERS = [
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    RuntimeError(f"could not create a primitive descriptor for the matmul primitive. {ONEDNN_HINT}"),
    RuntimeError("could not create a memory descriptor from blob"),
    RuntimeError("Could not create a named pipe"),
    RuntimeError("could not create a stream"),
    RuntimeError("The size of tensor a (4) must match the size of tensor b (5) at non-singleton dimension 3"),
    RuntimeError("unable to open file </data/out of memory/unet.safetensors> in read-only mode: No such file (2)"),
    RuntimeError("the worker that ran out of memory yesterday is back"),
    RuntimeError("Storage size calculation overflowed with sizes=[4611686018427387904]"),
    OSError(errno.ENOSPC, "No space left on device"),
    FileNotFoundError(errno.ENOENT, "No such file or directory", "CUDA out of memory.png"),
    ValueError("CUDA out of memory. Tried to allocate 2.75 GiB."),
]
NOT_FULL = [*OWN_FAULTS, *LOSSES, *OTHERS]


def words(case: Full | BaseException) -> str:
    return repr(case.error if isinstance(case, Full) else case)[:70]


def caught(error: BaseException, peer: int | str = 1) -> BaseException:
    """What comes of an error while a rank communicates."""
    with pytest.raises(BaseException) as info, communication(peer):  # noqa: PT011 (any is the point)
        raise error
    return info.value


@pytest.mark.parametrize("case", FULL, ids=words)
def test_a_lack_of_memory_is_known_by_its_words(case: Full) -> None:
    assert is_out_of_memory(case.error)
    told = Device(torch.device("cpu"), None).explain(case.error, None, "running")
    assert isinstance(told, OutOfMemoryError)
    assert told.facts["requested_gb"] == (None if case.requested is None else pytest.approx(case.requested / 1e9))
    assert caught(case.error) is case.error


@pytest.mark.parametrize("error", NOT_FULL, ids=words)
def test_what_only_looks_like_it_is_none(error: BaseException) -> None:
    assert not is_out_of_memory(error)
    assert Device(torch.device("cpu"), None).explain(error, None, "running") is None


@pytest.mark.parametrize("error", LOSSES, ids=words)
def test_whatever_else_a_communicator_says_is_the_loss_of_a_rank(error: BaseException) -> None:
    lost = caught(error, peer=3)
    assert isinstance(lost, LostRankError)
    assert (lost.rank, "\n" in str(lost)) == (3, False)


@pytest.mark.parametrize("error", OWN_FAULTS, ids=words)
def test_what_a_rank_s_own_device_did_is_not_blamed_on_its_neighbour(error: BaseException) -> None:
    assert caught(error) is error


def test_the_system_s_lack_of_memory_ends_a_run_as_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(worker._Rank, "_work", full)
    with pytest.raises(OutOfMemoryError):
        worker.run(RunConfig(command="simulate", output_dir=tmp_path / "run"))
    result = Run(tmp_path / "run").result()
    assert result is not None
    assert result["outcome"] == "oom"


def last_words(error: BaseException, peer: int) -> dict[str, Any]:
    """Of a rank that got an error while it communicated with another."""
    got = caught(error, peer)
    return worker._last_words(Device(torch.device("cpu"), None).explain(got, None, "running") or got)


def ends(folder: Path, write_events: Any, *errors: BaseException) -> dict[str, Any]:
    """The result of a run of two ranks that got these errors, one after the other, each while it waited for the
    other."""
    runfolder.create(RunConfig(total_steps=4, parallel=Parallel(pp=2), output_dir=folder))
    for rank, error in enumerate(errors):
        write_events(folder, rank, (100.0 + rank, "error", last_words(error, peer=1 - rank)))
    return results.settle(Run(folder))


@pytest.mark.parametrize("case", FULL, ids=words)
def test_the_rank_without_memory_is_the_first_cause_though_the_other_was_heard_before(
    case: Full, tmp_path: Path, write_events: Any
) -> None:
    result = ends(tmp_path / "run", write_events, DistBackendError(REMOTE), case.error)
    assert (result["outcome"], result["failure"]["rank"]) == ("oom", 1)


def test_of_two_ranks_without_memory_the_earlier_is_the_first_cause(tmp_path: Path, write_events: Any) -> None:
    result = ends(tmp_path / "run", write_events, FULL[0].error, FULL[-1].error)
    assert (result["outcome"], result["failure"]["rank"]) == ("oom", 0)
    assert result["failure"]["oom"]["requested_gb"] == pytest.approx(52 * MIB / 1e9)


@pytest.mark.parametrize("error", [*OWN_FAULTS, *LOSSES], ids=words)
def test_look_alikes_end_no_run_for_lack_of_memory(error: BaseException, tmp_path: Path, write_events: Any) -> None:
    result = ends(tmp_path / "run", write_events, DistBackendError(REMOTE), error)
    own = isinstance(error, torch.AcceleratorError)
    assert (result["outcome"], result["failure"]["rank"]) == ("failed", 1 if own else 0)
