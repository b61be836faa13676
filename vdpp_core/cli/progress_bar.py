"""A line on stderr while a command works; none where stderr is no terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from vdpp_core.cli.words import counted
from vdpp_core.config.errors import ConfigError
from vdpp_core.runs.events import Follower
from vdpp_core.runs.progress import progress
from vdpp_core.runs.run import Run

PERIOD_S = 0.5
BUSY = 20  # a look that takes long is repeated only after so many times as long
_WITH_BAR = "{desc} {percentage:3.0f}% |{bar}| {elapsed}{postfix}"
_WITHOUT = "{desc} {elapsed}{postfix}"


class Far(NamedTuple):
    """How far something is: what it is doing, its share from 0 to 1 where that is known, and more in words."""

    doing: str
    share: float | None = None
    more: str = ""


@contextmanager
def following(look: Callable[[], Far]) -> Iterator[None]:
    """Show, while the body works, what `look` returns; it is called from another thread."""
    with tqdm(total=1.0, desc="starting", bar_format=_WITHOUT, leave=False, disable=None, dynamic_ncols=True) as bar:
        over = threading.Event()
        thread = threading.Thread(target=_refresh, args=(bar, look, over), daemon=True)
        if not bar.disable:
            thread.start()
        try:
            yield
        finally:
            over.set()
            if thread.ident is not None:
                thread.join()


def _refresh(bar: Any, look: Callable[[], Far], over: threading.Event) -> None:
    wait = 0.0
    while not over.wait(wait):
        began = time.monotonic()
        with suppress(ConfigError, OSError):  # a folder that has just gone
            _show(bar, look())
        wait = max(PERIOD_S, BUSY * (time.monotonic() - began))


def _show(bar: Any, far: Far) -> None:
    bar.bar_format = _WITHOUT if far.share is None else _WITH_BAR
    bar.n = far.share or 0.0
    bar.set_description_str(far.doing, refresh=False)
    bar.set_postfix_str(far.more, refresh=False)
    bar.refresh()


@contextmanager
def working(doing: str) -> Iterator[None]:
    """Show what is being done and for how long, where nothing says how far it is."""
    with following(lambda: Far(doing)):
        yield


@contextmanager
def of_run(folder: Path) -> Iterator[None]:
    """Follow a run from its event files while the body works."""
    with following(partial(_look, Run(folder), Follower(folder))):
        yield


def _look(run: Run, follower: Follower) -> Far:
    return in_words(progress(run, follower.events()))


def in_words(far: dict[str, Any]) -> Far:
    """`runs.progress.progress`, or a job's, for the bar."""
    if far["share"] == 0:
        return Far(far["phase"])
    more = f"{far['samples_finished']} of {counted(far['num_samples'], 'sample')}"
    if far["seconds_left"] is not None and far["phase"] == "running":
        more += f", {far['seconds_left']:.0f} s left"
    return Far(far["phase"], far["share"], more if far["stalled"] is None else f"{more}; {far['stalled']}")


def say(line: str) -> None:
    """Print a line to stdout while a bar may be there."""
    tqdm.write(line)
    sys.stdout.flush()
