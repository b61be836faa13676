"""What ends a command from outside."""

from __future__ import annotations

import os
import signal

import pytest

from launch import signals


@pytest.fixture(autouse=True)
def _handlers():
    """Those of a command that a shell has started, whatever these tests run in."""
    before = {each: signal.getsignal(each) for each in signals.ENDINGS}
    for each in signals.ENDINGS:
        signal.signal(each, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


def test_stopping_runs_is_not_interrupted():
    done = []

    def stop() -> None:
        with signals.held_back():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("stopped")

    with pytest.raises(KeyboardInterrupt):
        stop()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("ending", signals.ENDINGS)
def test_whatever_ends_a_command_is_ctrl_c(ending: signal.Signals):
    signals.all_as_ctrl_c()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), ending)


@pytest.mark.parametrize("ignored", [signal.SIGINT, signal.SIGHUP])  # by a shell's &, by nohup
def test_what_a_command_was_told_to_ignore_is_ignored_and_the_rest_is_not(ignored: signal.Signals):
    signal.signal(ignored, signal.SIG_IGN)
    signals.all_as_ctrl_c()
    with signals.held_back() as came:
        os.kill(os.getpid(), ignored)
    assert came == []
    assert signal.getsignal(ignored) is signal.SIG_IGN
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
