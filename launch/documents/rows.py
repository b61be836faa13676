"""A line of the table: what was published, what was obtained here, and why they differ."""

from __future__ import annotations

import math
from dataclasses import dataclass

Value = float | str | None  # a number, words, or nothing to tell
NOTHING = "–"


@dataclass(frozen=True)
class Row:
    """One figure of the documents beside the one obtained here.

    Attributes:
        section: of the documents.
        published: a number, in `unit`, or words; None where they give none.
        here: the same of this machine; of a claim, what the documents' own other numbers give.
        why: why they differ; of a claim, the verdict.
        alike: whether a ratio means something: not between different numbers of ranks.
    """

    section: str
    what: str
    published: Value
    here: Value
    unit: str = ""
    why: str = ""
    alike: bool = True

    @property
    def ratio(self) -> float | None:
        """Here / published; None where one of them is no number."""
        numbers = isinstance(self.here, float | int) and isinstance(self.published, float | int)
        return self.here / self.published if numbers and self.alike and self.published else None  # type: ignore[operator]

    @property
    def texts(self) -> tuple[str, str, str]:
        """Published, here and ratio, to read."""
        ratio = self.ratio
        return text(self.published, self.unit), text(self.here, self.unit), NOTHING if ratio is None else number(ratio)


def text(value: Value, unit: str) -> str:
    """A value with its unit, to read."""
    if value is None:
        return NOTHING
    return value if isinstance(value, str) else f"{number(value)} {unit}".strip()


def number(value: float) -> str:
    """Three significant digits, without an exponent where people use none."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.1e}"


def place(section: str) -> tuple[bool, int, str]:
    """Sorts sections by their number, and those with a name after them."""
    return not section.isdigit(), int(section) if section.isdigit() else 0, section
