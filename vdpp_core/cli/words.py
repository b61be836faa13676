"""Words that commands print."""

import textwrap

WIDTH = 100  # columns of a terminal


def wrapped(text: str, indent: int = 5, first: int | None = None) -> list[str]:
    """A text as lines of WIDTH columns, indented; the first one by `first` where that differs."""
    begin = " " * (indent if first is None else first)
    return textwrap.wrap(text, WIDTH, initial_indent=begin, subsequent_indent=" " * indent)


def counted(number: int, noun: str) -> str:
    """ "1 sample", "2 samples"."""
    return f"{number} {noun}{'s' * (number != 1)}"
