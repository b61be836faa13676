"""Choose the notebooks of a report and set their parameters."""

from __future__ import annotations

import ast
import contextlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

from vdpp_core.config.errors import ConfigError

WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "text", list: "a list"}


def choose(names: Sequence[str], folder: Path) -> list[Path]:
    """The notebooks of a folder whose names begin with one of `names`, and those given as paths, sorted by name.

    Without names: all notebooks of the folder.

    Raises:
        ConfigError: no notebook has that name, or two would share a page.
    """
    known = sorted(folder.resolve().glob("*.ipynb"))
    found = {path for name in names for path in _named(name, known)} if names else set(known)
    chosen = sorted(found, key=lambda path: (path.stem, path))
    for one, other in itertools.pairwise(chosen):
        if one.stem == other.stem:
            raise ConfigError("notebook", other, f"must not have the same file name as {one}")
    return chosen


def _named(name: str, known: Sequence[Path]) -> list[Path]:
    path = Path(name)
    if path.suffix == ".ipynb" and path.is_file():
        return [path.resolve()]
    found = [path for path in known if name and path.stem.startswith(name)]
    if not found:
        stems = ", ".join(path.stem for path in known)
        raise ConfigError("notebook", name, f"must be a path or the beginning of one of these names: {stems}")
    return found


def read(path: Path) -> Any:
    """Read a notebook, prepared for `inject`.

    Raises:
        ConfigError: the file holds no notebook.
    """
    try:
        return load_notebook_node(str(path))
    except Exception as error:  # from papermill, nbformat, jsonschema, json or the file system
        raise ConfigError("notebook", path, f"must be a Jupyter notebook ({type(error).__name__})") from None


def parse(words: Sequence[str]) -> dict[str, Any]:
    """Parse NAME=VALUE words into a dictionary: the name in capitals, the value a Python literal or else text.

    Raises:
        ConfigError: a word has another form.
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
    """The parameters of a notebook: the literals that the cell tagged `parameters` assigns.

    papermill's own inspection returns source text, not values, and skips each line with a second "=", in a comment
    for instance.
    """
    source = next((cell.source for cell in book.cells if "parameters" in cell.metadata.get("tags", [])), "")
    found = {}
    with contextlib.suppress(SyntaxError, ValueError):  # the cell holds something else
        for node in ast.parse(source).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


def assign(settings: Mapping[str, Any], books: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For each notebook (name -> notebook), the settings whose parameter it has.

    Raises:
        ConfigError: no notebook has a parameter of that name, or its default is of another type.
    """
    known = {name: defaults(book) for name, book in books.items()}
    existing = sorted({parameter for found in known.values() for parameter in found})
    for name, value in settings.items():
        if name not in existing:
            raise ConfigError(
                "set", f"{name}={value}", f"no notebook here has this parameter; they have {', '.join(existing)}"
            )
    fitting: dict[str, dict[str, Any]] = {name: {} for name in books}
    for notebook, found in known.items():
        for name in [name for name in settings if name in found]:
            try:
                fitting[notebook][name] = _like(found[name], settings[name])
            except TypeError as error:
                allowed = f"must be {error} in {notebook}, like its default {found[name]!r}"
                raise ConfigError("set", f"{name}={settings[name]}", allowed) from None
    return fitting


def _like(default: Any, value: Any) -> Any:
    """The value, if it is of the default's type. A tuple is accepted for a list, a whole number for a float.

    Raises:
        TypeError: it is of another type; the message names the type that it must be.
    """
    if isinstance(default, list) and isinstance(value, list | tuple) and value:
        return [_like(default[0], each) if default else each for each in value]
    if type(default) is float and type(value) is int:
        return float(value)
    if type(value) is not type(default) or value == []:
        raise TypeError(WORDS.get(type(default), type(default).__name__))
    return value


def inject(book: Any, settings: Mapping[str, Any]) -> Any:
    """The notebook with an extra cell that sets parameters, right after the cell that defines them.

    Values that the parameters cell derives from its parameters are not derived again.
    """
    if not settings:
        return book
    return parameterize_notebook(
        book, dict(settings), comment="Set for this report", kernel_name="python3", language="python"
    )
