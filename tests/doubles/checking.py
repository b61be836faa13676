"""What the ranks noted under `communicator.py`, compared: did all members of each group do the same?"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

Note = dict[str, Any]
CALLS = pytest.StashKey[int]()  # how many operations a session of tests has checked


@dataclass(frozen=True)
class Verdict:
    """calls: operations that were checked; groups: those that did any; problems: a line on each broken rule."""

    calls: int
    groups: int
    problems: list[str]


def check(folder: Path) -> Verdict:
    """Of all notes in a folder, which are taken away. Ranks that were killed may have done less than the others."""
    notes: list[Note] = []
    for path in sorted(folder.glob("*.jsonl")):
        notes += [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        path.unlink()
    groups: dict[tuple[str, str], dict[int, list[Note]]] = defaultdict(lambda: defaultdict(list))
    problems = [note["broken"] for note in notes if "broken" in note]
    for note in notes:
        if "op" in note:
            groups[note["run"], note["group"]][note["member"]].append(note)
    for (_, name), members in groups.items():
        problems += [f"group {name}: {words}" for words in _differences(members)]
    return Verdict(sum("op" in note for note in notes), len(groups), problems)


def _differences(members: dict[int, list[Note]]) -> Iterator[str]:
    together = {member: [note for note in own if "peer" not in note] for member, own in members.items()}
    for number, same in enumerate(zip(*together.values(), strict=False)):
        of_members = dict(zip(together, same, strict=True))
        looks = {json.dumps([note["op"], note["looks"], note.get("source")]) for note in same}
        if len(looks) > 1:
            yield f"operation {number} is {' and '.join(sorted(looks))}"
            break
        if "going" in same[0]:
            yield from _uneven(number, of_members)
    for member, own in members.items():
        for other, theirs in members.items():
            sent = [note["looks"] for note in own if note["op"] == "send" and note["peer"] == other]
            expected = [note["looks"] for note in theirs if note["op"] == "recv" and note["peer"] == member]
            yield from _unexpected(member, other, sent, expected)


def _uneven(number: int, of_members: dict[int, Note]) -> Iterator[str]:
    for member, note in of_members.items():
        for other, theirs in of_members.items():
            if note["going"][other] != theirs["coming"][member]:
                going, coming = note["going"][other], theirs["coming"][member]
                yield f"operation {number}: {member} gives {other} {going} elements, which expects {coming}"


def _unexpected(member: int, other: int, sent: Sequence[Any], expected: Sequence[Any]) -> Iterator[str]:
    for number, (one, another) in enumerate(zip(sent, expected, strict=False)):
        if one != another:
            yield f"message {number} from {member} to {other} is {one}, expected was {another}"
