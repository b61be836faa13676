"""Command lines: flags from the fields of RunConfig and Parallel, and one line for whatever is wrong.

Values stay text here. RunConfig checks them, so that a flag and a keyword argument give the same message.
"""

import contextlib
import gc
import io
import math
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypedDict, Union, cast, get_args

import tyro
from pydantic.fields import FieldInfo

from vdpp_core.config import RunConfig
from vdpp_core.config.axes import AXIS_NAMES, MOST_RANKS
from vdpp_core.config.errors import ConfigError, in_one_line
from vdpp_core.config.layout import Parallel
from vdpp_core.config.run_config import COMMAND_DEFAULTS

COMMANDS = {
    "simulate": "Check the logic of a run with the dummy network, on the CPU in fp32.",
    "benchmark": "Measure throughput, latency and utilisation of a model.",
    "generate": "Make videos from images or prompts: MP4, GIF and a contact sheet.",
}
MOST_SHOWN = 500  # characters of a message about a command line
USUALLY = gc.get_threshold()
INTERRUPTED = 130  # exit code after Ctrl-C, as of a shell
_NOT_FLAGS = ("command", "parallel", "rows", "experts")
_AS_TYPED = {  # arguments that are not flags
    "folder": "FOLDER",
    "run": "RUN",
    "run_id": "RUN",
    "notebook": "NOTEBOOK",
    "torchrun": "torchrun's ranks",
}


def shown(metavar: str | None, purpose: str | None = None, default: str | None = None) -> Any:
    """How a flag looks in the help; without a purpose, that is the comment beside the flag's definition."""
    known = f"(default: {default})" if default else "" if purpose else _default
    return tyro.conf.arg(metavar=metavar, help=purpose, help_behavior_hint=known)


def _default(value: str) -> str:
    return "" if value in ("None", "False") else f"(default: {value})"


N, X, RUN = shown("N"), shown("X"), shown("RUN")
Switch = Annotated[tyro.conf.FlagCreatePairsOff[bool], shown(None)]  # --flag without --no-flag
_REST = {
    "pp": "; default: what the other axes leave",
    "dp": "; with --fsdp or --swap the default is what the others leave",
}


def _flag(name: str, field: FieldInfo) -> Any:
    default = [] if field.default in (None, False) else [str(field.default)]
    default += [f"{values[name]} for {command}" for command, values in COMMAND_DEFAULTS.items() if name in values]
    parts = (field.annotation, *get_args(field.annotation))
    metavars = [metavar for kind, metavar in ((int, "N"), (float, "X"), (Path, "PATH")) if kind in parts]
    metavar: str | None = "|".join(metavars or [part for part in parts if isinstance(part, str)]) or name.upper()
    kind: Any = str
    if bool in parts:
        kind, metavar = bool, None
    elif "tuple" in str(field.annotation):
        kind, metavar = tuple[str, ...], "NAME=VALUE [...]" if name == "call" else "N [N ...]"
    return Annotated[kind, shown(metavar, field.description or name, ", ".join(default))]


if TYPE_CHECKING:
    RunFlags = dict[str, Any]
else:  # holds only the flags that were given
    RunFlags = TypedDict(
        "RunFlags",
        {name: _flag(name, field) for name, field in RunConfig.model_fields.items() if name not in _NOT_FLAGS}
        | {
            axis: Annotated[str, shown("N", f"{Parallel.model_fields[axis].description}{_REST.get(axis, '')}")]
            for axis in AXIS_NAMES
        }
        | {name: _flag(name, Parallel.model_fields[name]) for name in ("fsdp", "stage_ranks")}
        | {"json": Annotated[bool, shown(None, "print the result as JSON")]},
        total=False,
    )


@dataclass(frozen=True)
class RunCommand:
    """simulate, benchmark or generate with the flags of a run."""

    command: str
    run: RunFlags

    @property
    def flags(self) -> dict[str, Any]:
        """The given flags, `command` among them."""
        return {**self.run, "command": self.command}

    @property
    def as_json(self) -> bool:
        return bool(self.run.get("json"))


def run_commands(made: type[RunCommand]) -> list[Any]:
    """The subcommands simulate, benchmark and generate, each of which makes an object of that class."""
    return [
        Annotated[Any, tyro.conf.subcommand(name, constructor=partial(made, name), description=purpose)]
        for name, purpose in COMMANDS.items()
    ]


def parse(commands: Sequence[Any], argv: Sequence[str], prog: str, purpose: str) -> Any:
    """The object of the command that was named. Exits with 0 after --help, with 2 and one line after bad input."""
    settings = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes, tyro.conf.DisallowNone)
    boxed, either = io.StringIO(), cast(Any, Union[tuple(commands)])  # noqa: UP007 (not known before)
    try:
        with contextlib.redirect_stderr(boxed):
            command, unknown = tyro.cli(
                either, prog=prog, description=purpose, args=argv, return_unknown_args=True, config=settings
            )
    except SystemExit as end:
        if not end.code:
            raise
        fail(f"{_shortened(argv)}: {_without_box(boxed.getvalue())}")
    if unknown:
        command_name = "" if argv[0].startswith("-") else f" {in_one_line(argv[0])}"
        fail(f"{_shortened(unknown)}: not known here; see {prog}{command_name} --help")
    return command


