"""Words that commands print."""


def counted(number: int, noun: str) -> str:
    """ "1 sample", "2 samples"."""
    return f"{number} {noun}{'s' * (number != 1)}"
