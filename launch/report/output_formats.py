"""The kernels of a report: forks of a process that has imported what notebooks import, so each starts in a second.

They load this module as an IPython extension: figures also come as SVG and with their words, tables also as CSV. The
page shows the PNG and the HTML; the CSV holds all rows and digits, which the HTML rounds.
"""

from __future__ import annotations

import os
import signal
import warnings
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import matplotlib
import pandas as pd
from ipykernel.kernelapp import IPKernelApp
from IPython.core.formatters import BaseFormatter
from jupyter_client.manager import AsyncKernelManager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas.io.formats.style import Styler
from traitlets import ObjectName, Unicode

from launch.widgets import blanks

WORDS = "application/x-figure+json"  # of a figure: its title, small print, and what its panels show
KERNEL_ARGUMENTS = [
    "--InlineBackend.figure_formats=png",
    "--InlineBackend.figure_formats=svg",
    f"--ext={__name__}",
]
IMPORTED = [
    __name__,
    "launch",
    "diffusers.pipelines.stable_video_diffusion.pipeline_stable_video_diffusion",
    "vdpp_core.plots.gantt",
    "vdpp_core.plots.scaling",
]


class _Kernel(ForkServerProcess):
    """A kernel's process, with the methods of Popen that jupyter_client calls."""

    stdin = stdout = stderr = None

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self) -> int | None:
        self.join()
        return self.exitcode

    def send_signal(self, number: int) -> None:
        if self.pid is not None:
            os.kill(self.pid, number)


class ForkedKernelManager(AsyncKernelManager):
    """Starts each kernel as a fork of one process, which has imported IMPORTED and nothing else."""

    async def _async_launch_kernel(self, kernel_cmd: list[str], **options: Any) -> None:
        ForkServerContext().set_forkserver_preload(IMPORTED)
        process = _Kernel(target=_run_kernel, args=(kernel_cmd[3:], options["cwd"], options["env"]))  # python -m module
        process.start()
        provisioner: Any = self.provisioner
        provisioner.process = process
        self._reconcile_connection_info(provisioner.connection_info)


def _run_kernel(arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    os.setsid()  # Ctrl-C in the report's terminal does not reach it
    os.environ |= environment
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the notebook holds the stderr of its cells
    signal.signal(signal.SIGINT, signal.default_int_handler)
    matplotlib.rcParams["backend"] = "module://matplotlib_inline.backend_inline"  # too late for MPLBACKEND
    parent = f"--IPKernelApp.parent_handle={os.getppid()}"  # with which the kernel ends
    IPKernelApp.launch_instance(argv=[*arguments, parent])


class _CSVFormatter(BaseFormatter):
    format_type = Unicode("text/csv")
    print_method = ObjectName("_repr_csv_")  # no object has it: only registered types come as CSV


class _WordsFormatter(BaseFormatter):
    format_type = Unicode(WORDS)

    def __call__(self, shown: Any) -> dict[str, str] | None:
        """The words of a figure. A type registered for figures would be forgotten when their backend starts."""
        return words_of(shown) if isinstance(shown, Figure) else None


def words_of(figure: Figure) -> dict[str, str]:
    """The words of a figure for those who do not see it: "title", "small_print" below it, and its "panels"."""
    title = figure.get_suptitle() or next((axes.get_title() for axes in figure.axes), "")
    panels = [panel for panel in map(_panel, figure.axes) if panel and panel != title]
    found = {"title": title, "small_print": figure.get_supxlabel(), "panels": "; ".join(dict.fromkeys(panels))}
    return {name: " ".join(text.split()) for name, text in found.items()}


def _panel(axes: Axes) -> str:
    title = next(filter(None, (axes.get_title(place) for place in ("center", "left"))), "")
    return ": ".join(filter(None, [title, " over ".join(filter(None, [axes.get_ylabel(), axes.get_xlabel()]))]))


def load_ipython_extension(shell: Any) -> None:
    """Register the formatters of tables as CSV and of figures' words with an IPython shell, and those of `launch`."""
    blanks.register(shell)
    warnings.formatwarning = lambda message, *where, **more: f"warning: {message}\n"  # without a cell's file and line
    tables, figures = _CSVFormatter(parent=shell.display_formatter), _WordsFormatter(parent=shell.display_formatter)
    tables.for_type(pd.DataFrame, pd.DataFrame.to_csv)
    tables.for_type(Styler, lambda styled: styled.data.to_csv())
    for formatter in (tables, figures):
        shell.display_formatter.formatters[formatter.format_type] = formatter
