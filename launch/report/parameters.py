"""Which notebooks a report is made of, and the parameters that are set in them."""

from __future__ import annotations

import ast
import contextlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat
from papermill.parameterize import parameterize_notebook

from vdpp_core.config.errors import ConfigError

WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "text", list: "a list"}


def choose(names: Sequence[str], folder: Path) -> list[Path]:
    """The notebooks of a folder whose names begin so, or that are named by their path; all for no names. In order.

    Raises:
        ConfigError: there is none of that name, or two would get the same page.
    """
    known = sorted(folder.resolve().glob("*.ipynb"))
    found = {path for name in names for path in _named(name, known)} if names else set(known)
    chosen = sorted(found, key=lambda path: (path.stem, path))
    for one, other in itertools.pairwise(chosen):
        if one.stem == other.stem:
            raise ConfigError("notebook", other, f"must have a name of its own, not that of {one}")
    return chosen


def _named(name: str, known: Sequence[Path]) -> list[Path]:
    path = Path(name)
    if path.suffix == ".ipynb" and path.is_file():
        return [path.resolve()]
    found = [path for path in known if name and path.stem.startswith(name)]
    if not found:
        stems = ", ".join(path.stem for path in known)
        raise ConfigError("notebook", name, f"must be a path, or what one of these begins with: {stems}")
    return found


def read(path: Path) -> Any:
    """A notebook.

    Raises:
        ConfigError: the file holds none.
    """
    try:
        return nbformat.read(path, as_version=4)
    except Exception as error:  # of nbformat, jsonschema, json or the file system
        raise ConfigError("notebook", path, f"must be a Jupyter notebook ({type(error).__name__})") from None


def parse(words: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE, … -> name in capitals: value, a Python literal; what is none is text.

    Raises:
        ConfigError: a word is not of that form.
    """
    settings = {}
    for word in words:
        name, sign, text = (part.strip() for part in word.partition("="))
        if not (name.isidentifier() and sign and text):
            raise ConfigError("set", word, "must be NAME=VALUE")
        try:
            settings[name.upper()] = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            settings[name.upper()] = text
    return settings


def defaults(book: Any) -> dict[str, Any]:
    """The literals of the cell tagged `parameters`."""
    source = next((cell.source for cell in book.cells if "parameters" in cell.metadata.get("tags", [])), "")
    found = {}
    with contextlib.suppress(SyntaxError, ValueError):  # a cell that holds something else
        for node in ast.parse(source).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


def assign(settings: Mapping[str, Any], books: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Of each notebook (name -> notebook) the parameters that are set in it.

    Raises:
        ConfigError: no notebook has a parameter, or it is of another type in one that does.
    """
    known = {name: defaults(book) for name, book in books.items()}
    there = sorted({parameter for found in known.values() for parameter in found})
    for name, value in settings.items():
        if name not in there:
            raise ConfigError(
                "set", f"{name}={value}", f"no parameter of these notebooks, which have {', '.join(there)}"
            )
    fitting: dict[str, dict[str, Any]] = {name: {} for name in books}
    for notebook, found in known.items():
        for name in [name for name in settings if name in found]:
            try:
                fitting[notebook][name] = _like(found[name], settings[name])
            except TypeError as error:
                allowed = f"must be {error} in {notebook}, as is {found[name]!r}"
                raise ConfigError("set", f"{name}={settings[name]}", allowed) from None
    return fitting


def _like(default: Any, value: Any) -> Any:
    """The value, if it is of the default's type. A tuple may stand for a list, a whole number for another one.

    Raises:
        TypeError: it is not; what it must be.
    """
    if isinstance(default, list) and isinstance(value, list | tuple) and value:
        return [_like(default[0], each) if default else each for each in value]
    if type(default) is float and type(value) is int:
        return float(value)
    if type(value) is not type(default) or value == []:
        raise TypeError(WORDS.get(type(default), type(default).__name__))
    return value


def inject(book: Any, settings: Mapping[str, Any]) -> Any:
    """The notebook with a cell that sets these, after the one that they are defined in. What that cell computes of
    its parameters is not computed again."""
    if not settings:
        return book
    book.metadata.setdefault("papermill", {})  # this, and tags, are what papermill's own reader adds
    for cell in book.cells:
        cell.metadata.setdefault("tags", [])
    return parameterize_notebook(
        book, dict(settings), comment="Set for this report", kernel_name="python3", language="python"
    )
