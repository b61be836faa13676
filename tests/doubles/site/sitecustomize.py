"""Puts the doubles under a rank's torch.distributed, where VDPP_DOUBLES names some: Python imports this by itself.

A process that is started with this folder in PYTHONPATH is otherwise as it is: the package has no seam for tests.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


class _BeforeThePackage(importlib.abc.MetaPathFinder):
    """Installs the doubles when `vdpp_core` is imported for the first time: before it binds any function of torch."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "vdpp_core":
            sys.meta_path.remove(self)
            for name in ("communicator", "late"):
                _load(name)
            sys.modules["communicator"].install(os.environ["VDPP_DOUBLES"].split(","))
        return None


def _load(name: str) -> None:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if os.environ.get("VDPP_DOUBLES"):
    sys.meta_path.insert(0, _BeforeThePackage())
