"""The kernels of a report: forks of a process that has imported what notebooks import, so each starts in a second.

They load this module as an IPython extension: figures also come as SVG, tables also as CSV. The page shows the PNG and
the HTML; the CSV holds all rows and digits, which the HTML rounds.
"""

from __future__ import annotations

import os
import signal
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import matplotlib
import pandas as pd
from ipykernel.kernelapp import IPKernelApp
from IPython.core.formatters import BaseFormatter
from jupyter_client.manager import AsyncKernelManager
from pandas.io.formats.style import Styler
from traitlets import ObjectName, Unicode

from launch.widgets import table_words

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


def load_ipython_extension(shell: Any) -> None:
    """Register the CSV formatter with an IPython shell, and the words of tables."""
    table_words.install(shell)
    formatter = _CSVFormatter(parent=shell.display_formatter)
    formatter.for_type(pd.DataFrame, pd.DataFrame.to_csv)
    formatter.for_type(Styler, lambda styled: styled.data.to_csv())
    shell.display_formatter.formatters["text/csv"] = formatter
