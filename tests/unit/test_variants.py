"""Which files of a model are read for a type of number: decided by their names, without trying, and without a word."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub as hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects

from tests.conftest import official_pipeline
from vdpp_core import ConfigError, RunConfig
from vdpp_core.config.fields import MODELS
from vdpp_core.models import pipelines, weights
from vdpp_core.models.decoding import NOT_TO_DECODE

CPU = torch.device("cpu")
PARTS = ("unet", "vae", "image_encoder")


def named(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    return folder


PLAIN, HALF = "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors"


@pytest.mark.parametrize(
    ("names", "in_fp32", "in_half"),
    [
        ([PLAIN], None, None),
        ([HALF], "fp16", "fp16"),
        ([PLAIN, HALF], None, "fp16"),
        (["model.safetensors", "model.fp16.safetensors"], None, "fp16"),
        (["diffusion_pytorch_model-00001-of-00002.safetensors"], None, None),
        (["diffusion_pytorch_model.fp16-00001-of-00002.safetensors"], "fp16", "fp16"),
        (["diffusion_pytorch_model-00001-of-00002.fp16.safetensors"], "fp16", "fp16"),  # as diffusers wrote them once
        ([PLAIN, "lora.fp16.safetensors", "diffusion_pytorch_model.fp16.bin", "README"], None, None),
        ([], None, None),
    ],
    ids=str,
)
def test_the_nearer_variant_is_told_by_the_names(
    names: list[str], in_fp32: str | None, in_half: str | None, tmp_path: Path
) -> None:
    folder = named(tmp_path / "unet", *names)
    assert weights.variant(folder, torch.float32) == in_fp32
    assert weights.variant(folder, torch.float16) == weights.variant(folder, torch.bfloat16) == in_half


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The shipped pipeline with files of one variant, of the other, of both, and with the UNet's alone in half."""
    root = tmp_path_factory.mktemp("variants")
    plain = Path(shutil.copytree(str(MODELS["tiny"]), root / "plain"))
    official_pipeline(torch.float16).save_pretrained(root / "half", variant="fp16")
    both = Path(shutil.copytree(plain, root / "both"))
    shutil.copytree(root / "half", both, dirs_exist_ok=True)
    mixed = Path(shutil.copytree(plain, root / "mixed"))
    shutil.rmtree(mixed / "unet")
    shutil.copytree(root / "half" / "unet", mixed / "unet")
    return {path.name: path for path in (plain, root / "half", both, mixed)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["plain", "half", "both", "mixed"])
def test_no_file_is_asked_for_that_is_not_there(
    name: str, dtype: torch.dtype, models: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig(command="generate", model_id=str(models[name]))
    capfd.readouterr()
    pipeline = pipelines.load_official(config, CPU, dtype)
    unet = pipelines.load_part(config, "unet", CPU, dtype)
    decoder = pipelines.load_official(config, CPU, dtype, without=NOT_TO_DECODE)
    assert "An error occurred" not in capfd.readouterr().err
    assert {getattr(pipeline, part).dtype for part in PARTS} == {unet.dtype, decoder.vae.dtype} == {dtype}
    once = torch.float16 if name in ("half", "mixed") or (name == "both" and dtype != torch.float32) else torch.float32
    stored = official_pipeline(once).unet.state_dict()
    for made in (pipeline.unet, unet):
        assert all(torch.equal(value, stored[key].to(dtype)) for key, value in made.state_dict().items())


@pytest.fixture
def a_hub(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache into which what is asked for of a hub's model is copied; the model has the name of a folder above."""

    def snapshot_download(repo_id: str, *, allow_patterns: Any, ignore_patterns: Any = None) -> str:
        source, cached = models[repo_id.partition("/")[2]], tmp_path / "cache"
        there = [str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()]
        for name in filter_repo_objects(there, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (cached / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, cached / name)
        return str(cached)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    return tmp_path / "cache"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["plain", "half", "both", "mixed"])
def test_of_the_hub_only_that_variant_is_downloaded(
    name: str, dtype: torch.dtype, a_hub: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    config = RunConfig(command="generate", model_id=f"somebody/{name}")
    assert pipelines.load_official(config, CPU, dtype).dtype == dtype
    for part in PARTS:
        (one,) = (a_hub / part).glob("*.safetensors")
        wanted_half = name == "half" or (name == "mixed" and part == "unet")
        assert (".fp16" in one.name) == (wanted_half or (name == "both" and dtype != torch.float32))


def test_a_folder_without_the_file_that_its_variant_should_have(tmp_path: Path) -> None:
    folder = named(tmp_path / "unet", "diffusion_pytorch_model.fp16-00001-of-00002.safetensors")
    with pytest.raises(ConfigError, match=r"must have diffusion_pytorch_model\.fp16\.safetensors"):
        weights.files(folder, torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_run_that_succeeds_says_nothing_on_the_side(dtype: str, tmp_path: Path) -> None:
    arguments = ["--total-steps", "1", "--num-frames", "2", "--threads", "1", "--output-dir", str(tmp_path / "run")]
    command = [sys.executable, "-m", "vdpp_core", "generate", "--compare-official", "--dtype", dtype, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]  # of other runs, perhaps
    assert (done.returncode, lines) == (0, [])
    assert "equal to the official pipeline" in done.stdout
