"""Tables in notebooks say "–" where there is no value and "∞" where one has no end, not NaN, None, <NA> or inf."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from IPython.core.getipython import get_ipython

NOTHING, ENDLESS = "–", "∞"


def register(shell: Any = None) -> None:
    """Show tables so in an IPython shell, by default the running one, if there is one. The data stay as they are."""
    shell = shell or get_ipython()
    if shell is not None:
        shell.display_formatter.formatters["text/html"].for_type(pd.DataFrame, page)


def page(table: pd.DataFrame) -> str:
    """A table as HTML, of so many rows and columns as pandas' options say; no cell is cut."""
    shown = table.copy()
    for place, (_, column) in enumerate(table.items()):
        words = {NOTHING: column.isna(), ENDLESS: column == np.inf, f"−{ENDLESS}": column == -np.inf}
        if column.dtype.kind == "f" and not any(words[word].any() for word in words if word != NOTHING):
            continue  # na_rep does it, and the numbers stay aligned
        cells = column.to_numpy(dtype=object)
        for word, where in words.items():
            cells = np.where(where.fillna(False), word, cells)
        shown.isetitem(place, cells)
    limits = pd.options.display
    with pd.option_context("display.max_colwidth", None):
        return shown.to_html(notebook=True, na_rep=NOTHING, max_rows=limits.max_rows, max_cols=limits.max_columns)
