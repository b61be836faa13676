"""Files that are there whole or not at all, also when the process dies in the middle or the disk is full."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vdpp_core.config.errors import in_one_line

RESERVE = ".reserve"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_HARDLY_ANY = 4096  # bytes


class DamagedError(ValueError):
    """A file that cannot be trusted."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path, self.reason = path, in_one_line(reason)[:160]
        super().__init__(f"{path}: {self.reason}")


class Place:
    """Where a folder was found: whether it is still there, and not moved, removed or replaced by another one.

    It is kept open, so that no later folder gets its number.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.handle = folder, os.open(folder, os.O_RDONLY)

    def is_gone(self) -> bool:
        try:
            return not os.path.samestat(os.fstat(self.handle), self.folder.stat())
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # a network file system that does not answer at the moment
            return False

    def close(self) -> None:
        os.close(self.handle)


class FullDiskError(OSError):
    """There is no room for what a run writes."""

    def __init__(self, path: Path) -> None:
        free = shutil.disk_usage(path.parent).free / 1e6
        super().__init__(errno.ENOSPC, f"the disk is full: {path.name} could not be written, {free:.1f} MB are free")

    def __str__(self) -> str:
        return str(self.strerror)


def is_full(error: BaseException) -> bool:
    """Whether an error says that the disk, or somebody's share of it, is full."""
    return isinstance(error, OSError) and error.errno in _FULL


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` write a draft beside `path`, which takes its place when all of it is on the disk.

    Raises:
        FullDiskError: there is no room; the draft is gone, what was at `path` before is still there.
    """
    draft = path.with_name(f".{path.stem}.{secrets.token_hex(4)}{path.suffix}")
    try:
        write(draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    except Exception as error:
        if is_full(error) or shutil.disk_usage(path.parent).free < _HARDLY_ANY:  # not all libraries say so
            raise FullDiskError(path) from error
        raise
    finally:
        draft.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    write_whole(path, lambda draft: draft.write_text(text, encoding="utf-8"))


def reserve(folder: Path, size: int) -> None:
    """Keep room for a folder's last words, so that a full disk does not silence them."""
    with (folder / RESERVE).open("wb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.write(bytes(size))


def release(folder: Path) -> None:
    """Give that room back."""
    (folder / RESERVE).unlink(missing_ok=True)


def read_object(path: Path, *needed: str) -> dict[str, Any] | None:
    """A JSON object with these entries, if there is one; a damaged one is none, with a warning."""
    try:
        found = json.loads(path.read_bytes())
        if isinstance(found, dict) and found.keys() >= set(needed):
            return found
        reason = "is not the object that was written"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error)
    warnings.warn(f"not trusted: {DamagedError(path, reason)}", stacklevel=3)
    return None
