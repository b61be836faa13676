"""Videos of split runs are those of the official pipeline, byte for byte, and each rank decodes its share."""

from __future__ import annotations

import itertools
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.patience import wait_for_end
from vdpp_core import RunConfig
from vdpp_core.__main__ import main
from vdpp_core.config.execution import resolve
from vdpp_core.config.fields import EXAMPLE_IMAGE, MODELS
from vdpp_core.engine import media, worker
from vdpp_core.engine.videos import Official
from vdpp_core.models.decoding import Decoder
from vdpp_core.models.stage import Stage
from vdpp_core.runs import runfolder
from vdpp_core.runs.run import Run

QUICK = {"total_steps": 4, "num_frames": 5, "num_samples": 3, "threads": 1, "compare_official": True}
CASES = {
    "1 stage": (1, QUICK),
    "2 stages": (2, QUICK | {"decode_chunk_size": 2, "fps": 12}),
    "3 stages": (3, QUICK | {"decode_chunk_size": 14, "num_frames": 14}),
    "2 replicas": (2, QUICK | {"parallel": {"dp": 2}}),
    "half precision": (1, QUICK | {"dtype": "bf16", "num_samples": 1}),
    "batch of 2, 24 × 40": (2, QUICK | {"latent_shape": (2, 4, 5, 5, 3), "num_frames": None, "num_samples": 1}),
}


@pytest.fixture(scope="module")
def folders(warm_ranks, tmp_path_factory):
    """The run folder of each case."""
    root, made = tmp_path_factory.mktemp("generate"), {}
    for number, (name, (ranks, arguments)) in enumerate(CASES.items()):
        config = RunConfig(command="generate", output_dir=root / str(number), **arguments)
        made[name] = runfolder.create(config.for_ranks(ranks))
    for ranks in (1, 2, 3):
        warm_ranks(ranks, *[made[name] for name, (needed, _) in CASES.items() if needed == ranks])
    return made


@pytest.mark.parametrize("name", CASES)
def test_frames_are_those_of_the_official_pipeline(name, folders, on_one_thread):
    folder = folders[name]
    config, result = RunConfig.read(folder), Run(folder).result()
    together = result["official"].pop("max_batch_difference")
    assert together is None if config.shape[0] == 1 else together > 0
    assert result["official"] == {
        "samples": config.num_samples,
        "equal_latents": config.num_samples,
        "equal_frames": config.num_samples,
        "max_latent_difference": 0,
        "relative_latent_difference": 0,
        "max_frame_difference": 0,
    }
    cpu, sample = torch.device("cpu"), config.num_samples - 1  # and once more, from the latents of the run
    dtype, steps = resolve(config).dtype, list[int]()
    latents, frames = Official(config, cpu, dtype).generate(sample, steps.append)
    ours = Run(folder).load_latents(sample).transpose(1, 2)
    assert torch.equal(ours, latents)
    assert steps == list(range(config.total_steps))
    told = [event for event in Run(folder).events() if event.kind == "comparing"]  # so no long silence
    everything = itertools.product(range(config.num_samples), steps)
    assert sorted((event.sample, event.step) for event in told) == list(everything)
    made = Decoder(config, cpu, dtype, lambda: None).frames(0, ours)
    assert np.array_equal(made, frames) == (config.shape[0] == 1)
    for video, one in zip(made, ours.split(1), strict=True):  # each as if there were no other
        assert np.array_equal(Decoder(config, cpu, dtype, lambda: None).frames(0, one)[0], video)
    assert frames.std() > 1


def test_frames_are_the_pictures_that_diffusers_gives_its_users(folders, on_one_thread):
    """Nothing of the package on the other side; the size of the chunks matters to the VAE's temporal layers."""
    from diffusers import StableVideoDiffusionPipeline

    pipeline = StableVideoDiffusionPipeline.from_pretrained(MODELS["tiny"])
    pipeline.set_progress_bar_config(disable=True)
    folder, seen = folders["1 stage"], []
    latents = Run(folder).load_latents(1).transpose(1, 2)
    for size in (1, 4, 14):
        config = RunConfig.read(folder).replace(decode_chunk_size=size)
        pictures = pipeline(
            Image.open(EXAMPLE_IMAGE).convert("RGB"),
            height=64,
            width=64,
            num_frames=5,
            num_inference_steps=4,
            decode_chunk_size=size,
            generator=torch.Generator().manual_seed(1),
            output_type="pil",
        ).frames
        ours = Decoder(config, torch.device("cpu"), torch.float32, lambda: None).frames(0, latents)
        assert np.array_equal(ours, [[np.asarray(picture) for picture in video] for video in pictures]), size
        seen.append(ours)
    assert not np.array_equal(seen[0], seen[2])


