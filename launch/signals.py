"""What ends a command from outside: Ctrl-C, SIGTERM as of `scancel` and `timeout`, and the end of its terminal."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def heeded() -> list[signal.Signals]:
    """What ends this command from outside, without what it was told to ignore, by nohup for example."""
    return [each for each in ENDINGS if signal.getsignal(each) is not signal.SIG_IGN]


def all_as_ctrl_c() -> None:
    """Have whatever ends this command from outside raise KeyboardInterrupt.

    The end of the terminal comes as SIGTERM, for code that handles that one in its own way, as nbclient does.
    """
    for each in heeded():
        ends_terminal = each is signal.SIGHUP
        signal.signal(each, _hang_up if ends_terminal else signal.default_int_handler)


def _hang_up(*_: object) -> None:
    signal.raise_signal(signal.SIGTERM)


@contextmanager
def held_back() -> Iterator[list[int]]:
    """Hold back what ends this command from outside until the body, which must be whole, is done.

    Yields:
        The signals that came; if there are any, KeyboardInterrupt is raised afterwards.
    """
    came: list[int] = []
    before = {each: signal.signal(each, lambda number, _: came.append(number)) for each in heeded()}
    try:
        yield came
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    if came:
        raise KeyboardInterrupt
