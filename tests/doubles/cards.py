"""Faked cards: torch.cuda tells of GPUs that are not there. Only facts are faked; what computes on one fails as ever.

In a test: `with faked(T4, A5000):`. In a process of its own, by a variable that only code of the tests reads:
`make gpu-check DRY=1 FAKE_CARDS=7,8.6,23.68` (cards, compute capability, GiB of each).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch

GIB = 2**30
VARIABLE = "FAKE_CARDS"
NAMES = {(7, 5): "Tesla T4", (8, 0): "NVIDIA A100 80GB PCIe", (8, 6): "NVIDIA RTX A5000"}


@dataclass(frozen=True)
class Card:
    capability: tuple[int, int]
    gib: float

    @property
    def name(self) -> str:
        return NAMES.get(self.capability, "faked card")

    @property
    def total_memory(self) -> int:
        return int(self.gib * GIB)


T4, A5000, A100 = Card((7, 5), 14.56), Card((8, 6), 23.68), Card((8, 0), 79.25)


class Faked:
    """The functions of torch.cuda that tell of cards, with torch's own refusal of a card that is not there."""

    def __init__(self, cards: tuple[Card, ...]) -> None:
        self.cards = cards

    def is_available(self) -> bool:
        return bool(self.cards)

    def device_count(self) -> int:
        return len(self.cards)

    def get_device_name(self, device: torch.device | int | str | None = None) -> str:
        return self._card(device).name

    def get_device_capability(self, device: torch.device | int | str | None = None) -> tuple[int, int]:
        return self._card(device).capability

    def get_device_properties(self, device: torch.device | int | str | None = None) -> SimpleNamespace:
        card = self._card(device)
        major, minor = card.capability
        return SimpleNamespace(name=card.name, major=major, minor=minor, total_memory=card.total_memory)

    def mem_get_info(self, device: torch.device | int | str | None = None) -> tuple[int, int]:
        card = self._card(device)
        return card.total_memory, card.total_memory

    def _card(self, device: torch.device | int | str | None) -> Card:
        index = device if isinstance(device, int) else torch.device(device or "cuda").index or 0
        if not 0 <= index < len(self.cards):
            raise AssertionError("Invalid device id")
        return self.cards[index]


@contextmanager
def faked(*cards: Card) -> Iterator[None]:
    """These cards, numbered from 0, and no others; none at all without arguments."""
    double = Faked(cards)
    told = {name: getattr(double, name) for name in vars(Faked) if not name.startswith("_")}
    with mock.patch.multiple(torch.cuda, **told):
        yield


def from_environment() -> tuple[Card, ...]:
    """The cards that FAKE_CARDS asks for; none where it is not set."""
    words = os.environ.get(VARIABLE)
    if not words:
        return ()
    try:
        count, capability, gib = words.split(",")
        major, minor = map(int, capability.split("."))
        return (Card((major, minor), float(gib)),) * int(count)
    except ValueError:
        raise SystemExit(f"{VARIABLE} {words}: must be cards, compute capability and GiB, as 7,8.6,23.68") from None
