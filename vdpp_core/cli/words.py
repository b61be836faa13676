"""Words that commands print."""

WIDTH = 100  # columns of a table


def counted(number: int, noun: str) -> str:
    """ "1 sample", "2 samples"."""
    return f"{number} {noun}{'s' * (number != 1)}"
