"""Bad input, reported in one line that names the argument, its value and what is allowed."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

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


def first_error(error: ValidationError, data: dict[str, Any]) -> ConfigError:
    """The first of pydantic's errors as one ConfigError; `data` are the arguments by name."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause
    argument = str(first["loc"][0]) if first["loc"] else "config"
    if first["type"] == "extra_forbidden":
        return ConfigError(argument, data.get(argument), "is not a parameter")
    allowed = re.sub(r"\d{16,}|0\.0{9,}\d+", lambda number: f"{float(number[0]):g}", first["msg"])
    return ConfigError(argument, data.get(argument), allowed.replace("Input should", "must"))


class Frozen(BaseModel):
    """A frozen pydantic model whose constructor reports bad input as a ConfigError."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise first_error(error, data) from None
