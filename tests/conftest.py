"""What the tests share: the official pipeline, which is the truth about latents, and events written by hand."""

from __future__ import annotations

import functools
import gc
import json
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.browser.lab import chromium, lab
from tests.doubles.checking import CALLS
from vdpp_core.config import RunConfig
from vdpp_core.config.fields import EXAMPLE_IMAGE, MODELS
from vdpp_core.models.images import read_image
from vdpp_core.runs import results, runfolder
from vdpp_core.runs.events import events_paths
from vdpp_core.runs.run import Run

__all__ = ["chromium", "lab"]  # fixtures
DTYPES = {"auto": torch.float32, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def pytest_configure() -> None:
    """Imports are not garbage, and what tests start heeds Ctrl-C, also where a shell's & has these tests ignore it."""
    gc.set_threshold(50_000, 10, 10)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Nothing that was imported by now is garbage: the collector need not look through it at every turn."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_servers() -> Iterator[None]:
    """Runs start from servers of this session, which end when their sockets are gone."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:  # short, as sockets' names are
        patch.setenv("XDG_RUNTIME_DIR", folder)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # of pytest-xdist
        session.config.workeroutput["calls"] = session.config.stash.get(CALLS, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[CALLS] = node.config.stash.get(CALLS, 0) + getattr(node, "workeroutput", {}).get("calls", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if calls := config.stash.get(CALLS, 0):
        terminalreporter.write_line(f"{calls} calls of communicators were checked against NCCL's rules")


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums are reordered by the number of threads; both sides of a comparison use one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def on_one_thread() -> Iterator[None]:
    """All tests of a module on one thread."""
    with one_thread():
        yield


@functools.cache
def official_pipeline(dtype: torch.dtype) -> Any:
    from diffusers import StableVideoDiffusionPipeline

    pipeline = StableVideoDiffusionPipeline.from_pretrained(MODELS["tiny"], torch_dtype=dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="session")
def official() -> Callable[[RunConfig, int], torch.Tensor]:
    """official(config, sample): the latents B C F H W that diffusers' own pipeline gives for a sample of a run."""
    known: dict[str, torch.Tensor] = {}

    def latents(config: RunConfig, sample: int) -> torch.Tensor:
        batch, _, num_frames, rows, columns = config.shape
        arguments = {
            "height": rows * 8,
            "width": columns * 8,
            "num_frames": num_frames,
            "num_inference_steps": config.total_steps,
            "min_guidance_scale": config.min_guidance_scale,
            "max_guidance_scale": config.guidance_scale,
            "fps": config.fps,
            "motion_bucket_id": config.motion_bucket_id,
            "noise_aug_strength": config.noise_aug_strength,
            "num_videos_per_prompt": batch,
        }
        path, seed = config.image or EXAMPLE_IMAGE, config.seed + sample
        key = json.dumps([arguments, config.dtype, str(path), seed])
        if key not in known:
            with one_thread():
                generator = torch.Generator().manual_seed(seed)
                pipeline = official_pipeline(DTYPES[config.dtype])
                frames = pipeline(
                    read_image(path, config.image_size), generator=generator, output_type="latent", **arguments
                ).frames
            known[key] = frames.transpose(1, 2)
        return known[key]

    return latents


@pytest.fixture(scope="session")
def other_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image that shares nothing with the example image: coloured stripes, not square."""
    image = Image.new("RGB", (96, 64))
    image.putdata([(x * 5 % 256, (x + y) * 7 % 256, y * 11 % 256) for y in range(64) for x in range(96)])
    path = tmp_path_factory.mktemp("images") / "stripes.png"
    image.save(path)
    return path


@pytest.fixture(scope="session")
def several_files(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The shipped pipeline with its UNet's weights in several files and an index, as diffusers saves a large one."""
    folder = Path(shutil.copytree(str(MODELS["tiny"]), tmp_path_factory.mktemp("models") / "several-files"))
    shutil.rmtree(folder / "unet")
    official_pipeline(torch.float16).unet.save_pretrained(folder / "unet", max_shard_size="3MB")
    assert len(list((folder / "unet").glob("*.safetensors"))) > 1
    return str(folder)


def write_events_of(folder: Path, rank: int, *events: tuple[float, str, dict[str, Any]]) -> None:
    lines = [json.dumps({"t": t, "rank": rank, "kind": kind, **facts}) for t, kind, facts in events]
    path = folder / "events" / f"rank-{rank}.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    assert path in events_paths(folder)


@pytest.fixture
def write_events() -> Callable[..., None]:
    """write_events(folder, rank, (t, kind, facts), …): the events of a rank, as the rank itself would write them."""
    return write_events_of


def write_run(root: Path, name: str, config: RunConfig, step_s: float, stopped_s: float = 0.0) -> Path:
    """A run that finished, of one rank, each step of which took so many seconds, and the last one more."""
    folder = runfolder.create(config.replace(output_dir=root / "runs" / name))
    facts = {"host": "elsewhere", "pid": 1, "created": 0, "device": "cpu", "dtype": "float32", "backend": "gloo"}
    events: list[tuple[float, str, dict[str, Any]]] = [(0.0, "start", facts | {"threads": 1}), (1.0, "clock", {})]
    t, steps = 1.0, [(sample, step) for sample in range(config.num_samples) for step in range(config.total_steps)]
    for sample, step in steps:
        seconds = step_s + stopped_s * ((sample, step) == steps[-1])
        t += seconds
        events.append((t, "step", {"sample": sample, "step": step, "seconds": seconds}))
        if step == config.total_steps - 1:
            events.append((t, "sample", {"sample": sample}))
    write_events_of(folder, 0, *events, (t, "done", {"memory": {"allocated_gb": 1.0}}))
    results.write(Run(folder), "ok")
    return folder
