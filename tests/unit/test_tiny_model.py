"""What the training of the tiny model starts from, and the tiny model that it made."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vdpp_core.config.fields import ASSETS, MODELS
from vdpp_core.tiny_svd import judge, model, train
from vdpp_core.tiny_svd.clips import held_out

WEIGHTS = "diffusion_pytorch_model.safetensors"


pytestmark = pytest.mark.usefixtures("on_one_thread")


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
    drawn = torch.cat([train.draw_sigmas() for _ in range(500)])
    assert (drawn.min() >= 0.002) & (drawn.max() <= 700)
    assert drawn.log().median().item() == pytest.approx(0.7, abs=0.15)
    assert (drawn > 100).float().mean() > 0.01


@pytest.mark.parametrize("name", train.RANGES)
def test_sigmas_of_an_expert_stay_in_its_range_one_in_each_eighth_of_it(name):
    low, high = train.RANGES[name]
    torch.manual_seed(0)
    drawn = torch.stack([train.draw_sigmas(low, high) for _ in range(500)])
    assert (drawn.min() >= low) & (drawn.max() <= high)
    first, last = torch.special.ndtr((torch.tensor([low, high]).log() - 0.7) / 1.6)
    eighths = (torch.special.ndtr((drawn.log() - 0.7) / 1.6) - first) / (last - first) * train.BATCH
    right = (eighths.floor() == torch.arange(train.BATCH)).float().mean(dim=1)
    assert (right >= 1 - 1 / train.BATCH).all()  # one sigma of each batch is uniform in log sigma
    assert drawn.max() > 0.9 * high
    assert drawn.min() < 1.1 * low if low >= 1 else drawn.min() < 0.01


def test_the_ranges_of_the_experts_meet():
    high_noise, low_noise = train.EXPERTS.values()
    assert high_noise == (low_noise[1], 700)
    assert train.RANGES["control"] == (low_noise[0], 700)


@pytest.mark.slow
def test_the_shipped_model_is_small_and_its_autoencoder_good():
    folder = Path(str(MODELS["tiny"]))
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 14e6
    clips, shown = judge.autoencoded(judge.load(folder), held_out(8))
    assert -10 * np.log10(((clips - shown) ** 2).mean()) >= 26


@pytest.mark.slow
def test_the_shipped_model_animates_images_that_it_never_saw():
    """Of eight, in fewer steps than `judge` takes; its figures are in TRAINING.md."""
    pipeline, scenes = judge.load(str(MODELS["tiny"])), held_out(8)
    right = judge.assess(judge.videos(pipeline, scenes.images(), num_inference_steps=10), scenes)
    assert right.psnr_first_db.median() >= 20
    assert right.present_last.mean() >= 0.75
    forgotten = judge.with_scheduler(pipeline, **judge.FORGOTTEN)
    wrong = judge.assess(judge.videos(forgotten, scenes.images(), num_inference_steps=10), scenes)
    assert (wrong.background_error > right.background_error).all()


def test_the_shipped_experts_take_turns_in_the_official_pipeline():
    pipeline = judge.load(ASSETS / "experts")
    called = []
    for name, expert in pipeline.unet.experts.items():
        expert.register_forward_pre_hook(lambda _, inputs, name=name: called.append((name, float(inputs[1]))))
    frames = judge.videos(pipeline, held_out(1).images(), num_inference_steps=4)[0]
    assert frames.shape == (14, 64, 64, 3)
    assert [name for name, _ in called] == ["high_noise"] * 2 + ["low_noise"] * 2
    assert [name for name, t in called if math.exp(4 * t) >= train.BOUNDARY] == ["high_noise"] * 2


def test_the_shipped_experts_share_all_but_the_unet_with_the_single_model():
    experts, single = ASSETS / "experts", Path(str(MODELS["tiny"]))
    for part in ("vae", "image_encoder", "scheduler", "feature_extractor"):
        for path in (single / part).iterdir():
            assert (experts / part / path.name).read_bytes() == path.read_bytes(), path
    assert sum(path.stat().st_size for path in experts.rglob("*") if path.is_file()) <= 23e6
    weights = [load_file(folder / WEIGHTS) for folder in (single / "unet", *(experts / "unet").glob("*_noise"))]
    assert {frozenset(each) for each in weights} == {frozenset(weights[0])}
    assert {tensor.dtype for each in weights for tensor in each.values()} == {torch.float16}
    assert len({each["conv_in.weight"].numpy().tobytes() for each in weights}) == 3
