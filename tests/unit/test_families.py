"""The small random pipelines load from their folders, and their calls depend on what they should."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch

from tests.families import FAMILIES, folder, official
from vdpp_core.config import RunConfig
from vdpp_core.engine import worker
from vdpp_core.runs.run import Run

STEPS = 3


pytestmark = pytest.mark.usefixtures("on_one_thread")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_is_repeatable_and_depends_on_its_arguments(name):
    path, family = folder(name), FAMILIES[name]
    latents = official(path, family.call, STEPS, seed=0)
    assert latents.isfinite().all()
    assert latents.std() > 0.1
    torch.rand(1)  # the global random state does not matter
    assert torch.equal(latents, official(path, family.call, STEPS, seed=0))
    text = next(key for key in ("prompt", "prompt_embeds") if key in family.call)
    for other in (family.other_call, family.call | {text: family.other_call[text]}):
        assert not torch.equal(latents, official(path, other, STEPS, seed=0))
    assert not torch.equal(latents, official(path, family.call, STEPS, seed=1))


@pytest.mark.parametrize(("name", "solver"), [(name, solver) for name in FAMILIES for solver in FAMILIES[name].solvers])
def test_every_solver_suits_its_family(name, solver):
    latents = official(folder(name, solver), FAMILIES[name].other_call, STEPS, seed=0)
    assert latents.isfinite().all()
    assert latents.std() > 0.1


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_is_made_of_the_same_bytes_each_time(name, tmp_path):
    def digests(root):
        path = folder(name, root=root)
        files = (file for file in path.rglob("*") if file.is_file())
        return {str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}

    torch.rand(1)
    first = digests(tmp_path / "first")
    torch.rand(1)
    assert first == digests(tmp_path / "second")


def test_a_model_of_the_hub_is_taken_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "models--somebody--wan"
    shutil.copytree(folder("wan"), place / "snapshots" / "abc")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    call = {"prompt": "a red ball", "height": 32, "width": 48, "num_frames": 9}
    config = RunConfig(model_id="somebody/wan", total_steps=2, threads=1, save_latents=True, **call)
    found = [
        Run(worker.run(config.replace(model_id=model, output_dir=tmp_path / name))).load_latents(0)
        for name, model in (("hub", "somebody/wan"), ("folder", str(folder("wan"))))
    ]
    assert torch.equal(*found)
