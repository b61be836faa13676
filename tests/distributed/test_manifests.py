"""Runs of a manifest: each video is the official pipeline's own; killed and resumed; decoded as they are ready."""

from __future__ import annotations

import csv
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageOps

import launch
from tests import families
from tests.conftest import official_pipeline, one_thread
from tests.patience import result_of
from vdpp_core import Parallel, RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.fields import EXAMPLE_IMAGE
from vdpp_core.engine import media, preflight
from vdpp_core.models.decoding import Decoder
from vdpp_core.models.images import read_image
from vdpp_core.plots import perfetto
from vdpp_core.runs import runfolder
from vdpp_core.runs.run import Run

ROWS: list[dict[str, Any]] = [
    {"image": "ball.png", "seed": 11},
    {"image": "negative.png", "seed": 11},
    {"image": "stripes.png", "seed": 11},
    {"image": "ball.png", "seed": 12},
    {"image": "negative.png", "seed": 12, "guidance_scale": 2.0},
    {"image": "stripes.png"},  # by default the run's seed + 5
]
SEED = 40
Wait = Callable[[Callable[[], Any], float], Any]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory, other_image: Path) -> Path:
    """The manifest of ROWS, with its three images beside it."""
    folder = tmp_path_factory.mktemp("table")
    ball = Image.open(EXAMPLE_IMAGE).convert("RGB")
    ball.save(folder / "ball.png")
    ImageOps.invert(ball).save(folder / "negative.png")
    Image.open(other_image).save(folder / "stripes.png")
    with (folder / "jobs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["image", "seed", "guidance_scale"])
        writer.writeheader()
        writer.writerows(ROWS)
    return folder / "jobs.csv"


@pytest.fixture(scope="module")
def config(table: Path) -> RunConfig:
    small = {"command": "generate", "total_steps": 8, "num_frames": 3, "threads": 1, "device": "cpu", "seed": SEED}
    return RunConfig(**small, manifest=table, parallel=Parallel(pp=2))


@pytest.fixture(scope="module")
def whole(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An undisturbed run, whose videos are decoded at the end."""
    job = launch.start(config.replace(output_dir=tmp_path_factory.mktemp("whole") / "run"))
    assert job.wait(240)["outcome"] == "ok"
    return job.run


def assert_same_files(run: Run, whole: Run) -> None:
    for sample in range(len(ROWS)):
        assert torch.equal(run.load_latents(sample), whole.load_latents(sample))
    for path in (whole.folder / "videos").iterdir():
        assert (run.folder / "videos" / path.name).read_bytes() == path.read_bytes(), path.name


def test_each_row_is_the_official_pipelines_own_video(whole: Run, table: Path, tmp_path: Path) -> None:
    pipeline = official_pipeline(torch.float32)
    for sample, row in enumerate(ROWS):
        with one_thread():
            latents = pipeline(
                read_image(table.parent / row["image"], (64, 64)),
                **{"height": 64, "width": 64, "num_frames": 3, "num_inference_steps": 8},
                max_guidance_scale=row.get("guidance_scale", 3.0),
                generator=torch.Generator().manual_seed(row.get("seed", SEED + sample)),
                output_type="latent",
            ).frames
            assert torch.equal(whole.load_latents(sample).transpose(1, 2), latents), sample
            decoder = Decoder(whole.config, torch.device("cpu"), torch.float32, lambda: None)
            (frames,) = decoder.frames(sample, latents)
        media.save_video(tmp_path, f"{sample}", frames, None, whole.config.fps)
        (video,) = whole.video_paths(sample)
        assert video.read_bytes() == (tmp_path / f"{sample}.mp4").read_bytes()
    assert len({path.read_bytes() for sample in range(6) for path in whole.video_paths(sample)}) == 6


def test_the_folder_says_which_video_is_which_row(whole: Run, table: Path) -> None:
    assert (whole.folder / "manifest.csv").read_bytes() == table.read_bytes()
    with (whole.folder / "videos.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["video"] for row in found] == [f"videos/sample-{sample:03d}.mp4" for sample in range(6)]
    assert [row["seed"] for row in found] == ["11", "11", "11", "12", "12", "45"]
    assert [row["guidance_scale"] for row in found] == ["", "", "", "", "2.0", ""]
    assert [Path(row["image"]).name for row in found] == [row["image"] for row in ROWS]
    result = whole.result() or {}
    assert (result["num_samples"], result["videos_written"]) == (6, 6)
    with Image.open(whole.folder / "videos" / "contact-sheet.png") as sheet:
        assert sheet.height == 6 * (64 + media.SHEET_GAP) - media.SHEET_GAP


def test_killed_in_the_middle_and_resumed(whole: Run, config: RunConfig, table: Path, tmp_path: Path, wait_until: Wait):
    job = launch.start(config.replace(output_dir=tmp_path / "run", decode="as-ready"))

    def events(kind: str) -> list[Any]:
        return [event for event in job.run.events() if event.kind == kind]

    wait_until(lambda: len(events("video")) >= 2, 60)
    os.kill(next(start.pid for start in events("start") if start.rank == 1), signal.SIGKILL)
    assert result_of(job, 60)["outcome"] == "failed"
    text = table.read_text()
    table.write_text(text.replace("stripes.png,11", "stripes.png,13"))
    try:
        with pytest.raises(ConfigError, match=r"row 3 \(sample 2\) has changed since the run was made"):
            job.resume()
    finally:
        table.write_text(text)
    result = result_of(job.resume(), 120)
    assert (result["outcome"], result["samples_finished"]) == ("ok", 6)
    assert result["resumed"]["samples_kept"] >= 2
    assert_same_files(job.run, whole)


def test_decoded_as_ready(whole: Run, config: RunConfig, tmp_path: Path) -> None:
    job = launch.start(config.replace(output_dir=tmp_path / "run", decode="as-ready"))
    result = job.wait(240)
    assert result["outcome"] == "ok"
    assert_same_files(job.run, whole)
    own = [event for event in job.run.events() if event.rank == 1]
    steps = [event.t for event in own if event.kind == "step"]
    videos = [event.t for event in own if event.kind == "video"]
    assert len(videos) == 6
    assert sum(video < steps[-1] for video in videos) == 5  # between the samples
    assert not [event for event in job.run.events() if event.rank == 0 and event.kind == "decode"]
    assert 0 < result["time_to_first_video_s"] < result["makespan_s"]
    assert 0 < result["predicted"]["time_to_first_video_s"] < result["predicted"]["makespan_s"]
    assert (whole.result() or {})["time_to_first_video_s"] > (whole.result() or {})["makespan_s"]
    assert len(result["decode_peak_memory_gb_per_rank"]) == 2
    phases = [e["name"] for e in perfetto.trace(job.run)["traceEvents"] if e.get("cat") == "phase" and e["tid"] == 1]
    assert phases == ["loading", "warming up", "running"]


def test_prompts_of_another_pipeline(tmp_path: Path, warm_ranks: Callable[..., None]) -> None:
    """Three prompts on two stages: one row without guidance, and one whose solver draws random numbers."""
    call = families.FAMILIES["animatediff"].call
    rows: list[dict[str, str]] = [
        {"prompt": "a red ball rolls."},
        {"prompt": "two boats.", "seed": "9", "guidance_scale": "1"},
        {"prompt": "a cat", "eta": "0.5"},
    ]
    with (tmp_path / "jobs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "seed", "eta", "guidance_scale"])
        writer.writeheader()
        writer.writerows(rows)
    config = RunConfig(
        **{"command": "generate", "total_steps": 3, "threads": 1, "device": "cpu", "output_dir": tmp_path / "run"},
        **{name: call[name] for name in ("height", "width", "num_frames", "negative_prompt")},
        model_id=str(families.folder("animatediff")),
        call={"guidance_scale": call["guidance_scale"]},
        manifest=tmp_path / "jobs.csv",
        parallel=Parallel(pp=2),
        decode="as-ready",
        compare_official=True,
    )
    folder = runfolder.create(preflight.complete(config, 2))
    warm_ranks(2, folder)
    run = Run(folder)
    result = run.result() or {}
    assert result["outcome"] == "ok"
    assert (result["official"]["equal_latents"], result["official"]["equal_frames"]) == (3, 3)
    for sample, row in enumerate(rows):
        own = call | {"prompt": row["prompt"], "eta": float(row.get("eta", 0))}
        own |= {"guidance_scale": float(row.get("guidance_scale", call["guidance_scale"]))}
        with one_thread():
            latents = families.official(Path(str(config.model_id)), own, 3, int(row.get("seed", sample)))
        assert torch.equal(run.load_latents(sample), latents), sample
    assert [len(run.video_paths(sample)) for sample in range(3)] == [1, 1, 1]


def test_rows_whose_encodings_look_different(tmp_path: Path, warm_ranks: Callable[..., None]) -> None:
    """HunyuanVideo encodes a negative prompt only where there is one, and then calls its transformer twice a step."""
    call = families.FAMILIES["hunyuan-video"].call
    (tmp_path / "jobs.csv").write_text("prompt,negative_prompt\na red ball,blurry\ntwo boats,\n")
    config = RunConfig(
        **{"command": "generate", "total_steps": 3, "threads": 1, "device": "cpu", "output_dir": tmp_path / "run"},
        **{name: call[name] for name in ("height", "width", "num_frames")},
        model_id=str(families.folder("hunyuan-video")),
        call=families.BARE | {"true_cfg_scale": 3.0},
        manifest=tmp_path / "jobs.csv",
        parallel=Parallel(pp=2),
        compare_official=True,
    )
    folder = runfolder.create(preflight.complete(config, 2))
    warm_ranks(2, folder)
    result = Run(folder).result() or {}
    assert (result["outcome"], result["official"]["equal_latents"]) == ("ok", 2)
