"""What is asked before any rank starts: can this machine, with these files, do the run?"""

import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import psutil
import pytest
import torch
from PIL import Image

from tests.patience import FairClock
from vdpp_core import ConfigError, Parallel, RunConfig
from vdpp_core.__main__ import main
from vdpp_core.config import execution
from vdpp_core.config.fields import EXAMPLE_IMAGE, MODELS
from vdpp_core.engine import preflight
from vdpp_core.models import checkpoint
from vdpp_core.predict import cores_and_disk
from vdpp_core.runs import other_runs, runfolder


def answer(config, local_ranks=1):
    """The one line with which the machine refuses."""
    with pytest.raises(ConfigError) as caught:
        preflight.check(config.for_ranks(local_ranks), local_ranks)
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.fixture
def pipeline_folder(tmp_path):
    return Path(shutil.copytree(MODELS["tiny"], tmp_path / "pipeline"))


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("command", ["simulate", "benchmark", "generate"])
def test_what_the_package_carries_can_be_run(command):
    preflight.check(RunConfig(command=command, device="cpu").for_ranks(2), local_ranks=2)


def test_nccl_on_a_cpu():
    assert answer(RunConfig(device="cpu", backend="nccl")).startswith(
        "backend nccl: needs CUDA devices; on cpu use gloo"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_cuda_without_cuda(device):
    assert answer(RunConfig(device=device)) == f"device {device}: no CUDA device here: use cpu or auto"


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="there is an Apple GPU here")
def test_mps_without_an_apple_gpu():
    assert answer(RunConfig(device="mps")) == "device mps: no Apple GPU here: use cpu or auto"


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_precision_where_the_cpu_cannot(dtype, monkeypatch):
    def conv3d(*_, **__):
        raise RuntimeError('"slow_conv3d" not implemented for this type\nmore')

    monkeypatch.setattr(torch.nn.functional, "conv3d", conv3d)
    line = answer(RunConfig(device="cpu", dtype=dtype))
    assert line.startswith(f"dtype {dtype}: must be fp32, this CPU cannot")
    assert "slow_conv3d" in line
    preflight.check(RunConfig(device="cpu", dtype="fp32").for_ranks(1), local_ranks=1)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_precision_where_the_cpu_can(dtype):
    values, weights = (torch.ones(shape, dtype=execution.DTYPES[dtype]) for shape in ((1, 1, 3, 2, 2), (1, 1, 3, 1, 1)))
    torch.nn.functional.conv3d(values, weights)  # if this machine can do that, nothing may be refused
    preflight.check(RunConfig(device="cpu", dtype=dtype).for_ranks(1), local_ranks=1)


@pytest.mark.parametrize("command", ["simulate", "benchmark", "generate"])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_frames": 1}, "min_guidance_scale 1.0: is all the guidance of a single frame, and the official pipeline"),
        ({"num_frames": 1, "min_guidance_scale": 0.5}, "min_guidance_scale 0.5: is all the guidance of a single frame"),
        ({"num_frames": 1, "min_guidance_scale": 1.003, "dtype": "bf16"}, "min_guidance_scale 1.003: is all the"),
        ({"guidance_scale": 1.003, "dtype": "bf16"}, "guidance_scale 1.003: is 1 in bfloat16, and the official"),
        ({"guidance_scale": 1.0003, "dtype": "fp16"}, "guidance_scale 1.0003: is 1 in float16"),
        ({"guidance_scale": 1 + 1e-9}, "guidance_scale 1.000000001: is 1 in float32"),
    ],
    ids=str,
)
def test_guidance_with_which_the_official_pipeline_fails(command, arguments, said):
    assert answer(RunConfig(command=command, device="cpu", **arguments)).startswith(said)


