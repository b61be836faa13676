"""Names of the documents answer with present commands, which parse, and which docs/benchmark.md repeats."""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

import launch.__main__
from launch import commands
from vdpp_core.__main__ import main
from vdpp_core.cli import arguments, old_names
from vdpp_core.cli import main as cli

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "benchmark.md").read_text().partition("## Old names")[2]
PYTHON = ("python", "-m", "vdpp_core")
SEVEN = {"RANK": "3", "LOCAL_WORLD_SIZE": "7"}
COMPARISON = "scripts/benchmark_comparison.sh"
NO_WARM_UP = "benchmark --model svd --warmup-samples 0 --guidance-scale 1"
SIZE, PIXELS = "--latent-frames 14 --latent-height 72 --latent-width 128", "--num-frames 14 --height 576 --width 1024"
OF_RUN = "--model svd --total-steps 28 --num-samples 10 --warmup-samples 2"
OF_SIMULATOR, OF_PRODUCTION = (
    "--total-steps 28 --device cpu --dtype fp32",
    "--total-steps 28 --latent-shape 1 4 14 64 64",
)
ONE_BY_ONE = "benchmark --guidance-mode sequential"
ANSWERS = {  # what was typed, after `python -m vdpp_core` or as a module -> what to type
    f"src.modes.simulator {OF_SIMULATOR}": f"simulate {OF_SIMULATOR}",
    "simulator --world-size 4 --total-steps 28": "simulate --world-size 4 --total-steps 28",
    f"src.modes.production {OF_PRODUCTION} --num-samples 10": f"{NO_WARM_UP} {OF_PRODUCTION} --num-samples 10",
    "production --fps 6 --motion-bucket-id 9 --model-id a": f"{NO_WARM_UP} --fps 7 --motion-bucket-id 9 --model-id a",
    f"src.modes.benchmark {OF_RUN} {SIZE} --guidance-scale 3.0": f"{ONE_BY_ONE} {OF_RUN} {PIXELS} --guidance-scale 3.0",
    "src.modes.benchmark --model svd --fsdp": f"{ONE_BY_ONE} --model svd --fsdp --fsdp-same-sample",
    "benchmark --latent-frames=14 --latent-height=72": "benchmark --num-frames 14 --height 576",
    "benchmark --fps 6 --attention-slicing": "benchmark --fps 6 --enable-memory-opt",
    "benchmark --enable-memory-opt --attention-slicing": "benchmark --enable-memory-opt",
    "generate --prompt 'a red ball' --latent-width x": "generate --prompt 'a red ball' --width x",
}
MODES = sorted(old_names.MODES)


def now(typed, environment=None, started_as=PYTHON):
    found = old_names.present(shlex.split(typed), started_as, environment or {})
    return None if found is None else found[1]


@pytest.mark.parametrize("typed", ANSWERS)
def test_commands_and_flags(typed):
    assert now(typed) == f"python -m vdpp_core {ANSWERS[typed]}"
    assert now(typed, SEVEN) == f"torchrun --nproc_per_node=7 -m vdpp_core {ANSWERS[typed]}"


def parse(words):
    """Read a present command as its program does, and make the configuration of its run."""
    assert words[:2] == ["python", "-m"]
    if words[2] == "launch":
        return commands.parse(words[3:])
    command = cli.parse(words[3:])
    if isinstance(command, arguments.RunCommand):
        arguments.run_config(command.flags, int(command.world_size or 1), "world_size")
    return command


@pytest.mark.parametrize("name", old_names.SCRIPTS)
def test_scripts(name):
    command = now(f"scripts/{name}")
    parse(shlex.split(command))
    assert f"`{command}`" in TABLE
    assert name in TABLE
    assert now(f"scripts/{name} --seed 1") == f"{command} --seed 1"


def test_a_script_reads_the_model_of_its_environment():
    command = now(COMPARISON, {"MODEL": "svd"})
    assert "--model svd --dtype fp16" in command
    assert f"`MODEL=svd {COMPARISON}` | `{command}` |" in TABLE


def test_every_present_command_of_the_table_parses():
    found = [span for span in re.findall(r"`([^`]+)`", TABLE) if span.startswith("python -m ")]
    assert len(found) > 10
    for command in found:
        if command != " ".join(PYTHON):
            parse(shlex.split(command))
    assert {
        word for typed in (*MODES, *old_names.FLAGS, old_names.SLICING) for word in [typed] if word not in TABLE
    } == set()


@pytest.mark.parametrize(
    "typed", ["", "benchmark --total-steps 2", "generate --image scripts/run.png", "memory --model svd"]
)
def test_present_names_are_no_old_names(typed):
    assert now(typed) is None


def said(capsys, run, *words):
    with pytest.raises(SystemExit) as end:
        run(*words)
    out, err = capsys.readouterr()
    assert (end.value.code, out, len(err.splitlines())) == (2, "", 1)
    return err.rstrip()


@pytest.mark.parametrize("mode", MODES)
def test_the_modules_of_the_documents_answer(mode, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", "--total-steps", "28"])
    monkeypatch.syspath_prepend(ROOT / "launch" / "old_names")  # where pyproject.toml says that `src` is
    assert 'where = [".", "launch/old_names"]' in (ROOT / "pyproject.toml").read_text()
    words = said(capsys, lambda: runpy.run_module(f"src.modes.{mode}", run_name="__main__"))
    assert words.startswith(f"error: src.modes.{mode} is a name of the documents; now: python -m vdpp_core ")
    assert words.endswith(" --total-steps 28")


def test_both_programs_answer_and_of_several_ranks_the_first(monkeypatch, capsys):
    words = said(capsys, main, ["production", "--total-steps", "2"])
    assert words.endswith(
        "now: python -m vdpp_core benchmark --model svd --warmup-samples 0 --guidance-scale 1 --total-steps 2"
    )
    words = said(capsys, launch.__main__.main, ["start", "--nproc", "2", "benchmark", "--latent-frames", "4"])
    assert words.endswith("now: python -m launch start --nproc 2 benchmark --num-frames 4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as end:
        main(["simulator"])
    assert (end.value.code, capsys.readouterr().err) == (2, "")
