"""The link between two ranks of this machine, measured in the foreground."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pandas as pd

from vdpp_core.config import RunConfig
from vdpp_core.config.execution import resolve
from vdpp_core.predict import rates
from vdpp_core.runs import files, machine


def probe(device: str = "auto", timeout: float = 180) -> pd.DataFrame:
    """Latency and bandwidth between two ranks of this machine: bytes, seconds (one way), gb_per_s.

    They are kept in runs/ for predictions: `vdpp_core.predict.rates.measured_link`.

    Raises:
        RuntimeError: the ranks failed, with the last line they wrote.
    """
    command = [sys.executable, "-m", "vdpp_core.parallel.loopback", "--nproc_per_node=2"]
    command += ["-m", "vdpp_core.engine.link_probe", device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode:
        raise RuntimeError(f"the probe failed: {done.stderr.strip().splitlines()[-1]}")
    rows = json.loads(done.stdout.strip().splitlines()[-1])
    path = rates.link_path(resolve(RunConfig(device=device)).device_type)
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"date": time.strftime("%Y-%m-%d"), "hardware": machine.hardware(), "rows": rows}
    files.write_atomically(path, json.dumps(facts, indent=2) + "\n")
    return pd.DataFrame(rows)
