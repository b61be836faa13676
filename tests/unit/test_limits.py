"""A device that is smaller on purpose, and what is known when it is full. In processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from vdpp_core.engine.memory_limit import Device, OutOfMemoryError
from vdpp_core.parallel.devices import can_limit

pytestmark = pytest.mark.skipif(not can_limit("cpu"), reason="a process's memory can be limited under Linux only")
BEGIN = """
import json, resource
import numpy, torch
from vdpp_core.engine.memory_limit import Device
device, hundred = Device(torch.device("cpu"), LIMIT), 25 * 2**20  # values of fp32 in 100 MiB
"""


def run(program, limit=0.28):
    done = subprocess.run(
        [sys.executable, "-c", BEGIN.replace("LIMIT", str(limit)) + program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_limit_is_real_and_ends():
    facts = run("""
held, before = [], resource.getrlimit(resource.RLIMIT_DATA)
try:
    with device.limited():
        free = device.free()
        for _ in range(10):
            held.append(torch.ones(hundred))
except RuntimeError as error:
    full = device.explain(error, None, "running")
held += [torch.ones(hundred) for _ in range(5)]
print(json.dumps({"held": len(held), "free": free, **full.facts, "same": before == resource.getrlimit(resource.RLIMIT_DATA)}))
""")  # noqa: E501 (a program)
    assert facts["held"] == 2 + 5  # two of 100 MiB in 287, then as many as one likes
    assert facts["free"] == pytest.approx(0.28 * 2**30, rel=0.01)
    assert facts["requested_gb"] == pytest.approx(100 * 2**20 / 1e9)
    assert facts["same"]


def test_the_layer_is_named_and_what_was_free():
    facts = run("""
net = torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(1000, 40_000)))
try:
    with device.limited(), torch.no_grad():
        try:
            net(torch.ones(5000, 1000))
        except RuntimeError as error:
            full = device.explain(error, torch.nn.ModuleDict({"unet": net}), "warming up")
            raise
except RuntimeError:
    print(json.dumps(full.facts | {"words": str(full)}))
""")  # noqa: E501 (a program)
    assert facts["layer"] == "1.1"
    assert facts["phase"] == "warming up"
    assert facts["requested_gb"] == pytest.approx(0.8)
    assert 0.2 < facts["free_gb"] < 0.28 * 2**30 / 1e9
    assert facts["words"].startswith("out of memory while warming up, asked for 0.800 GB, 0.2")
    assert facts["words"].endswith("of the limit of 0.28 GiB, in 1.1")


def test_threads_that_are_made_later_do_not_end_the_process():
    """OpenMP calls exit where it has no room for their stacks, 8 MiB each; nobody would learn why."""
    facts = run(
        """
torch.set_num_threads(16)
try:
    with device.limited():
        for _ in range(10):
            torch.ones(2**20).exp_()
        torch.ones(hundred)
except RuntimeError as error:
    print(json.dumps(device.explain(error, None, "running").facts))
""",
        limit=0.05,
    )
    assert facts["requested_gb"] == pytest.approx(100 * 2**20 / 1e9)


def test_python_s_own_lack_of_memory_counts():
    facts = run("""
try:
    with device.limited():
        numpy.ones(10**9)
except MemoryError as error:
    print(json.dumps(device.explain(error, None, "loading").facts))
""")
    assert facts["requested_gb"] == pytest.approx(8, rel=0.01)
    assert facts["layer"] is None


def test_it_can_be_told_when_nothing_at_all_is_left():
    facts = run("""
held = full = None
try:
    with device.limited():
        try:
            while True:
                held = held, bytes(600)
        except MemoryError as error:
            full = device.explain(error, None, "loading")
            raise
except MemoryError:
    while held:  # one by one, not as deep as it is
        held = held[0]
    print(json.dumps(full.facts))
""")
    assert facts["phase"] == "loading"
    assert facts["free_gb"] < 0.001


def test_other_errors_are_others():
    assert Device(torch.device("cpu"), None).explain(RuntimeError("Connection closed by peer"), None, "running") is None


def test_the_request_of_cuda_is_read():
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.75 GiB. GPU 0 has …")
    full = Device(torch.device("cpu"), None).explain(error, None, "running")
    assert isinstance(full, OutOfMemoryError)
    assert full.facts["requested_gb"] == pytest.approx(2.75 * 2**30 / 1e9)
