"""`python -m launch documents`."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Annotated

import torch
from tyro.conf import UseAppendAction

from launch import signals
from launch.documents import claims, experiments, figures, output
from launch.documents.book import Book
from launch.documents.machine import Machine
from launch.documents.plan import Plan
from launch.documents.repeat import repeat
from launch.documents.rows import place
from vdpp_core.cli import progress_bar
from vdpp_core.cli.arguments import N, Switch, quiet, shown, whole_number
from vdpp_core.config.axes import MOST_RANKS
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.execution import cores
from vdpp_core.parallel.devices import GIB
from vdpp_core.runs import machine, runfolder


@dataclass(frozen=True)
class Documents:
    """Repeat the experiments of the user's documents here, each published figure beside the one obtained."""

    section: Annotated[UseAppendAction[tuple[str, ...]], shown("N", "a section of the documents; may be repeated")] = ()
    dry_run: Switch = False  # print what would run, with predicted time and memory; run nothing
    gpus: Annotated[str | None, N] = None  # with --dry-run: what would run on so many RTX A5000

    def __call__(self) -> None:
        quiet()
        here = self._machine()
        all_experiments, all_claims = experiments.all_of(here), claims.all_of()
        names = list(dict.fromkeys([*(each.section for each in all_experiments), *(row.section for row in all_claims)]))
        wanted = [part for given in self.section for part in given.split(",")] or names
        for name in wanted:
            if name not in names:
                raise ConfigError("section", name, f"must be one of {', '.join(sorted(names, key=place))}")
        chosen = [each for each in all_experiments if each.section in wanted]
        about = [row for row in all_claims if row.section in wanted]
        if self.dry_run:
            with progress_bar.working("predicting"):
                planned = Plan(here).text(chosen)
            print(planned)
            return
        signals.all_as_ctrl_c()  # the runs end with this command
        folder = runfolder.runs_root() / f"{time.strftime('%Y%m%d-%H%M%S')}-documents-{secrets.token_hex(2)}"
        book = Book(here, folder, about)
        try:
            repeat(book, chosen)
        finally:
            print(f"{book.state}\npage:  {(folder / output.PAGE).as_uri()}\ntable: {folder / output.TABLE}", flush=True)
        if book.failed:
            raise SystemExit(1)

    def _machine(self) -> Machine:
        if self.gpus is not None:
            if not self.dry_run:
                raise ConfigError("gpus", self.gpus, "only with --dry-run; a run uses the GPUs that are here")
            count = whole_number("gpus", self.gpus, most=MOST_RANKS)
            return Machine(count, cores(), f"{count} × {figures.CARD}", figures.CARD_GIB)
        count = torch.cuda.device_count()
        card = torch.cuda.get_device_properties(0).total_memory / GIB if count else None
        return Machine(count, cores(), machine.hardware_name(machine.hardware()), card)
