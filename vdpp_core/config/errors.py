"""Bad input, reported in one line that names the argument, its value and what is allowed."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast, dataclass_transform

from pydantic import BaseModel, ConfigDict, ValidationError, dataclasses, validate_call

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)

MOST_SHOWN = 200  # characters of a value
_SECRETS = [  # pattern, and what is kept of a match
    (re.compile(r"hf_\w{16,}"), ""),  # a Hugging Face token
    # user and password of a URL, of whose two slashes a Path has lost one
    (re.compile(r"(?<=//)[^/\s]*(?=@)|(?<=:/)[^/\s]+(?=@)"), ""),
    (re.compile(r"(?i)([?&][\w.-]*(?:token|secret|signature|sig|credential|password|key)=)[^&\s'\"]+"), r"\1"),
    (re.compile(r"(?i)(\b(?:bearer|basic) )[\w.~+/-]{8,}=*"), r"\1"),
]


class ConfigError(ValueError):
    """One argument that cannot be used: its name, its value and what is allowed."""

    def __init__(self, argument: str, value: Any, allowed: str) -> None:
        self.argument, self.value, self.allowed = argument, value, redacted(allowed)
        super().__init__(f"{_shown(argument)} {_shown(value)}: {self.allowed}")

    def as_flag(self) -> str:
        """The same line, the argument spelled as on the command line."""
        return f"--{_shown(self.argument).replace('_', '-')} {_shown(self.value)}: {self.allowed}"


def _shown(value: Any) -> str:
    try:
        text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    except ValueError:  # an integer with more digits than Python converts
        text = "with a number of thousands of digits"
    return in_one_line(text)[:MOST_SHOWN] or "''"


def redacted(text: str) -> str:
    """Remove tokens and passwords from a text. Everything printed, written to a file or shown goes through here."""
    for secret, kept in _SECRETS:
        text = secret.sub(f"{kept}…", text)
    return text


def in_one_line(text: str) -> str:
    """Make a text safe to print anywhere: on one line, without control characters and secrets."""
    plain = redacted(" ".join(text.split()))
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in plain)


def _first_error(error: ValidationError, data: dict[str, Any]) -> ConfigError:
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause
    argument = str(first["loc"][0]) if first["loc"] else "config"
    if first["type"] == "extra_forbidden":
        return ConfigError(argument, data.get(argument), "is not a parameter")
    allowed = re.sub(r"\d{16,}|0\.0{9,}\d+", lambda number: f"{float(number[0]):g}", first["msg"])
    return ConfigError(argument, data.get(argument), allowed.replace("Input should", "must"))


_STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)


def checked(function: Function) -> Function:
    """Check a function's arguments against their annotations, strictly; a wrong one raises ConfigError."""
    validated, signature = validate_call(config={**_STRICT, "defer_build": True})(function), inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        try:
            return validated(**given)
        except ValidationError as error:
            raise _first_error(error, given) from None

    return cast(Function, call)


@dataclass_transform(frozen_default=True)
def checked_dataclass(plain: Class) -> Class:
    """Make a frozen dataclass that checks its fields against their annotations, as `checked` does for a function."""
    made: Any = dataclasses.dataclass(frozen=True, config=_STRICT)(plain)
    validated, signature = made.__init__, inspect.signature(made)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        try:
            validated(self, **given)
        except ValidationError as error:
            raise _first_error(error, given) from None

    made.__init__ = init
    return cast(Class, made)


class Frozen(BaseModel):
    """A frozen pydantic model whose constructor reports bad input as a ConfigError."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise _first_error(error, data) from None
