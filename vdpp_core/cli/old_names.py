"""Commands, flags and scripts of the documents -> the present command, complete enough to paste.

docs/benchmark.md, "Old names", has them as a table, with what they mean now.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import NoReturn

from vdpp_core.cli import arguments

MODES = {  # module or subcommand of the documents -> the command, with what was the default there
    "simulator": ("simulate",),
    "production": ("benchmark", "--model", "svd", "--warmup-samples", "0", "--guidance-scale", "1"),
    "benchmark": ("benchmark", "--guidance-mode", "sequential"),
}
PACKAGE = "src.modes."
PIXELS = 8  # of a latent's row or column
FLAGS = {"--latent-frames": "--num-frames", "--latent-height": "--height", "--latent-width": "--width"}
SLICING = "--attention-slicing"
_SWEEP: tuple[str, ...] = ("python", "-m", "launch", "sweep", "--ranks", "1,2,4,7", "--layouts")
_COUNTS: tuple[str, ...] = (
    *_SWEEP,
    "pp",
    "benchmark",
    "--model",
    "svd",
    "--total-steps",
    "28",
    "--num-samples",
    "10",
    "--seed",
    "42",
)
_COUNTS += ("--latent-shape", "1", "4", "14", "64", "64", "--warmup-samples", "0", "--guidance-scale", "1")
_COMPARED: tuple[str, ...] = (
    "--total-steps",
    "28",
    "--num-samples",
    "14",
    "--warmup-samples",
    "7",
    "--guidance-scale",
    "1",
)
_COMPARED += ("--latent-shape", "1", "4", "14", "40", "72")
_GENERATE = ("python", "-m", "vdpp_core", "generate", "--model", "svd")
SCRIPTS = {  # file name -> the command that does its work
    "benchmark.sh": _COUNTS,
    "benchmark_results.csv": _COUNTS,
    "benchmark_comparison.sh": (*_SWEEP, "pp,dp", "benchmark", "--model", "dummy", "--dtype", "fp32", *_COMPARED),
    "generate_video_demo.py": (*_GENERATE, "--num-samples", "4"),
    "generate_video_use_pipe.py": _GENERATE,
    "run_official_pipeline.py": (*_GENERATE, "--compare-official"),
}


def answer(words: Sequence[str], started_as: Sequence[str] = ("python", "-m", "vdpp_core")) -> None:
    """Print the present command and exit with 2 where the words have a name of the documents; else do nothing."""
    found = present(words, started_as, os.environ)
    if found is None:
        return
    name, command = found
    if os.environ.get("LOCAL_RANK", "0") == "0":
        arguments.fail(f"{name} is a name of the documents; now: {command}")
    raise SystemExit(2)


def module(name: str, words: Sequence[str]) -> NoReturn:
    """Answer `python -m src.modes.NAME WORDS…`."""
    answer([PACKAGE + name, *words])
    raise AssertionError("every module is a mode")


def present(words: Sequence[str], started_as: Sequence[str], environment: Mapping[str, str]) -> tuple[str, str] | None:
    """The old name among the words and the command to type instead; None where there is no old name.

    Args:
        started_as: how the present program was called, without the words.
        environment: says how many ranks torchrun has, and the MODEL of a script.
    """
    first = words[0] if words else ""
    if (script := PurePath(first).name) in SCRIPTS:
        command = [*SCRIPTS[script], *words[1:]]
        if "dummy" in command and environment.get("MODEL") == "svd":
            command = ["svd" if word == "dummy" else "fp16" if word == "fp32" else word for word in command]
        return first, shlex.join(_replaced(command))
    mode = first.removeprefix(PACKAGE)
    if mode in MODES and first != "benchmark":
        return first, shlex.join([*_called(started_as, environment), *_of_mode(mode, words[1:])])
    given = [word.partition("=")[0] for word in words]
    old = next((word for word in given if word in FLAGS or word == SLICING), None)
    return None if old is None else (old, shlex.join([*_called(started_as, environment), *_replaced(words)]))


def _called(started_as: Sequence[str], environment: Mapping[str, str]) -> Sequence[str]:
    if "RANK" not in environment or "LOCAL_WORLD_SIZE" not in environment:
        return started_as
    return ["torchrun", f"--nproc_per_node={environment['LOCAL_WORLD_SIZE']}", "-m", "vdpp_core"]


def _of_mode(mode: str, words: Sequence[str]) -> list[str]:
    """The words after a mode of the documents, where --fps was what the model is conditioned on, and all ranks of FSDP
    computed the same sample."""
    made = [*MODES[mode], *_replaced(words, fps=1)]
    if "--fsdp" in words:
        made.append("--fsdp-same-sample")
    return made


def _replaced(words: Sequence[str], fps: int = 0) -> list[str]:
    """The words with present flags, sizes in pixels, and `fps` added to --fps."""
    made: list[str] = []
    split = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for flag, word in zip(["", *split], split, strict=False):
        if flag in ("--latent-height", "--latent-width") and word.isdecimal():
            made.append(str(PIXELS * int(word)))
        elif flag == "--fps" and word.isdecimal():
            made.append(str(fps + int(word)))
        elif word == SLICING:
            made += ["--enable-memory-opt"] * ("--enable-memory-opt" not in words)
        else:
            made.append(FLAGS.get(word, word))
    return made
