"""Tables in notebooks: words in place of NaN, <NA> and inf, and texts in full, wrapped where the page ends."""

from __future__ import annotations

import re
from typing import Any

import pandas as pd

WORDS = {"NaN": "–", "nan": "–", "NaT": "–", "None": "–", "&lt;NA&gt;": "–", "inf": "no limit", "-inf": "no limit"}
_TEXT = re.compile(r"<td>(?=[^<]{25})")  # a sentence, which JupyterLab would set flush right
_CELL = re.compile(rf"<(t[dh])>({'|'.join(map(re.escape, WORDS))})</\1>")


def as_html(table: pd.DataFrame) -> str | None:
    """A table as pandas shows it, apart from WORDS and shortened texts."""
    with pd.option_context("display.max_colwidth", None):
        html = table._repr_html_()  # type: ignore[operator]
    if html is None:
        return None
    html = _CELL.sub(lambda cell: f"<{cell[1]}>{WORDS[cell[2]]}</{cell[1]}>", html)
    return _TEXT.sub('<td style="text-align: left">', html)


def install(shell: Any) -> None:
    """Let an IPython shell show tables so."""
    shell.display_formatter.formatters["text/html"].for_type(pd.DataFrame, as_html)
