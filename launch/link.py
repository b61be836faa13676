"""The link between two ranks of this machine, measured in the foreground."""

from __future__ import annotations

import json
import subprocess
import sys

import pandas as pd


def probe(device: str = "auto", timeout: float = 180) -> pd.DataFrame:
    """Latency and bandwidth between two ranks of this machine: bytes, seconds (one way), gb_per_s.

    Raises:
        RuntimeError: the ranks failed, with the last line they wrote.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "vdpp_core.probe", device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode:
        raise RuntimeError(f"the probe failed: {done.stderr.strip().splitlines()[-1]}")
    return pd.DataFrame(json.loads(done.stdout.strip().splitlines()[-1]))
