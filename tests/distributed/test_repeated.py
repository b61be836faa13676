"""`python -m launch documents`, for real: a section whole, and Ctrl-C in the next."""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from launch.documents import output


def rows_in(folder: Path) -> dict[str, dict[str, str]]:
    tables = list(folder.glob(f"runs/*-documents-*/{output.TABLE}"))
    if not tables:
        return {}
    with tables[0].open(encoding="utf-8", newline="") as file:
        return {row["what"]: row for row in csv.DictReader(file)}


def test_a_section_is_repeated_and_ctrl_c_keeps_it(
    tmp_path: Path, wait_until: Callable[[Callable[[], Any], float], Any]
):
    command = [sys.executable, "-m", "launch", "documents", "--section", "2", "--section", "11"]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=said, stderr=subprocess.STDOUT)
    try:
        running = lambda: len(list(tmp_path.glob("runs/*-sweep-*"))) == 2  # noqa: E731
        wait_until(running, 200)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
    rows = rows_in(tmp_path)
    assert [rows[f"verdict, {ranks} ranks"]["here"] for ranks in (2, 4, 7)] == ["pass"] * 3
    assert len({rows[f"norm of the final tensor, {ranks}"]["here"] for ranks in ("1 rank", "7 ranks")}) == 1
    totals = [row for what, row in rows.items() if what.startswith("total with start-up")]
    assert [float(row["published"]) for row in totals] == [3.99, 4.22, 4.15, 4.43]
    assert all(0 < float(row["here"]) < 200 and row["ratio"] for row in totals)
    assert float(rows["cold first step, 1 rank"]["here"]) > 0
    assert "scaling, 7 ranks" not in rows
    text = (tmp_path / "said").read_text()
    assert "6       3 … 0                     24 … 27" in text
    assert "incomplete: " in text
    assert "stopped by Ctrl-C" in text
    assert max(map(len, text.splitlines())) <= 100 + len(str(tmp_path))
    page = next(tmp_path.glob(f"runs/*-documents-*/{output.PAGE}")).read_text()
    assert "Steps of 7 ranks" in page

    def left() -> list[str]:
        lines = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
        return [" ".join(line) for line in lines if str(tmp_path) in " ".join(line)]

    wait_until(lambda: not left(), 20)
