"""Functions and dataclasses that check their arguments against their annotations, as RunConfig does."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from pydantic import ConfigDict, ValidationError, dataclasses, validate_call
from typing_extensions import dataclass_transform

from vdpp_core.config.errors import first_error

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)
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
            raise first_error(error, given) from None

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
            raise first_error(error, given) from None

    made.__init__ = init
    return cast(Class, made)
