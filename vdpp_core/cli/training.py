"""training: ways to split training, run on CPU ranks and compared with one rank and with their formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from vdpp_core.cli.arguments import Switch, shown
from vdpp_core.cli.run import carry_out
from vdpp_core.parallel.rendezvous import Ranks


@dataclass(frozen=True)
class Training:
    """Train small models split in several ways; compare each with one rank and with its formulas."""

    folder: Annotated[Path | None, shown("FOLDER")] = None  # under torchrun: experiments that were prepared
    json: Switch = False  # print JSON

    def __call__(self, ranks: Ranks, argv: Sequence[str]) -> None:
        if self.folder is not None:
            from vdpp_core.lessons import rank

            carry_out(partial(rank.main, self.folder, ranks), ranks)
