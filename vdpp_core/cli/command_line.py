"""Command line -> RunConfig. Each flag is a field of RunConfig, spelled as in the user's documents."""

from __future__ import annotations

import argparse
import io
import math
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, get_args

from vdpp_core.config import RunConfig
from vdpp_core.config.axes import AXES, AXIS_NAMES, FSDP, MOST_RANKS
from vdpp_core.config.errors import ConfigError, in_one_line
from vdpp_core.config.layout import Parallel

COMMANDS = {
    "simulate": "the logic of a run on the dummy network, CPU and fp32",
    "benchmark": "throughput, latency and utilisation of a model",
    "generate": "videos from an image: MP4, GIF and a contact sheet",
}
MOST_SAID = 500  # characters of what the parser repeats of a command line
_NOT_FLAGS = ("command", "parallel")


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line and exits with 2."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        args = sys.argv[1:] if args is None else args
        for word in args:
            if word.startswith("--") and word.endswith("=--"):  # of which argparse makes an empty list
                fail(f"{word.removesuffix('=--')} --: must be a value")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        message = in_one_line(message)  # first: half an address would not be known as one
        fail(message if len(message) <= MOST_SAID else f"{message[:MOST_SAID]} …")


def fail(message: str) -> NoReturn:
    print(f"error: {in_one_line(message)}", file=sys.stderr)
    raise SystemExit(2)


def speak_anywhere() -> None:
    """Have letters that the terminal's encoding lacks, as ×, written as escapes rather than raise an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def warn(lines: Iterable[str]) -> None:
    for line in lines:
        print(f"warning: {line}", file=sys.stderr)


def quiet() -> None:
    """diffusers and transformers draw bars for what they read, miss torchvision, which they can do without, and warn of
    half precision on a CPU, which was asked for."""
    import diffusers.utils.logging
    import transformers.utils.logging

    diffusers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def add_run_commands(parser: argparse.ArgumentParser) -> Any:
    """Give a parser the commands simulate, benchmark and generate with all flags of a run."""
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=OneLineParser)
    for name, purpose in COMMANDS.items():
        add_run_flags(commands.add_parser(name, help=purpose, description=purpose))
    return commands


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    for name, field in RunConfig.model_fields.items():
        if name in _NOT_FLAGS:
            continue
        options: dict[str, Any] = {"default": None, "help": field.description}
        if field.annotation is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif "tuple" in str(field.annotation):
            options |= {"nargs": "+", "metavar": "N"}
        else:
            choices = [str(choice) for choice in get_args(field.annotation) if isinstance(choice, str)]
            options["metavar"] = "|".join(choices) or name.upper()
        parser.add_argument(f"--{name.replace('_', '-')}", **options)
    for axis in AXES:
        rest = "; default: ranks / the other axes" if axis.name == "pp" else ""
        parser.add_argument(f"--{axis.name}", metavar="N", help=f"{axis.splits}{rest}")
    parser.add_argument("--fsdp", action="store_true", help=FSDP.splits)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def whole_number(name: str, text: str | None, default: int, most: int = MOST_RANKS, least: int = 1) -> int:
    """What a flag says; ConfigError if that is no number of ranks or repeats."""
    if text is None:
        return default
    if not text.isdecimal() or len(text) > len(str(most)) or not least <= int(text) <= most:
        raise ConfigError(name, text, f"must be a whole number from {least} to {most}")
    return int(text)


def number(name: str) -> Callable[[str], float]:
    """The type of a flag that is a number, as argparse wants it; anything else is one line."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            fail(ConfigError(name, text, "must be a finite number").as_flag())
        return value

    return parse


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {name: value for name, value in vars(arguments).items() if name in RunConfig.model_fields}
    return {name: value for name, value in given.items() if value is not None}


def without_layout(arguments: argparse.Namespace) -> RunConfig:
    """The configuration of a parsed command line, to be completed with a layout."""
    return RunConfig(**_given(arguments))


def run_config(arguments: argparse.Namespace, ranks: int) -> RunConfig:
    """The configuration of a parsed command line on so many ranks.

    Raises:
        ConfigError: one line that names the argument, its value and what is allowed.
    """
    given = _given(arguments)
    axes = {axis: size for axis in AXIS_NAMES if (size := getattr(arguments, axis)) is not None}
    if axes or arguments.fsdp:
        layout = Parallel(**axes, fsdp=arguments.fsdp)
        rest = "dp" if arguments.fsdp else "pp"
        if rest not in axes:
            layout = Parallel(**(layout.model_dump() | {rest: max(1, ranks // layout.world_size)}))
        given["parallel"] = layout
    return RunConfig(**given).for_ranks(ranks)
