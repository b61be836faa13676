"""Importing large libraries in half the time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Import large libraries in here: what they define stays, and Python need not look for garbage in it, which it
    would do again and again while they are imported, and once more when the process ends. What is garbage by then and
    was not collected stays, too."""
    enabled, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > before:
            gc.freeze()
        if enabled:
            gc.enable()
