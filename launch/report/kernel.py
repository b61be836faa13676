"""An IPython extension for the kernels of a report: figures also come as SVG, tables also as CSV.

The page shows the PNG and the HTML. The CSV holds all rows and digits, which the HTML rounds.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
from IPython.core.formatters import BaseFormatter
from pandas.io.formats.style import Styler
from traitlets import ObjectName, Unicode

KERNEL_ARGUMENTS = [
    "--InlineBackend.figure_formats=png",
    "--InlineBackend.figure_formats=svg",
    f"--ext={__name__}",
]


class _CSVFormatter(BaseFormatter):
    format_type = Unicode("text/csv")
    print_method = ObjectName("_repr_csv_")  # no object has it: only registered types come as CSV


def load_ipython_extension(shell: Any) -> None:
    """Register the CSV formatter with an IPython shell."""
    formatter = _CSVFormatter(parent=shell.display_formatter)
    formatter.for_type(pd.DataFrame, pd.DataFrame.to_csv)
    formatter.for_type(Styler, lambda styled: styled.data.to_csv())
    shell.display_formatter.formatters["text/csv"] = formatter
