"""What commands show while they work: a line on a terminal, nothing in a pipe."""

import io
import sys

from vdpp_core.cli import progress_bar
from vdpp_core.cli.progress_bar import Far

FAR = {"phase": "running", "samples_finished": 0, "num_samples": 1, "share": 0.5, "seconds_left": 4.2, "stalled": None}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def follow(looks, monkeypatch, stream):
    """What is written to stderr while a command looks that often."""
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress_bar, "PERIOD_S", 0.0)
    monkeypatch.setattr(progress_bar, "BUSY", 0)
    left, over = list(looks), progress_bar.threading.Event()

    def look():
        found = left.pop(0)
        if not left:
            left.append(found)
            over.set()
        return found

    with progress_bar.following(look):
        over.wait(10 if stream.isatty() else 0.1)
    return stream.getvalue()


def test_a_line_on_a_terminal_goes_when_the_work_is_done(monkeypatch):
    shown = follow([Far("loading"), Far("running", 0.5, "1 of 2 samples"), Far("end")], monkeypatch, Terminal())
    assert "loading 00:00" in shown
    assert "running  50% |" in shown
    assert "1 of 2 samples" in shown
    assert shown.rpartition("\n")[2].endswith("\r")


def test_nothing_in_a_pipe(monkeypatch):
    assert follow([Far("loading")], monkeypatch, io.StringIO()) == ""


def test_the_words_about_a_run():
    assert progress_bar.in_words(FAR) == Far("running", 0.5, "0 of 1 sample, 4 s left")
    assert progress_bar.in_words(FAR | {"share": 0, "phase": "loading"}) == Far("loading")
    assert progress_bar.in_words(FAR | {"stalled": "rank 1 is silent"}).more.endswith("; rank 1 is silent")
