"""Videos of split runs are those of the official pipeline, byte for byte, and each rank decodes its share."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vdpp_core import RunConfig, engine, media, runfolder
from vdpp_core.decode import Decoder
from vdpp_core.videos import Official

QUICK = {"total_steps": 4, "num_frames": 5, "num_samples": 3, "threads": 1, "compare_official": True}
CASES = {
    "1 stage": (1, QUICK),
    "2 stages": (2, QUICK | {"decode_chunk_size": 2, "fps": 12}),
    "3 stages": (3, QUICK | {"decode_chunk_size": 14, "num_frames": 14}),
    "2 replicas": (2, QUICK | {"parallel": {"dp": 2}}),
    "batch of 2, 24 × 40": (2, QUICK | {"latent_shape": (2, 4, 3, 5, 3), "num_frames": None, "num_samples": 1}),
}


@pytest.fixture(scope="module")
def folders(torchrun, tmp_path_factory):
    """The run folder of each case."""
    root, made = tmp_path_factory.mktemp("generate"), {}
    for number, (name, (ranks, arguments)) in enumerate(CASES.items()):
        config = RunConfig(command="generate", output_dir=root / str(number), **arguments)
        made[name] = runfolder.create(config.for_ranks(ranks))
    for ranks in (1, 2, 3):
        process = torchrun(ranks, "run", *[made[name] for name, (needed, _) in CASES.items() if needed == ranks])
        assert process.returncode == 0, process.stderr
    return made


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", CASES)
def test_frames_are_those_of_the_official_pipeline(name, folders, one_thread):
    folder = folders[name]
    config, result = RunConfig.read(folder), runfolder.read_result(folder)
    assert result["official"] == {
        "samples": config.num_samples,
        "equal_latents": config.num_samples,
        "equal_frames": config.num_samples,
        "max_latent_difference": 0,
        "max_frame_difference": 0,
    }
    cpu, sample = torch.device("cpu"), config.num_samples - 1  # and once more, from the latents of the run
    latents, frames = Official(config, cpu, torch.float32).generate(sample)
    ours = runfolder.load_latents(folder, sample).transpose(1, 2)
    assert torch.equal(ours, latents)
    assert np.array_equal(Decoder(config, cpu, torch.float32, lambda: None).frames(ours), frames)
    assert frames.std() > 1


@pytest.mark.parametrize("name", CASES)
def test_the_files_of_a_run(name, folders):
    folder = folders[name]
    config, result = RunConfig.read(folder), runfolder.read_result(folder)
    names = [name for sample in range(config.num_samples) for name in runfolder.video_names(config, sample)]
    assert len(names) == config.num_samples * config.shape[0]
    expected = {f"{name}.{kind}" for name in names for kind in ("mp4", "gif", "png")}
    assert {path.name for path in (folder / "videos").iterdir()} == expected | {"contact-sheet.png", "input.png"}
    width, height = config.image_size
    for name in names:
        frames, fps = media.read_video(folder / "videos" / f"{name}.mp4")
        assert (frames.shape, fps) == ((config.shape[2], height, width, 3), config.fps)
    assert result["videos_written"] == len(result["decode_s"]) == config.num_samples
    assert len(result["decode_peak_memory_gb_per_rank"]) == config.layout.world_size


@pytest.mark.parametrize("name", CASES)
def test_every_rank_decodes_its_share(name, folders):
    folder = folders[name]
    config, events = RunConfig.read(folder), runfolder.read_events(folder)
    made = {event["sample"]: event["rank"] for event in events if event["kind"] == "video"}
    assert sorted(made) == list(range(config.num_samples))
    layout = config.layout
    for sample, rank in made.items():
        assert layout.coordinates(rank) == (sample % layout.dp, sample // layout.dp % layout.pp)
    last_step = max(event["t"] for event in events if event["kind"] == "step" and event["rank"] == 0)
    assert min(event["t"] for event in events if event["kind"] == "decode" and event["rank"] == 0) > last_step
    chunks = sum(event["kind"] == "chunk" for event in events)
    batch, frames = config.shape[0], config.shape[2]
    assert chunks == config.num_samples * -(-batch * frames // config.decode_chunk_size)
    for rank in range(layout.world_size):
        assert [event["kind"] for event in events if event["rank"] == rank][-1] == "done"


@pytest.mark.parametrize(("value", "words"), [(float("nan"), "are not finite"), (-5.0, "are black")])
def test_no_file_is_written_of_a_video_without_a_picture(value, words, tmp_path, monkeypatch):
    from diffusers import StableVideoDiffusionPipeline

    def spoilt(pipeline, latents, num_frames, decode_chunk_size):
        return torch.full((1, 3, num_frames, 64, 64), value)

    monkeypatch.setattr(StableVideoDiffusionPipeline, "decode_latents", spoilt)
    config = RunConfig(command="generate", total_steps=2, num_frames=3, threads=1, output_dir=tmp_path / "run")
    with pytest.raises(FloatingPointError, match=rf"^sample 0: .*{words}.*--dtype fp32"):
        engine.run(config)
    result = runfolder.read_result(tmp_path / "run")
    assert (result["outcome"], result["samples_finished"], result["videos_written"]) == ("failed", 1, 0)
    assert words in result["failure"]["cause"]
    assert result["failure"]["sample"] == 0
    assert not (tmp_path / "run" / "videos").exists()
    assert runfolder.load_latents(tmp_path / "run", 0).shape == config.shape


def test_what_the_command_says(torchrun, tmp_path):
    arguments = ["--total-steps", "2", "--num-frames", "3", "--threads", "1", "--output-dir", tmp_path / "run"]
    process = torchrun(1, "generate", "--compare-official", *arguments)
    assert process.returncode == 0, process.stderr
    assert "ball.png, 256 × 256 pixels, resized to 64 × 64" in process.stdout
    assert "1 × 3 frames, 7 a second, in videos/" in process.stdout
    assert "latents 1 of 1, frames 1 of 1; largest difference 0, 0 of 255" in process.stdout
