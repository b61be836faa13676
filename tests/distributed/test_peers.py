"""Peers, side by side, as a person runs them: all of them compute the official pipeline's latents."""

from __future__ import annotations

import json
import subprocess
import sys

SMALL = "--total-steps 3 --num-samples 3 --num-frames 3 --warmup-samples 0 --threads 1 --seed 5 --repeats 1"
EXACT = ["official pipeline", "ours, 1 rank", "accelerate", "ours, dp 2", "GPipe", "ours, pp 2"]
LOCKSTEP = ["ours, cfg 2", "ours, frames 2"]


def test_two_ranks(tmp_path):
    folder = tmp_path / "peers"
    command = [sys.executable, "-m", "vdpp_core", "peers", *SMALL.split()]
    process = subprocess.run(
        [*command, "--world-size", "2", "--json", "--output-dir", str(folder)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    assert result == json.loads((folder / "peers.json").read_text())
    assert [row["variant"] for row in result["rows"]] == EXACT + LOCKSTEP
    for row in result["rows"]:
        assert 0 < row["makespan_s"] < 60, row
        assert row["samples"] == 3
        if row["variant"] in EXACT:
            assert (row["equal_latents"], row["max_relative_error"]) == (3, 0), row
        assert row["max_relative_error"] < 1e-5, row
    assert [row["variant"] for row in result["rows"] if row["of_peer"]] == EXACT[1::2]
    assert [row["variant"] for row in result["rows"] if row["latency_s"] is None] == ["GPipe"]
    names = {path.name for path in folder.iterdir()}
    assert names == {"peers.json", "peers.csv", "peers.png"} | {run["run_id"] for run in result["runs"]}
    for run in result["runs"]:
        assert len(list((folder / run["run_id"] / "latents").glob("*.safetensors"))) == 3
        assert (folder / run["run_id"] / "result.json").exists() == run["ours"]
