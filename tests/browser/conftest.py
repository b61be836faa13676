"""The fixtures of the browser tests."""

from tests.browser.lab import lab

__all__ = ["lab"]
