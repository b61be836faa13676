"""Where the time of a run goes, and what the profiler sees of it."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch

from vdpp_core import RunConfig
from vdpp_core.cli import show
from vdpp_core.config.errors import ConfigError
from vdpp_core.engine import worker
from vdpp_core.engine.measure import device_use
from vdpp_core.plots import profile
from vdpp_core.runs import event_types as kinds
from vdpp_core.runs import profiles
from vdpp_core.runs.run import Run
from vdpp_core.runs.time_spent import time_spent


def events(*made):
    return [kinds.parse(json.dumps({"rank": 0} | event).encode()) for event in made]


START = {"kind": "start", "t": 10.0, "pid": 1, "created": 0.0, "host": "h", "threads": 1, "device": "cpu"}
START |= {"dtype": "float32", "backend": "gloo", "launch_s": 2.0, "import_s": 5.0, "join_s": 0.5}
RUN = events(
    START,
    {"kind": "loaded", "t": 14.0, "encode_s": 1.0},
    {"kind": "step", "t": 14.5, "sample": -1, "step": 0, "seconds": 0.5},  # a warm-up sample
    {"kind": "clock", "t": 15.0},
    {"kind": "step", "t": 16.5, "sample": 0, "step": 0, "seconds": 1.25},
    {"kind": "pad", "t": 18.0, "step": 0, "seconds": 1.25},
    {"kind": "decode", "t": 19.0, "sample": 0},
    {"kind": "video", "t": 22.0, "sample": 0, "seconds": 3.0, "write_s": 0.75},
    {"kind": "comparing", "t": 24.0, "sample": 0, "step": 0},
    {"kind": "official", "t": 25.0, "sample": 0, "equal_latents": True, "equal_frames": True}
    | {"max_latent_difference": 0.0, "max_frame_difference": 0},
    {"kind": "done", "t": 26.0, "memory": {}},
)


def test_parts_of_the_time_of_a_rank_add_up():
    spent = time_spent(RUN)
    parts = {"launch": 2, "import": 5, "join": 0.5, "load": 3, "encode": 1, "warm_up": 1, "denoise": 2.5}
    parts |= {"decode": 2.25, "write": 0.75, "compare": 3, "other": 2.5}
    assert spent == pytest.approx(parts | {"total": 23.5})
    assert list(spent) == [*parts, "total"]


def test_so_far_and_of_earlier_versions():
    assert time_spent([]) == {}
    assert time_spent(RUN[:2]) == pytest.approx(
        time_spent(RUN[:2]) | {"load": 3, "encode": 1, "warm_up": 0, "total": 11.5}
    )
    old = events({name: START[name] for name in START if not name.endswith("_s")}, {"kind": "loaded", "t": 14.0})
    assert time_spent(old)["load"] == time_spent(old)["total"] == 4


def test_a_profile_shows_the_layers_of_two_steps_and_their_memory(tmp_path, capsys):
    made = RunConfig(model="dummy", device="cpu", total_steps=2, profile=True, output_dir=tmp_path / "run")
    run = Run(worker.run(made))
    result = run.result()
    entries = profiles.read(run.folder, 0)
    table, held = profile.layers(entries), profile.memory(entries)
    assert set(table.index) == {"conv_in", "time_embedding", "conv_out"}
    assert (table["calls"] == 2).all()
    assert table["share"].sum() == pytest.approx(1)
    assert held["gb"].max() * 1e9 >= 16 * torch.Size(made.shape).numel()  # 16 channels in fp32 of 4
    title = profile.draw(run).get_suptitle()
    assert title.startswith(f"{table.index[0]} takes ")
    spent = result["time_s_per_rank"][0]
    assert spent["total"] == pytest.approx(sum(spent.values()) - spent["total"])
    assert (spent["launch"], spent["import"]) == (0, 0)  # in this process
    steps = [event.seconds for event in kinds.of(run.events(), kinds.Step) if event.sample >= 0]
    assert len(steps) == 2 * made.num_samples  # those of the profile are none of the run's
    assert spent["denoise"] == pytest.approx(sum(steps))
    assert result["cold_step_s_per_rank"] == [event.cold_s for event in kinds.of(run.events(), kinds.Warm)]
    show.run(run.folder, as_json=False)
    assert f"profile: {tmp_path / 'run/profile'}\ndraw it: python -m launch trace run" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"profile .*rank-1.json.gz: is not there"):
        profile.draw(run, rank=1)


def test_layers_of_a_gpu_count_its_own_time():
    entries = [
        {"name": "layer a", "cat": cat, "ts": 0, "dur": duration}
        for cat, duration in (("user_annotation", 10), ("gpu_user_annotation", 3000))
    ]
    entries += [
        {"name": "[memory]", "ts": ts, "args": {"Device Type": device, "Bytes": size}}
        for ts, device, size in ((0, 0, 10**12), (1000, 1, 2 * 10**9), (2000, 1, 10**9), (3000, 1, -(10**9)))
    ]
    assert profile.layers(entries).loc["a", "ms"] == 3
    assert profile.memory(entries)["gb"].tolist() == [2, 3, 2]


def test_the_use_of_a_gpu_is_known_where_nvml_says_it():
    assert device_use(torch.device("cpu")) is None
    with mock.patch.object(torch.cuda, "utilization", return_value=75):
        assert device_use(torch.device("cuda", 0)) == 0.75
    with mock.patch.object(torch.cuda, "utilization", side_effect=ModuleNotFoundError("pynvml")):
        assert device_use(torch.device("cuda", 0)) is None
