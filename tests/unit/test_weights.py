"""Where parameters come from: one file or several, whole or not, fitting their configuration or not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vdpp_core import ConfigError, RunConfig, models
from vdpp_core.config.fields import MODELS
from vdpp_core.engine import preflight
from vdpp_core.models import weights
from vdpp_core.models.pipelines import load_part

CPU = torch.device("cpu")
ONE_FILE = Path(str(MODELS["tiny"])) / "unet"


@pytest.fixture
def broken(several_files, tmp_path):
    """A copy of the pipeline in several files, to be damaged; its shards, the first of them first."""
    folder = Path(shutil.copytree(several_files, tmp_path / "broken"))
    return folder, sorted((folder / "unet").glob("*.safetensors"))


def refusal(folder):
    with pytest.raises(ConfigError) as caught:
        preflight.check(RunConfig(model_id=str(folder), device="cpu").for_ranks(1), 1)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith("model_id ")
    return line


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_is_stored_is_what_diffusers_loads(dtype, several_files):
    theirs = dict(load_part(RunConfig(), "unet", CPU, dtype).named_parameters())
    for folder in (ONE_FILE, Path(several_files) / "unet"):
        unet = models.on_meta(RunConfig(), dtype).to_empty(device=CPU)
        weights.fill(unet, weights.stored(folder, dtype))
        ours = dict(unet.named_parameters())
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_some_rows_are_those_rows(several_files):
    whole = load_file(ONE_FILE / "diffusion_pytorch_model.safetensors")
    for name, rows in weights.stored(Path(several_files) / "unet", torch.float32):
        assert torch.equal(rows[1:3], whole[name][1:3])


@pytest.mark.parametrize("model", ["dummy", "tiny", "medium"])
def test_random_weights_are_spread_as_pytorch_spreads_them(model):
    config = RunConfig(model=model, random_weights=model != "dummy")
    drawn = dict(weights.random(models.on_meta(config, torch.float32), CPU))
    assert drawn.keys() == dict(models.on_meta(config, torch.float32).named_parameters()).keys()
    assert all(torch.isfinite(tensor).all() for tensor in drawn.values())
    for name, tensor in drawn.items():
        if name.endswith("weight") and tensor.dim() > 1:
            assert tensor.abs().max() <= tensor[0].numel() ** -0.5 + 1e-6, name
            assert tensor.std() > 0.4 * tensor[0].numel() ** -0.5, name
        elif name.endswith("mix_factor"):
            assert tensor.item() == 0.5


def test_a_shard_is_missing(broken):
    folder, shards = broken
    shards[1].unlink()
    assert "is missing: its folder's index names" in refusal(folder)


def test_a_shard_is_cut_off(broken):
    folder, shards = broken
    shards[0].write_bytes(shards[0].read_bytes()[:-100])
    assert "is damaged or cut off" in refusal(folder)


def test_a_shard_lacks_a_tensor(broken):
    folder, shards = broken
    tensors = load_file(shards[0])
    lost = sorted(tensors)[0]
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, shards[0])
    assert f"must hold {lost}" in refusal(folder)


def test_the_index_is_cut_off(broken):
    folder, _ = broken
    index = next((folder / "unet").glob("*.index.json"))
    index.write_text(index.read_text()[:-20])
    assert "must have whole JSON with a weight_map" in refusal(folder)


@pytest.mark.parametrize("change", [
    {"block_out_channels": [96, 96]}, {"cross_attention_dim": 48}, {"layers_per_block": 2},
])  # fmt: skip
def test_a_configuration_that_does_not_fit(change, broken):
    folder, _ = broken
    settings = folder / "unet" / "config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | change))
    assert "must fit its config.json" in refusal(folder)


@pytest.mark.parametrize("change", [{"block_out_channels": "x"}, {"down_block_types": ["Foo", "Foo"]}])
def test_a_configuration_that_describes_no_unet(change, broken):
    folder, _ = broken
    settings = folder / "unet" / "config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | change))
    assert "must describe a UNet in unet/config.json" in refusal(folder)
