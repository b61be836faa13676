"""The batch script, with a Slurm that consists of two small scripts: what it would start, and that it starts."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "slurm" / "run.sbatch"
TELLING = 'printf "%s\\n" "$@" > srun.txt'
STARTING = 'while [ "${1#--}" != "$1" ]; do shift; done; "$@"'  # what follows srun's own flags, as one task


@pytest.fixture
def sbatch(tmp_path: Path):
    """sbatch(nodes, what srun does, *arguments of the script), as Slurm would call it for the job 4711."""

    (tmp_path / ".venv").symlink_to(sys.prefix)

    def call(nodes: list[str], srun: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        for name, work in (("scontrol", f"printf '%s\\n' {' '.join(nodes)}"), ("srun", srun)):
            (tmp_path / name).write_text(f"#!/bin/sh\n{work}\n")
            (tmp_path / name).chmod(0o755)
        job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": str(len(nodes)), "SLURM_JOB_NODELIST": "node[1-2]"}
        paths = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(SCRIPT.parents[2])}
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = {"PORT": str(free.getsockname()[1])}
        environment = os.environ | job | paths | port | {"SLURM_SUBMIT_DIR": str(tmp_path), "RANKS_PER_NODE": "2"}
        command = ["bash", str(SCRIPT), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)

    return call


def test_it_is_a_shell_script():
    assert subprocess.run(["bash", "-n", str(SCRIPT)], capture_output=True, text=True).stderr == ""


def test_one_task_a_node_is_started_with_the_same_arguments(sbatch, tmp_path: Path):
    started = sbatch(["node1", "node2"], TELLING, "benchmark", "--model", "svd")
    assert started.returncode == 0, started.stderr
    words = (tmp_path / "srun.txt").read_text().split()
    flags = dict(itertools.pairwise(words))
    assert words[0] == "--ntasks-per-node=1"
    assert (flags["--nnodes"], flags["--nproc"], flags["--rdzv-id"]) == ("2", "2", "slurm-4711")
    assert flags["--rdzv-endpoint"].startswith("node1:")
    assert words[words.index("benchmark") :][:3] == ["benchmark", "--model", "svd"]
    assert flags["--output-dir"] == str(tmp_path / "runs" / "slurm-4711")


def test_a_run_is_taken_up_again_by_its_name(sbatch, tmp_path: Path):
    started = sbatch(["node1", "node2"], TELLING, "resume", "slurm-4242")
    assert started.returncode == 0, started.stderr
    words = (tmp_path / "srun.txt").read_text().split()
    assert words[words.index("launch") :][:3] == ["launch", "resume", "--wait"]
    assert words[-1] == "slurm-4242"
    assert "--output-dir" not in words
    assert "one thing, the run" in sbatch(["node1"], TELLING, "resume").stderr


def test_it_runs_to_its_end(sbatch, tmp_path: Path):
    started = sbatch(["127.0.0.1"], STARTING, "simulate", "--total-steps", "4", "--height", "64", "--width", "64")
    assert started.returncode == 0, started.stderr
    result = json.loads((tmp_path / "runs" / "slurm-4711" / "result.json").read_text())
    assert (result["outcome"], result["world_size"]) == ("ok", 2)
