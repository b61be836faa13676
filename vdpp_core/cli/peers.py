"""peers: other implementations beside ours, on the same samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from vdpp_core.cli import arguments
from vdpp_core.cli.arguments import N, RunFlags
from vdpp_core.cli.run import become_torchrun, carry_out, how_many
from vdpp_core.engine import preflight
from vdpp_core.parallel.rendezvous import Ranks, agree


@dataclass(frozen=True)
class Peers:
    """Compare diffusers, accelerate and PyTorch's pipelining with this package on the same samples, two per rank."""

    run: RunFlags
    world_size: Annotated[str | None, N] = None  # number of ranks; default: 2, or torchrun's
    repeats: Annotated[str, N] = "3"  # runs of every variant, in alternating order

    def __call__(self, ranks: Ranks, argv: Sequence[str]) -> None:
        folder, work = self._prepare(ranks, argv)
        carry_out(work, ranks)
        if ranks.rank == 0:
            _show(folder, bool(self.run.get("json")))

    def _prepare(self, ranks: Ranks, argv: Sequence[str]) -> tuple[Path, partial[None]]:
        """Check everything, then make the folder; all ranks know its place and their work in it."""
        from vdpp_core.compare import peers_report  # the other commands do not need what it imports

        wanted, local_ranks = how_many(self.world_size, ranks, alone=2)
        repeats = arguments.whole_number("repeats", self.repeats)
        config = peers_report.configuration(self.run, wanted, local_ranks)
        preflight.check(config.for_ranks(wanted), local_ranks)
        if not ranks.under_torchrun:
            peers_report.place(config)
            become_torchrun(wanted, argv)
        runs = peers_report.plan(peers_report.variants(config, wanted), repeats)
        folder = Path(agree(ranks, lambda: str(peers_report.prepare(config, runs))))
        return folder, partial(_compare, config.replace(output_dir=folder), runs, ranks)


def _compare(*inputs: Any) -> None:
    from vdpp_core.compare.peers import measure  # takes seconds to import: after the arguments were checked

    measure(*inputs)


def _show(folder: Path, as_json: bool) -> None:
    from vdpp_core.compare.peers_report import shown

    print(shown(folder, as_json))