@pytest.mark.parametrize("line", ["generate --num-frames 1", "memory --num-frames 1", "plan --gpus 1 --num-frames 1"])
def test_each_command_refuses_it_in_one_line(line, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(line.split())
    said = capsys.readouterr().err
    assert said.startswith("error: --min-guidance-scale 1.0: is all the guidance of a single frame")
    assert said.endswith("must be above 1, or guidance_scale 1\n")
    assert said.count("\n") == 1


def test_a_run_of_before_that_would_be_refused_today_can_be_read(tmp_path):
    (tmp_path / "config.json").write_text('{"command": "generate", "num_frames": 1, "parallel": {}}')
    assert RunConfig.read(tmp_path).shape[2] == 1


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "~/nowhere-at-all"])
def test_a_folder_that_is_missing(name):
    assert answer(RunConfig(model_id=name)).startswith(f"model_id {name}: must be a pipeline's folder")


def test_a_file_is_no_folder():
    assert answer(RunConfig(model_id=str(EXAMPLE_IMAGE))).startswith(f"model_id {EXAMPLE_IMAGE}: must be a pipeline's")


def test_a_folder_without_a_unet(pipeline_folder):
    shutil.rmtree(pipeline_folder / "unet")
    for random_weights in (False, True):
        config = RunConfig(model_id=str(pipeline_folder), random_weights=random_weights)
        assert answer(config).startswith(f"model_id {pipeline_folder}: must be a pipeline's folder")


