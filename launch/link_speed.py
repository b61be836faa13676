"""The link between two ranks of this machine, measured in the foreground."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import time
from typing import IO

import pandas as pd
import psutil

from launch import warm_start
from vdpp_core.config import RunConfig
from vdpp_core.config.execution import resolve
from vdpp_core.predict import rates
from vdpp_core.runs import files, machine

_COMMAND = ["vdpp_core.cli.local_torchrun", "--nproc_per_node=2", "-m", "vdpp_core.compare.link_probe"]


def probe(device: str = "auto", timeout: float = 180) -> pd.DataFrame:
    """Measure latency and bandwidth between two ranks of this machine: bytes, seconds (one way), gb_per_s (1e9 bytes).

    They are kept in runs/ for predictions and, of a CPU, what an exchange takes between ranks that compute:
    `vdpp_core.predict.rates.measured_link`.

    Raises:
        RuntimeError: the ranks failed; with their last error.
        psutil.TimeoutExpired: they were not done within `timeout` seconds, and were ended.
    """
    with tempfile.TemporaryFile("w+") as written, tempfile.TemporaryFile("w+") as log:
        agent = warm_start.start([*_COMMAND, device], written.fileno(), log.fileno())
        with contextlib.suppress(psutil.NoSuchProcess):
            _wait(psutil.Process(agent), timeout)
        lines, errors = (_lines(file) for file in (written, log))
    try:
        found = json.loads(lines[-1])
        rows = found["rows"]
    except (IndexError, ValueError, TypeError, KeyError):
        causes = [line for line in errors if re.match(r"[\w.]*Error: \S", line)]  # torchrun's own words come last
        raise RuntimeError(f"the probe failed: {(causes or errors or ['it wrote nothing'])[-1]}") from None
    path = rates.link_path(resolve(RunConfig(device=device)).device_type)
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"date": time.strftime("%Y-%m-%d"), "hardware": machine.hardware(), **found}
    files.write_atomically(path, json.dumps(facts, indent=2) + "\n")
    return pd.DataFrame(rows)


def _wait(agent: psutil.Process, timeout: float) -> None:
    try:
        agent.wait(timeout)
    except psutil.TimeoutExpired:
        agent.terminate()  # and it ends the ranks
        raise


def _lines(file: IO[str]) -> list[str]:
    file.seek(0)
    return file.read().strip().splitlines()