@pytest.mark.parametrize("name", CASES)
def test_the_files_of_a_run(name, folders):
    folder = folders[name]
    config, result = RunConfig.read(folder), Run(folder).result()
    names = [name for sample in range(config.num_samples) for name in runfolder.video_names(config, sample)]
    assert len(names) == config.num_samples * config.shape[0]
    expected = {f"{name}.{kind}" for name in names for kind in ("mp4", "gif", "png")}
    assert {path.name for path in (folder / "videos").iterdir()} == expected | {"contact-sheet.png", "input.png"}
    width, height = config.image_size
    for name in names:
        frames, fps = media.read_video(folder / "videos" / f"{name}.mp4")
        assert (frames.shape, fps) == ((config.shape[2], height, width, 3), config.fps)
    with Image.open(folder / "videos" / "input.png") as image:
        assert (image.size, image.mode) == ((width, height), "RGB")
    with Image.open(folder / "videos" / "contact-sheet.png") as sheet:
        assert sheet.height == len(names) * (height + media.SHEET_GAP) - media.SHEET_GAP
    assert (result["videos_written"], len(result["decode_s"])) == (len(names), config.num_samples)
    assert len(result["decode_peak_memory_gb_per_rank"]) == config.layout.world_size


@pytest.mark.parametrize("name", CASES)
def test_every_rank_decodes_its_share(name, folders):
    folder = folders[name]
    config, events = RunConfig.read(folder), Run(folder).events()
    made = {event.sample: event.rank for event in events if event.kind == "video"}
    assert sorted(made) == list(range(config.num_samples))
    layout = config.layout
    for sample, rank in made.items():
        team = layout.pp * layout.lockstep
        assert (layout.place(rank).replica, rank % team) == (sample % layout.dp, sample // layout.dp % team)
    last_step = max(event.t for event in events if event.kind == "step" and event.rank == 0)
    assert min(event.t for event in events if event.kind == "decode" and event.rank == 0) > last_step
    chunks = sum(event.kind == "chunk" for event in events)
    batch, frames = config.shape[0], config.shape[2]
    assert chunks == config.num_samples * batch * -(-frames // config.decode_chunk_size)
    for rank in range(layout.world_size):
        assert [event.kind for event in events if event.rank == rank][-1] == "done"


@pytest.mark.parametrize(("value", "words"), [(float("nan"), "are not finite"), (-5.0, "are black")])
def test_no_file_is_written_of_a_video_without_a_picture(value, words, tmp_path, monkeypatch):
    from diffusers import StableVideoDiffusionPipeline

    def spoilt(pipeline, latents, num_frames, decode_chunk_size):
        return torch.full((1, 3, num_frames, 64, 64), value)

    monkeypatch.setattr(StableVideoDiffusionPipeline, "decode_latents", spoilt)
    config = RunConfig(command="generate", total_steps=2, num_frames=3, threads=1, output_dir=tmp_path / "run")
    with pytest.raises(FloatingPointError, match=rf"^sample 0: .*{words}.*--dtype fp32"):
        worker.run(config)
    result = Run(tmp_path / "run").result()
    assert (result["outcome"], result["samples_finished"], result["videos_written"]) == ("failed", 1, 0)
    assert words in result["failure"]["cause"]
    assert result["failure"]["sample"] == 0
    assert not (tmp_path / "run" / "videos").exists()
    assert Run(tmp_path / "run").load_latents(0).shape == config.shape


@pytest.mark.parametrize(
    ("save_latents", "words"), [(True, "latents are not finite"), (False, "frames are not finite")]
)
def test_latents_that_are_not_finite_end_the_run(save_latents, words, tmp_path, monkeypatch):
    denoise = Stage.denoise

    def spoilt(*arguments):
        message = denoise(*arguments)
        return replace(message, latents=message.latents * float("nan"))

    monkeypatch.setattr(Stage, "denoise", spoilt)
    small = {"total_steps": 2, "num_frames": 3, "threads": 1, "save_latents": save_latents}
    with pytest.raises(FloatingPointError, match=rf"^sample 0: .*{words}"):
        worker.run(RunConfig(command="generate", output_dir=tmp_path / "run", **small))
    result = Run(tmp_path / "run").result()
    assert (result["outcome"], result["videos_written"]) == ("failed", 0)
    assert words in result["failure"]["cause"]
    assert not (tmp_path / "run" / "videos").exists()


def test_the_videos_before_a_spoilt_one_are_kept(tmp_path, monkeypatch):
    frames = Decoder.frames

    def spoilt(decoder, sample, latents):
        if (tmp_path / "run" / "videos" / "sample-000.png").exists():
            raise FloatingPointError("no picture")
        return frames(decoder, sample, latents)

    monkeypatch.setattr(Decoder, "frames", spoilt)
    small = {"total_steps": 2, "num_frames": 3, "threads": 1, "num_samples": 3}
    with pytest.raises(FloatingPointError, match=r"^sample 1: no picture$"):
        worker.run(RunConfig(command="generate", output_dir=tmp_path / "run", **small))
    result = Run(tmp_path / "run").result()
    assert (result["outcome"], result["samples_finished"], result["videos_written"]) == ("failed", 3, 1)
    assert (result["failure"]["rank"], result["failure"]["sample"]) == (0, 1)
    assert {path.stem for path in (tmp_path / "run" / "videos").iterdir()} == {"sample-000"}


def test_one_rank_cannot_write_its_video(torchrun, tmp_path):
    small = {"total_steps": 2, "num_frames": 3, "threads": 1, "num_samples": 2}
    config = RunConfig(command="generate", output_dir=tmp_path / "run", **small)
    folder = runfolder.create(config.for_ranks(2))
    (folder / "videos" / "sample-001.mp4").mkdir(parents=True)
    assert torchrun(2, "run", folder).returncode != 0
    result = Run(folder).result()
    assert (result["outcome"], result["samples_finished"]) == ("failed", 2)
    assert (result["failure"]["rank"], result["failure"]["sample"]) == (1, 1)
    assert "sample-001.mp4" in result["failure"]["cause"]
    assert not list((folder / "videos").glob(".*"))
    assert not (folder / "videos" / "contact-sheet.png").exists()


def test_a_rank_is_killed_while_it_decodes(forked_in_background, wait_until, tmp_path):
    small = {"total_steps": 2, "num_frames": 14, "threads": 1, "num_samples": 16, "decode_chunk_size": 1}
    config = RunConfig(command="generate", output_dir=tmp_path / "run", **small)
    folder = runfolder.create(config.for_ranks(2))

    def of_rank_1(kind):
        return [event for event in Run(folder).events() if (event.rank, event.kind) == (1, kind)]

    with forked_in_background(2, "run", folder) as process:
        wait_until(lambda: of_rank_1("video") and len(of_rank_1("chunk")) > 14, 60)
        os.kill(of_rank_1("start")[0].pid, signal.SIGKILL)
        wait_for_end(process, 20)
    result = Run(folder).result()
    assert (result["outcome"], result["failure"]["rank"]) == ("failed", 1)
    assert "killed" in result["failure"]["cause"]
    assert result["failure"]["sample"] == of_rank_1("decode")[-1].sample
    assert result["samples_finished"] == 16
    assert 1 <= result["videos_written"] < 16


def test_only_generate_is_compared(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["benchmark", "--compare-official"])
    assert end.value.code == 2
    said = "error: --compare-official True: only with generate, benchmark makes no videos\n"
    assert capsys.readouterr() == ("", said)
    assert not list(tmp_path.iterdir())


def test_what_the_command_says(forked_torchrun, tmp_path):
    arguments = ["--total-steps", "2", "--num-frames", "3", "--threads", "1", "--output-dir", tmp_path / "run"]
    wait_for_end(forked_torchrun(tmp_path / "log", 1, "generate", "--compare-official", *arguments), 60)
    said = (tmp_path / "log").read_text()
    assert "ball.png, 256 × 256 pixels, resized to 64 × 64" in said
    assert "1 × 3 frames at 7 frames/s, in videos/" in said
    assert f"  {'latents':34} bit-equal to the official pipeline\n" in said
    assert f"  {'frames':34} equal to the official pipeline's\n" in said
