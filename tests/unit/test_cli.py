"""The command line: every flag, and one line where something is wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

import launch.__main__
from vdpp_core import ConfigError, Parallel, RunConfig
from vdpp_core.__main__ import main
from vdpp_core.cli import arguments
from vdpp_core.cli import main as cli
from vdpp_core.config.fields import EXAMPLE_IMAGE
from vdpp_core.engine import worker
from vdpp_core.runs import runfolder
from vdpp_core.runs.run import Run


def parse(line, ranks=1):
    return arguments.run_config(cli.parse(line.split()).flags, ranks, "world_size")


def test_defaults_of_each_command():
    for command in ("simulate", "benchmark", "generate"):
        assert parse(command) == RunConfig(command=command).for_ranks(1)


def test_the_flags_of_the_documents():
    config = parse(
        "benchmark --total-steps 28 --latent-shape 1 4 14 40 72 --num-samples 14 --warmup-samples 7"
        " --guidance-scale 2.5 --model svd --model-id some/model --fps 8 --motion-bucket-id 100 --seed 42"
        " --dtype fp16 --device cuda --backend nccl --enable-memory-opt"
    )
    assert config == RunConfig(
        command="benchmark",
        total_steps=28,
        latent_shape=(1, 4, 14, 40, 72),
        num_samples=14,
        warmup_samples=7,
        guidance_scale=2.5,
        model="svd",
        model_id="some/model",
        fps=8,
        motion_bucket_id=100,
        seed=42,
        dtype="fp16",
        device="cuda",
        backend="nccl",
        enable_memory_opt=True,
        parallel=Parallel(),
    )


def test_our_own_flags():
    config = parse(
        "generate --compare-official --decode-chunk-size 2"
        " --num-frames 5 --height 72 --width 128 --min-guidance-scale 1.5 --noise-aug-strength 0.1 --threads 2"
        f" --timeout-s 9 --image {EXAMPLE_IMAGE} --output-dir /tmp/somewhere --no-save-latents"
    )
    assert config.shape == (1, 4, 5, 9, 16)
    assert (config.min_guidance_scale, config.noise_aug_strength, config.threads) == (1.5, 0.1, 2)
    assert (config.timeout_s, config.image, config.output_dir) == (9.0, EXAMPLE_IMAGE, Path("/tmp/somewhere"))
    assert config.save_latents is False
    assert (config.compare_official, config.decode_chunk_size) == (True, 2)
    assert (parse("generate").compare_official, parse("generate").decode_chunk_size) == (False, 4)
    assert parse("generate").save_latents is True


@pytest.mark.parametrize(
    ("flags", "ranks", "layout"),
    [
        ("", 1, Parallel()),
        ("", 4, Parallel(pp=4)),
        ("--dp 4", 4, Parallel(dp=4)),
        ("--dp 2", 4, Parallel(dp=2, pp=2)),
        ("--pp 4", 4, Parallel(pp=4)),
        ("--dp 2 --pp 3", 6, Parallel(dp=2, pp=3)),
        ("--frames 2", 2, Parallel(frames=2)),
        ("--frames 2", 4, Parallel(pp=2, frames=2)),
        ("--cfg 2 --frames 2 --dp 2", 8, Parallel(dp=2, cfg=2, frames=2)),
        ("--frames 2 --fsdp", 4, Parallel(dp=2, frames=2, fsdp=True)),
        ("--cfg 2 --pp 2 --fsdp", 4, Parallel(pp=2, cfg=2, fsdp=True)),
    ],
)
def test_layouts(flags, ranks, layout):
    assert parse(f"benchmark {flags}", ranks).parallel == layout


def test_weights():
    assert [len(steps) for steps in parse("benchmark --stage-weights 3 1", 2).stages()] == [21, 7]


@pytest.mark.parametrize(
    ("line", "ranks", "said"),
    [
        ("benchmark --total-steps 0", 1, "--total-steps 0: must be greater than or equal to 1"),
        ("benchmark --total-steps many", 1, "--total-steps many: must be a valid integer"),
        ("benchmark --total-steps 3", 4, "--world-size 4: must be at most total_steps, 3"),
        ("benchmark --dp 3", 4, "--dp 3: dp × pp × cfg × frames × tp = 3 × 1 × 1 × 1 × 1 must be the ranks, 4"),
        ("benchmark --pp 3", 4, "--pp 3: dp × pp × cfg × frames × tp = 1 × 3 × 1 × 1 × 1 must be the ranks, 4"),
        ("benchmark --frames 3", 4, "--frames 3: dp × pp × cfg × frames × tp = 1 × 1 × 1 × 3 × 1 must be the ranks, 4"),
        ("benchmark --frames 2 --num-frames 1", 2, "--frames 2: must be at most num_frames, 1"),
        ("benchmark --cfg 3", 3, "--cfg 3: must be less than or equal to 2"),
        ("benchmark --cfg 2 --guidance-scale 1", 2, "--cfg 2: buys nothing without guidance"),
        ("benchmark --frames two", 2, "--frames two: must be a valid integer"),
        ("simulate --frames 2", 2, "--frames 2: not with model dummy: only a spatio-temporal UNet splits by frames"),
        ("simulate --shortcuts", 1, "--shortcuts True: not with model dummy"),
        ("benchmark --dp 0", 1, "--dp 0: must be greater than or equal to 1"),
        ("benchmark --dp two", 1, "--dp two: must be a valid integer"),
        ("benchmark --pp x", 1, "--pp x: must be a valid integer"),
        ("benchmark --latent-shape 1 4 14 8", 1, "--latent-shape 1 4 14 8: must be five whole numbers B C F H W"),
        ("benchmark --latent-shape 1 4 14 8 x", 1, "--latent-shape 1 4 14 8 x: must be five whole numbers"),
        ("benchmark --latent-shape 1 4 5 8 8 --height 64", 1, "--latent-shape 1 4 5 8 8: give it or num_frames"),
        ("benchmark --height 100", 1, "--height 100: must be a multiple of 8"),
        ("benchmark --num-samples 0", 1, "--num-samples 0: must be greater"),
        ("benchmark --warmup-samples=-1", 1, "--warmup-samples -1: must be greater"),
        ("benchmark --model sdxl", 1, "--model sdxl: must be 'dummy', 'tiny', 'experts', 'medium', 'svd' or 'wan22'"),
        ("benchmark --guidance-scale nan", 1, "--guidance-scale nan: must be a finite number"),
        ("benchmark --motion-bucket-id 256", 1, "--motion-bucket-id 256: must be less than or equal to 255"),
        ("benchmark --stage-ranks 1 3", 3, "--stage-ranks 1 3: pp 1+3 needs 4 ranks, not 3"),
        ("benchmark --stage-ranks 1 3 --pp 3", 4, "--stage-ranks 1 3: must be 3 whole numbers"),
        ("benchmark --stage-weights 1 2 3", 2, "--stage-weights 1.0 2.0 3.0: must be 2 positive numbers"),
        ("benchmark --compare-official", 1, "--compare-official True: only with generate, benchmark makes no videos"),
        ("generate --decode-chunk-size 0", 1, "--decode-chunk-size 0: must be greater than or equal to 1"),
        ("generate --fps 0", 1, "--fps 0: must be greater than or equal to 1"),
        ("generate --model dummy", 1, "--model dummy: has no image encoders"),
        ("generate --random-weights", 1, "--model tiny: has no image encoders"),
    ],
)
def test_what_cannot_be_is_said_with_flag_and_value(line, ranks, said):
    with pytest.raises(ConfigError) as caught:
        parse(line, ranks)
    assert caught.value.as_flag().startswith(said)
    assert "\n" not in caught.value.as_flag()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "memory, plan, sizing, peers, run, training}; see python -m vdpp_core --help"),
        ("dream", "dream: Expected one of"),
        ("benchmark --steps 3", "--steps 3"),
        ("benchmark --total 3", "--total 3"),  # no abbreviations
        ("benchmark --total-steps", "'--total-steps'. Expected 1 values; see python -m vdpp_core benchmark --help"),
        ("benchmark extra", "extra"),
    ],
)
def test_what_the_parser_does_not_know(line, said, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(line)
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert said in printed.err
    assert printed.out == ""


def assert_one_line(said, stdout, stderr, folder):
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1
    assert said in stderr
    assert stdout == ""
    assert [path.name for path in folder.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("benchmark --steps 3", "--steps 3"),  # by the parser
        ("simulate --world-size 5 --total-steps 4", "--world-size 5: must be at most"),  # by the configuration
        ("generate --image nowhere.png", "--image nowhere.png: No such file"),  # by the machine
    ],
)
def test_a_mistake_costs_one_line_and_leaves_nothing(line, said, tmp_path):
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", "vdpp_core", *line.split()]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert process.returncode == 2
    assert_one_line(said, process.stdout, process.stderr, tmp_path)


def run_prepared(folder, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["run", str(folder)])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert str(folder) in said or "ranks" in said


def test_a_run_folder_for_other_ranks_is_left_as_it_is(tmp_path, capsys):
    folder = runfolder.create(RunConfig(command="simulate", output_dir=tmp_path / "run").for_ranks(2))
    run_prepared(folder, capsys)
    assert Run(folder).result() is None
    assert Run(folder).events() == []


def test_a_run_folder_is_run_once(tmp_path, capsys):
    """Events of two runs in one log would be read as one run."""
    folder = worker.run(RunConfig(command="simulate", total_steps=2, output_dir=tmp_path / "run"))
    capsys.readouterr()  # of the run itself
    before = {path: path.read_bytes() for path in folder.rglob("*.json*")}
    assert folder / "result.json" in before
    run_prepared(folder, capsys)
    assert {path: path.read_bytes() for path in folder.rglob("*.json*")} == before


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("benchmark --total-steps 0", "--total-steps 0: must be greater than or equal to 1"),
        ("benchmark --latent-shape 1 4 14 8", "--latent-shape 1 4 14 8: "),
        ("simulate --world-size 0", "--world-size 0: "),
        ("simulate --world-size two", "--world-size two: "),
        ("simulate --world-size -2", "-2"),
        ("simulate --world-size 4 --dp 3", "dp × pp × cfg × frames × tp = 3 × 1 × 1 × 1 × 1 must be the ranks, 4"),
        ("benchmark --model-id ./nowhere", "--model-id ./nowhere: "),
        ("benchmark --device cpu --backend nccl", "--backend nccl: "),
        ("benchmark --output-dir file/run", "--output-dir "),
        ("run", "FOLDER"),
        ("run nowhere", "FOLDER nowhere: must be a run folder"),
        ("benchmark --frames 2", "--frames 2: needs 2 ranks: add --world-size 2"),
        ("generate --image=", "--image '': must be a path"),
    ],
)
def test_a_mistake_in_this_process(line, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    assert caught.value.code == 2
    assert_one_line(said, *capsys.readouterr(), tmp_path)


def test_both_spellings_of_a_flag():
    assert parse("benchmark --total_steps 3 --no_save_latents") == parse("benchmark --total-steps 3 --no-save-latents")


def test_help_needs_no_diffusers():
    script = """
import sys
from vdpp_core.__main__ import main
for line in (["--help"], ["benchmark", "--help"], ["plan", "--help"]):
    sys.argv[1:] = line
    try:
        main()
    except SystemExit as end:
        assert not end.code
    assert "diffusers" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("usage: python -m vdpp_core") == 3


@pytest.mark.parametrize(
    ("run", "line", "meant"),
    [
        (main, "generate --frame 2", "did you mean --frames? "),
        (main, "memory --capacity=5", "did you mean --capacity-gib? "),
        (launch.__main__.main, "start --nproc 2 benchmark --frame 2", "did you mean --frames? "),
        (main, "benchmark --steps 3", "did you mean --total-steps? "),
        (main, "benchmark --zzz", ""),
    ],
)
def test_the_flag_that_was_meant(run, line, meant, capsys):
    with pytest.raises(SystemExit):
        run(line.split())
    assert f": not known here; {meant}see python -m " in capsys.readouterr().err
