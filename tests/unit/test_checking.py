"""What the doubles find when the notes of all ranks are compared; what they find in one rank: tests/distributed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.checking import check

LOOKS = [[[4], "torch.float32"]]


def noted(folder: Path, *ranks: list[dict[str, Any]]) -> list[str]:
    for member, notes in enumerate(ranks):
        lines = [json.dumps({"run": "r", "group": "0", "member": member} | note) for note in notes]
        (folder / f"{member}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    verdict = check(folder)
    assert verdict.calls == sum("op" in note for notes in ranks for note in notes)
    assert verdict.groups == 1
    assert list(folder.iterdir()) == []
    return verdict.problems


def gather(looks: Any = LOOKS, op: str = "all_reduce") -> dict[str, Any]:
    return {"op": op, "looks": looks, "source": None}


def exchange(going: list[int], coming: list[int]) -> dict[str, Any]:
    return {"op": "all_to_all_single", "looks": "torch.uint8", "going": going, "coming": coming}


def message(op: str, peer: int, size: int = 4) -> dict[str, Any]:
    return {"op": op, "peer": peer, "looks": [[size], "torch.float32"]}


@pytest.mark.parametrize(
    "ranks",
    [
        ([gather(), gather()], [gather(), gather()]),
        ([gather(), gather()], [gather()]),  # killed in between
        ([exchange([0, 3], [0, 2])], [exchange([2, 0], [3, 0])]),
        ([message("send", 1), gather()], [gather(), message("recv", 0)]),  # communicators of their own
        ([message("send", 1, 4), message("send", 1, 5)], [message("recv", 0, 4)]),
    ],
)
def test_what_is_right(ranks: tuple[list[dict[str, Any]], ...], tmp_path: Path) -> None:
    assert noted(tmp_path, *ranks) == []


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (([gather()], [gather(op="broadcast")]), "operation 0 is"),
        (([gather()], [gather([[[2, 2], "torch.float32"]])]), "operation 0 is"),
        (([gather(), gather()], [gather(), gather([[[4], "torch.float16"]])]), "operation 1 is"),
        (([exchange([0, 3], [0, 2])], [exchange([2, 0], [4, 0])]), "0 gives 1 3 elements, which expects 4"),
        (([message("send", 1, 4)], [message("recv", 0, 5)]), "message 0 from 0 to 1 is"),
        (([{"broken": "a tensor is on meta"} | {}, gather()], [gather()]), "a tensor is on meta"),
    ],
)
def test_what_is_wrong(ranks: tuple[list[dict[str, Any]], ...], words: str, tmp_path: Path) -> None:
    assert any(words in problem for problem in noted(tmp_path, *ranks))