def _shortened(words: Sequence[str]) -> str:
    line = in_one_line(" ".join(words)) or "''"  # first: half an address would not be known as one
    return line if len(line) <= MOST_SHOWN else f"{line[:MOST_SHOWN]} …"


def _without_box(text: str) -> str:
    """The sentences in a box of tyro's, which repeat nothing that was typed."""
    lines = (line.strip("│| ") for line in text.splitlines()[1:-1])  # in ASCII where stdout has no more
    sentences = " ".join(re.sub("^[─-]+$", ";", line) for line in lines).lstrip("; ")
    sentences = re.sub(r"Missing from .*?: ", "missing ", sentences)
    sentences = re.sub(r"[;\s]*Unrecognized options: .*?(?=[.;\s]*For full helptext|$)", "", sentences)
    return re.sub(r"[.;\s]*For full helptext, run:?", "; see", sentences)


def fail(message: str) -> NoReturn:
    """Print one line and exit with 2."""
    print(f"error: {in_one_line(message)}", file=sys.stderr)
    raise SystemExit(2)


def refuse(error: ConfigError) -> NoReturn:
    """Print what is wrong, the argument spelled as it is typed, and exit with 2."""
    typed = _AS_TYPED.get(error.argument)
    fail(error.as_flag() if typed is None else str(error).replace(error.argument, typed, 1))


def warn(lines: Iterable[str]) -> None:
    """Print warnings to stderr."""
    for line in lines:
        print(f"warning: {line}", file=sys.stderr)


def begin() -> None:
    """Prepare a process: characters that the terminal's encoding lacks, such as ×, are printed as escapes, and imports
    are a quarter faster, as they are not searched for garbage."""
    gc.set_threshold(50_000, *USUALLY[1:])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def readers_may_leave() -> Iterator[None]:
    """End without a word, with 141 as a shell counts it, where whoever reads stdout has enough, as `head` has."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
        raise SystemExit(128 + signal.SIGPIPE) from None


def imported() -> None:
    """What was imported is never garbage; from now on, garbage is collected as usual."""
    gc.freeze()
    gc.set_threshold(*USUALLY)


def quiet() -> None:
    """Silence diffusers and transformers: progress bars, and warnings about torchvision and half precision on a CPU."""
    import diffusers.utils.logging
    import transformers.utils.logging

    diffusers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def whole_number(name: str, text: str, most: int = MOST_RANKS, least: int = 1) -> int:
    """The value of a flag that counts something.

    Raises:
        ConfigError: it is no whole number in that range.
    """
    if not text.isdecimal() or len(text) > len(str(most)) or not least <= int(text) <= most:
        raise ConfigError(name, text, f"must be a whole number from {least} to {most}")
    return int(text)


def number(name: str, text: str | None) -> float | None:
    """The value of a flag that measures something, None where it was not given.

    Raises:
        ConfigError: it is no finite number.
    """
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(name, text, "must be a finite number")
    return value


def without_layout(flags: dict[str, Any]) -> RunConfig:
    """The configuration of these flags, to be completed with a layout.

    Raises:
        ConfigError: one of them cannot be used.
    """
    for name in ("image", "manifest", "output_dir"):
        if flags.get(name) == "":
            raise ConfigError(name, "", "must be a path")
    return RunConfig(**{name: value for name, value in flags.items() if name in RunConfig.model_fields})


def run_config(flags: dict[str, Any], ranks: int, counted_by: str, counted: bool = True) -> RunConfig:
    """The configuration of these flags on a number of ranks.

    Args:
        flags: by name, only those that were given.
        counted_by: the argument that sets the number of ranks; `counted`: whether it was given.

    Raises:
        ConfigError: one of them cannot be used; only arguments that were given are named.
    """
    counting = (*AXIS_NAMES, "stage_ranks")
    given = {name: flags[name] for name in counting if name in flags}
    layout = None
    try:
        if given or flags.get("fsdp") or "swap" in flags:
            layout = Parallel(**given, fsdp=flags.get("fsdp", False))
            rest = "dp" if layout.fsdp or {"stage_ranks", "swap"} & flags.keys() else "pp"
            if rest not in given:
                layout = Parallel(**(layout.model_dump() | {rest: max(1, ranks // layout.world_size)}))
        return without_layout(flags).replace(parallel=layout).for_ranks(ranks)
    except ConfigError as error:
        if error.argument not in counting:
            raise
        if error.argument not in given:
            stages = " (every rank is a pipeline stage unless flags say otherwise)" if error.argument == "pp" else ""
            raise ConfigError(counted_by, ranks, error.allowed + stages) from None
        if layout is not None and layout.world_size != ranks and not counted:
            more = f"add --{counted_by.replace('_', '-')} {layout.world_size}"
            raise ConfigError(error.argument, error.value, f"needs {layout.world_size} ranks: {more}") from None
        raise
