"""The recipe of the tiny model, in miniature, and the tiny model that it made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vdpp_core.assets import judge, model, train
from vdpp_core.assets.clips import held_out
from vdpp_core.config import MODELS

MINIATURE = train.Setting(vae_iterations=5, unet_iterations=5, pool=3)


@pytest.fixture(scope="module", autouse=True)
def one_thread_and_checkpoints_all_the_time():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "LOG_EVERY", 2)
        patch.setattr(train, "CHECKPOINT_EVERY_S", 0)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def trained(one_thread_and_checkpoints_all_the_time, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    train.train(folder, MINIATURE)
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
def test_an_interrupted_training_goes_on_as_if_nothing_had_been(trained, interrupted, tmp_path, monkeypatch):
    report = train.Training._report

    def stop(training, *figures):
        report(training, *figures)
        if training.name == interrupted and training.iteration == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train.Training, "_report", stop)
        with pytest.raises(KeyboardInterrupt):
            train.train(tmp_path, MINIATURE)
    assert not (tmp_path / "tiny-svd").exists()
    train.train(tmp_path, MINIATURE)
    ours, theirs = weights(tmp_path), weights(trained)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    lines = (tmp_path / f"{interrupted}.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["iteration", "2", "4", "5"]


def test_a_finished_training_is_not_done_again(trained, tmp_path, monkeypatch):
    folder = Path(shutil.copytree(trained, tmp_path / "again"))
    shutil.rmtree(folder / "tiny-svd")
    monkeypatch.setattr(train.Training, "_report", lambda *_: pytest.fail("it trains again"))
    train.train(folder, MINIATURE)
    ours, theirs = weights(folder), weights(trained)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_autoencoder_starts_as_a_thumbnail_in_colour():
    torch.manual_seed(1)
    pixels = held_out(8).draw(1)[:, 0] * 2 - 1
    with torch.no_grad():
        latents = model.vae().encode(pixels).latent_dist.mode()[:, :3]
    small = torch.nn.functional.avg_pool2d(pixels, 8)
    for channel in range(3):
        pair = torch.stack([latents[:, channel].flatten(), small[:, channel].flatten()])
        assert torch.corrcoef(pair)[0, 1] > 0.7


def test_the_autoencoder_shows_something_before_any_training():
    torch.manual_seed(1)
    pixels = held_out(8).draw(1)[:, 0] * 2 - 1
    vae = model.vae()
    with torch.no_grad():
        shown = vae.decode(vae.encode(pixels).latent_dist.mode(), num_frames=1).sample
    assert -10 * np.log10(((shown - pixels) ** 2).mean() / 4) > 8


def test_the_unet_starts_with_the_image_in_every_frame():
    torch.manual_seed(2)
    noisy = torch.randn(2, 14, 8, 8, 8)
    with torch.no_grad():
        start = model.unet()(noisy, torch.ones(2), torch.randn(2, 1, 32), torch.rand(2, 3), return_dict=False)[0]
    pair = torch.stack([start.flatten(), -noisy[:, :, 4:].flatten()])
    assert torch.corrcoef(pair)[0, 1] > 0.95


def test_sigmas_cover_the_schedule_and_stay_within_it():
    torch.manual_seed(0)
    drawn = torch.cat([train._sigmas() for _ in range(500)])
    assert (drawn.min() >= 0.002) & (drawn.max() <= 700)
    assert drawn.log().median().item() == pytest.approx(0.7, abs=0.15)
    assert (drawn > 100).float().mean() > 0.01


def test_the_shipped_model_is_small_and_its_autoencoder_good():
    folder = Path(str(MODELS["tiny"]))
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 14e6
    clips, shown = judge.autoencoded(judge.load(folder), held_out(8))
    assert -10 * np.log10(((clips - shown) ** 2).mean()) >= 26


def test_the_shipped_model_animates_images_that_it_never_saw():
    """Of eight, in fewer steps than `judge` takes; its figures are in TRAINING.md."""
    pipeline, scenes = judge.load(str(MODELS["tiny"])), held_out(8)
    right = judge.assess(judge.videos(pipeline, scenes.images(), num_inference_steps=15), scenes)
    assert right.psnr_first_db.median() >= 20
    assert right.present_last.mean() >= 0.75
    forgotten = judge.with_scheduler(pipeline, **judge.FORGOTTEN)
    wrong = judge.assess(judge.videos(forgotten, scenes.images(), num_inference_steps=15), scenes)
    assert (wrong.background_error > right.background_error).all()
