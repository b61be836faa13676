"""The recipe of the tiny model, in miniature."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from vdpp_core.tiny_svd import judge, train
from vdpp_core.tiny_svd.clips import held_out

MINIATURE = train.Setting(vae_iterations=5, unet_iterations=5, expert_iterations=3, pool=3)


@pytest.fixture(scope="module", autouse=True)
def checkpoints_all_the_time(on_one_thread):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "BATCH", 4)
        patch.setattr(train, "LOG_EVERY", 2)
        patch.setattr(train, "CHECKPOINT_EVERY_S", 0)
        yield


@contextmanager
def interrupting(name, iteration):
    """Ctrl-C when a network's training reports this iteration."""
    report = train.Training._report

    def stop(training, *figures):
        report(training, *figures)
        if (training.name, training.iteration) == (name, iteration):
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Training, "_report", stop)
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.fixture(scope="module")
def trained(checkpoints_all_the_time, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    train.train(folder, MINIATURE)
    return folder


@pytest.fixture(scope="module")
def trained_experts(checkpoints_all_the_time, tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    train.train_experts(folder, MINIATURE)
    return folder


def weights(folder):
    return {
        (part, name): tensor
        for part in ("vae", "unet")
        for name, tensor in load_file(folder / "tiny-svd" / part / "diffusion_pytorch_model.safetensors").items()
    }


def test_what_is_trained_loads_and_generates(trained):
    pipeline = judge.load(trained / "tiny-svd")
    frames = judge.videos(pipeline, held_out(1).images(), num_inference_steps=2)[0]
    assert frames.shape == (14, 64, 64, 3)
    assert frames.std() > 0
    assert {tensor.dtype for tensor in weights(trained).values()} == {torch.float16}
    assert pipeline.unet.dtype == torch.float32
    factor = json.loads((trained / "tiny-svd" / "vae" / "config.json").read_text())["scaling_factor"]
    pool = torch.load(trained / "unet.pt", weights_only=True)["memory"]
    assert factor == pytest.approx(pool["scaling_factor"].item())
    assert 1 / factor == pytest.approx(pool["latents"].std().item(), rel=0.5)  # of other clips of the same kind


@pytest.mark.parametrize("interrupted", ["vae", "unet"])
def test_an_interrupted_training_goes_on_as_if_nothing_had_been(trained, interrupted, tmp_path):
    with interrupting(interrupted, 4):
        train.train(tmp_path, MINIATURE)
    assert not (tmp_path / "tiny-svd").exists()
    train.train(tmp_path, MINIATURE)
    ours, theirs = weights(tmp_path), weights(trained)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    lines = (tmp_path / f"{interrupted}.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["iteration", "2", "4", "5"]


def unets(folder):
    return {str(path.relative_to(folder)): load_file(path) for path in sorted(folder.glob("*/unet/**/*.safetensors"))}


def test_the_experts_load_and_generate_and_differ_from_each_other(trained_experts):
    pipeline = judge.load(trained_experts / "experts")
    assert pipeline.unet.config.boundaries == [pytest.approx(math.log(9) / 4)]
    frames = judge.videos(pipeline, held_out(1).images(), num_inference_steps=2)[0]
    assert frames.std() > 0
    assert not [path for path in trained_experts.rglob("*.json") if "_name_or_path" in path.read_text()]
    trained = unets(trained_experts)
    file = "diffusion_pytorch_model.safetensors"
    assert [*trained] == [f"{name}/{file}" for name in ("control/unet", *(f"experts/unet/{n}" for n in train.EXPERTS))]
    first = [next(iter(tensors.values())) for tensors in trained.values()]
    assert {tensor.dtype for tensor in first} == {torch.float16}
    control, high_noise, low_noise = ([*tensors.values()] for tensors in trained.values())
    assert not all(map(torch.equal, high_noise, low_noise))
    assert not all(map(torch.equal, control, low_noise))


def test_experts_and_control_take_the_same_number_of_iterations_and_log_them(trained_experts):
    log = pd.read_csv(trained_experts / "training-experts.csv")
    assert log.groupby("network").iteration.max().to_dict() == {"control": 6, "high_noise": 3, "low_noise": 3}


def test_an_interrupted_training_of_experts_goes_on_as_if_nothing_had_been(trained_experts, tmp_path):
    with interrupting("low_noise", 2):
        train.train_experts(tmp_path, MINIATURE)
    assert not (tmp_path / "experts").exists()
    train.train_experts(tmp_path, MINIATURE)
    ours, theirs = unets(tmp_path), unets(trained_experts)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[file][name], theirs[file][name]) for file in ours for name in ours[file])


def test_a_finished_training_is_not_done_again(trained, tmp_path, monkeypatch):
    folder = Path(shutil.copytree(trained, tmp_path / "again"))
    shutil.rmtree(folder / "tiny-svd")
    monkeypatch.setattr(train.Training, "_report", lambda *_: pytest.fail("it trains again"))
    train.train(folder, MINIATURE)
    ours, theirs = weights(folder), weights(trained)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
