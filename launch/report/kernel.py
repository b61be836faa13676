"""An IPython extension for kernels that execute a report: what a cell shows is also there as SVG and CSV.

The report's page keeps the PNG and the HTML; its files are made of these, which are not rounded.
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
    print_method = ObjectName("_repr_csv_")  # that nothing has: only what is registered


def load_ipython_extension(shell: Any) -> None:
    formatter = _CSVFormatter(parent=shell.display_formatter)
    formatter.for_type(pd.DataFrame, pd.DataFrame.to_csv)
    formatter.for_type(Styler, lambda styled: styled.data.to_csv())
    shell.display_formatter.formatters["text/csv"] = formatter
