"""Files that exist whole or not at all, even when the process dies while writing or the disk is full."""

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
    """A folder, kept open to notice when it is moved, removed or replaced.

    While it is open, no other folder gets its inode number.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.handle = folder, os.open(folder, os.O_RDONLY)

    def is_gone(self) -> bool:
        """Whether the folder is no longer the one at its path."""
        try:
            return not os.path.samestat(os.fstat(self.handle), self.folder.stat())
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # a network file system that does not answer right now
            return False

    def close(self) -> None:
        """Release the folder."""
        os.close(self.handle)


class FullDiskError(OSError):
    """The disk has no room for what a run writes."""

    def __init__(self, path: Path) -> None:
        free = shutil.disk_usage(path.parent).free / 1e6
        super().__init__(errno.ENOSPC, f"the disk is full: {path.name} could not be written, {free:.1f} MB free")

    def __str__(self) -> str:
        return str(self.strerror)


def is_full(error: BaseException) -> bool:
    """Whether an error means that the disk or the user's quota is full."""
    return isinstance(error, OSError) and error.errno in _FULL


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Have `write` write a draft beside `path`, and move it there once all of it is on the disk.

    Raises:
        FullDiskError: there is no room. The draft is removed, and an earlier file at `path` is untouched.
    """
    draft = path.with_name(f".{path.stem}.{secrets.token_hex(4)}{path.suffix}")
    try:
        write(draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    except Exception as error:
        if is_full(error) or shutil.disk_usage(path.parent).free < _HARDLY_ANY:  # not every library reports ENOSPC
            raise FullDiskError(path) from error
        raise
    finally:
        draft.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file as `write_whole` does."""
    write_whole(path, lambda draft: draft.write_text(text, encoding="utf-8"))


def reserve(folder: Path, size: int) -> None:
    """Reserve so many bytes for a folder's last words, so that they can be written on a full disk."""
    with (folder / RESERVE).open("wb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.write(bytes(size))


def release(folder: Path) -> None:
    """Free the reserved bytes."""
    (folder / RESERVE).unlink(missing_ok=True)


def read_object(path: Path, *needed: str) -> dict[str, Any] | None:
    """The JSON object in a file, which must have the `needed` entries; None where there is none.

    A damaged file counts as none, with a warning.
    """
    try:
        found = json.loads(path.read_bytes())
        if isinstance(found, dict) and found.keys() >= set(needed):
            return found
        reason = "not the object that was written"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error)
    warnings.warn(f"not trusted: {DamagedError(path, reason)}", stacklevel=3)
    return None