def test_a_folder_without_weights(pipeline_folder):
    (pipeline_folder / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    line = answer(RunConfig(model_id=str(pipeline_folder)))
    assert line == f"model_id {pipeline_folder}: must be a pipeline's folder with unet/*.safetensors"
    preflight.check(RunConfig(model_id=str(pipeline_folder), random_weights=True).for_ranks(1), local_ranks=1)


def test_a_unet_of_another_class(pipeline_folder):
    change(pipeline_folder / "unet" / "config.json", _class_name="UNet2DConditionModel")
    line = answer(RunConfig(model_id=str(pipeline_folder)))
    assert "must have a UNetSpatioTemporalConditionModel, not a UNet2DConditionModel, in unet/config.json" in line


def test_a_scheduler_that_remembers_steps(pipeline_folder):
    change(pipeline_folder / "scheduler" / "scheduler_config.json", _class_name="DPMSolverMultistepScheduler")
    line = answer(RunConfig(model_id=str(pipeline_folder)))
    assert "must have a EulerDiscreteScheduler, not a DPMSolverMultistepScheduler" in line


@pytest.mark.parametrize(
    ("command", "part", "other"),
    [
        *((command, "scheduler", "DDIMScheduler") for command in ("benchmark", "generate")),
        *((command, "scheduler", None) for command in ("benchmark", "generate")),
        *((command, "unet", "UNet3DConditionModel") for command in ("benchmark", "generate")),
        ("generate", "vae", "AutoencoderKL"),  # a benchmark without an image has no use for it
    ],
)
def test_the_official_pipeline_loads_what_its_index_names(command, part, other, pipeline_folder):
    """Whatever class the part's own settings name."""
    change(pipeline_folder / "model_index.json", **{part: [other and "diffusers", other]})
    config = RunConfig(command=command, model_id=str(pipeline_folder), device="cpu")
    assert answer(config) == (
        f"model_id {pipeline_folder}: must have a {checkpoint.PARTS[part][0]}: "
        f"model_index.json names {other or 'none'}, which the official pipeline loads"
    )


def test_that_is_what_diffusers_does(pipeline_folder):
    from diffusers import DDIMScheduler, EulerDiscreteScheduler, StableVideoDiffusionPipeline

    change(pipeline_folder / "model_index.json", scheduler=["diffusers", "DDIMScheduler"])
    assert type(StableVideoDiffusionPipeline.from_pretrained(pipeline_folder).scheduler) is DDIMScheduler
    change(pipeline_folder / "model_index.json", scheduler=["diffusers", "EulerDiscreteScheduler"])
    change(pipeline_folder / "scheduler" / "scheduler_config.json", _class_name="DDIMScheduler")
    assert type(StableVideoDiffusionPipeline.from_pretrained(pipeline_folder).scheduler) is EulerDiscreteScheduler


def test_a_unet_and_a_scheduler_alone_can_be_measured(pipeline_folder):
    (pipeline_folder / "model_index.json").unlink()
    preflight.check(RunConfig(model_id=str(pipeline_folder), device="cpu").for_ranks(1), local_ranks=1)
    assert "model_index.json" in answer(RunConfig(command="generate", model_id=str(pipeline_folder), device="cpu"))


def test_a_folder_without_a_scheduler(pipeline_folder):
    shutil.rmtree(pipeline_folder / "scheduler")
    assert "it has no scheduler/scheduler_config.json" in answer(RunConfig(model_id=str(pipeline_folder)))


@pytest.mark.parametrize("part", ["vae", "image_encoder", "feature_extractor"])
def test_a_folder_without_what_reads_the_image(part, pipeline_folder):
    shutil.rmtree(pipeline_folder / part)
    assert part in answer(RunConfig(command="generate", model_id=str(pipeline_folder)))
    preflight.check(RunConfig(command="benchmark", model_id=str(pipeline_folder)).for_ranks(1), local_ranks=1)


@pytest.mark.parametrize("name", ["unet/config.json", "scheduler/scheduler_config.json"])
def test_settings_that_are_cut_off(name, pipeline_folder):
    text = (pipeline_folder / name).read_text()
    (pipeline_folder / name).write_text(text[: len(text) // 2])
    line = answer(RunConfig(model_id=str(pipeline_folder)))
    assert line.startswith(f"model_id {pipeline_folder}: ")
    assert name in line


def ask_hub(tmp_path, *arguments, **environment):
    """The command line with an empty hub cache -> (its one line, seconds)."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    with FairClock() as clock:
        process = subprocess.run(
            [sys.executable, "-m", "vdpp_core", "benchmark", "--model", "svd", "--device", "cpu", *arguments],
            env=inherited | {"HF_HOME": str(tmp_path / "hub")} | environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert process.returncode == 2
    assert process.stderr.startswith("error: --model")
    assert process.stderr.count("\n") == 1
    return process.stderr, clock.seconds


@pytest.mark.parametrize("unreachable", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}], ids=str)
def test_a_hub_model_while_offline(unreachable, tmp_path):
    line, seconds = ask_hub(tmp_path, **unreachable)
    assert "cannot be reached" in line
    assert "hf auth login" in line
    assert "pass a folder with --model-id" in line
    assert seconds < 15


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (403, "GatedRepo", "accept its licence on the hub, then log in with `hf auth login`"),
        (401, "RepoNotFound", "no such model on the hub; if it is private, log in with `hf auth login`"),
        (404, "EntryNotFound", "must be a Stable Video Diffusion, it has no unet/config.json"),
    ],
)
def test_what_the_hub_answers(status, code, said, tmp_path):
    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        line, _ = ask_hub(tmp_path, "--model-id", "some/model", HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert line.startswith("error: --model-id some/model: ")
    assert said in line


def test_a_run_can_be_read_when_its_pipeline_is_gone(tmp_path):
    known = {"model_id": str(tmp_path / "gone"), "latent_shape": (1, 4, 9, 4, 6), "height": 32, "device": "cpu"}
    for given in ({"prompt": "a ball"}, {"call": {"eta": 0.5}}, {}):
        config = RunConfig(**known, **given)
        assert not config.is_svd
        assert config.size_text == "1 × 4 × 9 × 4 × 6"
    with pytest.raises(ConfigError, match="must be the folder or hub name of a diffusers pipeline"):
        preflight.complete(RunConfig(model_id=known["model_id"], prompt="a ball", device="cpu"), 1)


def test_random_weights_of_the_published_model_need_no_hub():
    preflight.check(RunConfig(model="svd", random_weights=True, device="cpu").for_ranks(1), local_ranks=1)


@pytest.fixture
def bad_images(tmp_path):
    (tmp_path / "text.png").write_text("not an image")
    Image.new("RGB", (64, 64), "red").save(tmp_path / "whole.jpg")
    whole = (tmp_path / "whole.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    png = EXAMPLE_IMAGE.read_bytes()
    (tmp_path / "cut.png").write_bytes(png[: len(png) // 2])
    (tmp_path / "empty.png").touch()
    return tmp_path


@pytest.mark.parametrize("name", ["missing.png", "text.png", "cut.jpg", "cut.png", "empty.png", "."])
def test_an_image_that_cannot_be_read(name, bad_images):
    path = bad_images / name
    for command in ("generate", "benchmark"):
        line = answer(RunConfig(command=command, image=path))
        missing = name == "missing.png"
        assert line.startswith(f"image {path}: {'No such file' if missing else 'must be a readable image file'}")


def test_a_run_folder_is_made_once(tmp_path):
    config = RunConfig(output_dir=tmp_path / "a" / "run").for_ranks(1)
    folder = runfolder.create(config)
    assert RunConfig.read(folder) == config
    assert sorted(path.name for path in folder.iterdir()) == [".reserve", "config.json", "events", "latents", "logs"]
    before = (folder / "config.json").read_bytes()
    with pytest.raises(ConfigError) as caught:
        runfolder.create(config.replace(total_steps=3))
    assert str(caught.value) == f"output_dir {folder}: exists already: name a new folder"
    assert (folder / "config.json").read_bytes() == before


def test_an_empty_folder_will_do(tmp_path):
    (tmp_path / "empty").mkdir()
    assert runfolder.create(RunConfig(output_dir=tmp_path / "empty")) == tmp_path / "empty"


def test_a_run_folder_below_a_file(tmp_path):
    (tmp_path / "file").write_text("precious")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match=rf"^output_dir {place}: ") as caught:
            runfolder.create(RunConfig(output_dir=place))
        assert "\n" not in str(caught.value)
    assert (tmp_path / "file").read_text() == "precious"


def test_runs_made_in_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [runfolder.create(RunConfig().for_ranks(1)) for _ in range(5)]
    assert len(set(folders)) == 5
    assert {folder.parent for folder in folders} == {tmp_path / "runs"}


def test_runs_of_the_clone_are_kept_at_its_top(monkeypatch):
    clone = Path(__file__).parents[2]
    monkeypatch.chdir(clone / "tests" / "unit")
    assert runfolder.runs_root() == clone / "runs"


def before_start(monkeypatch, cores, at_work, **arguments):
    for module in (execution, cores_and_disk):
        monkeypatch.setattr(module, "cores", lambda: cores)
    monkeypatch.setattr(other_runs, "busy_ranks", lambda: at_work)
    config = RunConfig(device="cpu", **arguments)
    return cores_and_disk.before_start(config, execution.resolve(config, config.layout.world_size))


@pytest.mark.parametrize(
    ("cores", "at_work", "arguments", "said"),
    [
        (4, 0, {"parallel": Parallel(pp=4)}, []),
        (4, 2, {"parallel": Parallel(pp=2), "threads": 1}, []),
        (2, 0, {"parallel": Parallel(pp=4)}, ["4 × 1 threads on 2 cores: ranks take turns"]),
        (4, 0, {"parallel": Parallel(pp=2), "threads": 3}, ["2 × 3 threads on 4 cores: ranks take turns"]),
        (2, 1, {"parallel": Parallel(pp=2)}, ["1 rank of another run is running on these 2 cores: this run will take"]),
        (
            2,
            3,
            {"parallel": Parallel(pp=2)},
            ["3 ranks of other runs are running on these 2 cores: this run will"],
        ),
    ],
)
def test_a_word_about_cores_that_are_not_there(monkeypatch, cores, at_work, arguments, said):
    lines = before_start(monkeypatch, cores, at_work, **arguments)
    assert [line.startswith(words) for line, words in zip(lines, said, strict=True)] == [True] * len(said)


@contextmanager
def like_a_rank(**environment):
    """A process that waits, to be taken for a rank."""
    command = [sys.executable, "-I", "-c", "input(print(flush=True))"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    try:
        child.stdout.readline()
        yield psutil.Process(child.pid)
    finally:
        child.communicate(b"\n")


def test_a_rank_does_not_count_those_of_its_own_run(monkeypatch):
    """Its siblings are there before it looks; those of a torchrun beside it have another place to meet."""
    one = {"TORCHELASTIC_RUN_ID": "one", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with like_a_rank(**one) as sibling, like_a_rank(**one | {"MASTER_PORT": "2"}) as other, like_a_rank() as alone:
        family = [sibling, other, alone]
        for process in family:
            process.info = {"cmdline": [sys.executable, "-m", "vdpp_core", "run", "folder"]}
        monkeypatch.setattr(psutil, "process_iter", lambda _: family)
        for name, value in one.items():
            monkeypatch.setenv(name, value)
        assert [process.pid for process in family if other_runs._shares_cores(process)] == [other.pid, alone.pid]
        assert other_runs.busy_ranks() == 2
        monkeypatch.delenv("MASTER_PORT")  # a process that torchrun did not start has no siblings
        assert other_runs.busy_ranks() == 3


def test_a_rank_on_other_cores_is_in_nobodys_way(monkeypatch):
    with like_a_rank() as other:
        assert other_runs._shares_cores(other)
        monkeypatch.setattr(execution, "cores_of", lambda process: {1} if process.pid == other.pid else {0})
        assert not other_runs._shares_cores(other)


@pytest.mark.parametrize(
    ("cores", "at_work", "arguments", "in_the_way"),
    [
        (4, 2, {"device": "cpu", "threads": 1}, 0),
        (4, 3, {"device": "cpu", "threads": 1}, 3),
        (8, 1, {"device": "cpu"}, 1),  # all cores are its own
        (1, 3, {"device": "cuda"}, 0),
    ],
)
def test_ranks_are_in_the_way_where_cores_do_not_suffice(monkeypatch, cores, at_work, arguments, in_the_way):
    monkeypatch.setattr(execution, "cores", lambda: cores)
    monkeypatch.setattr(other_runs, "busy_ranks", lambda: at_work)
    assert other_runs.in_the_way(execution.resolve(RunConfig(**arguments), local_ranks=2)) == in_the_way


def test_threads_are_shared_out_whatever_else_is_at_work(monkeypatch):
    monkeypatch.setattr(execution, "cores", lambda: 6)
    assert [execution.resolve(RunConfig(), ranks).threads for ranks in (1, 2, 4, 7)] == [6, 3, 1, 1]
    assert execution.resolve(RunConfig(threads=5), 4).threads == 5


def test_a_word_about_a_disk_that_is_too_small(monkeypatch, tmp_path):
    large = {"num_samples": 100_000, "latent_shape": (1, 4, 100, 1000, 1000), "parallel": Parallel()}
    place = tmp_path / "not" / "yet"
    kept = before_start(monkeypatch, 1, 0, output_dir=place, save_latents=True, **large)
    assert [line.partition(" samples take ")[2].partition(" GB")[0] for line in kept] == ["1.6e+05"]
    assert before_start(monkeypatch, 1, 0, output_dir=place, **large) == []


@pytest.mark.parametrize(
    ("command", "is_one"),
    [
        ("python -u -m vdpp_core run folder", True),
        ("python -m torch.distributed.run --nproc_per_node=2 -m vdpp_core benchmark", False),
        ("python -m vdpp_core", True),
        ("/opt/my/bin/python3.11 -m vdpp_core generate", True),
        ("timeout 60 python -m vdpp_core generate", False),
        ("/usr/bin/time -v python -m vdpp_core generate", False),
        ("python /opt/bin/torchrun --nproc_per_node=2 -m vdpp_core benchmark", False),
        ("python -m", False),
        ("", False),
    ],
)
def test_what_a_rank_looks_like_among_processes(command, is_one):
    assert other_runs._is_rank(command.split()) == is_one
