"""Files whole or not at all, and what is damaged."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vdpp_core.runs import files


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    def fail(draft: Path):
        draft.write_text("half")
        raise OSError("broken")

    (tmp_path / "a.png").write_text("before")
    with pytest.raises(OSError, match="broken"):
        files.write_whole(tmp_path / "a.png", fail)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.png", "before")]


def test_a_full_disk_is_named_with_the_file(tmp_path):
    def fail(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(files.FullDiskError, match=r"the disk is full: a\.png could not be written, .* MB are free"):
        files.write_whole(tmp_path / "a.png", fail)


def test_a_file_is_whole_whoever_writes_it(tmp_path):
    """A rank has two threads that may both settle a run: its main thread and its monitor."""
    path, text = tmp_path / "result.json", "x" * 5000

    def write(_):
        files.write_atomically(path, text)
        return path.read_text() == text

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(write, range(200)))
    assert list(tmp_path.iterdir()) == [path]


def test_room_for_last_words_is_really_taken(tmp_path):
    files.reserve(tmp_path, 100_000)
    assert (tmp_path / files.RESERVE).stat().st_blocks * 512 >= 100_000
    files.release(tmp_path)
    files.release(tmp_path)
    assert list(tmp_path.iterdir()) == []
