"""What `python -m vdpp_core` does: parse the command line, then let its command act."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from vdpp_core.cli import arguments, old_names
from vdpp_core.cli.peers import Peers
from vdpp_core.cli.predict import Memory, Plan
from vdpp_core.cli.run import NewRun, Run
from vdpp_core.cli.sizing import Sizing
from vdpp_core.cli.training import Training
from vdpp_core.config.errors import ConfigError
from vdpp_core.parallel.rendezvous import Ranks

PROG = "python -m vdpp_core"
PURPOSE = "Split video diffusion over several GPUs: run it, predict it, compare it. Works alone and under torchrun."
COMMANDS = [*arguments.run_commands(NewRun), Memory, Plan, Sizing, Peers, Run, Training]
parse = partial(arguments.parse, COMMANDS, prog=PROG, purpose=PURPOSE)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command; exits with 2 after bad input, with 1 after a failure, with 130 after Ctrl-C."""
    arguments.begin()
    with arguments.readers_may_leave():
        _run(sys.argv[1:] if argv is None else list(argv))


def _run(words: Sequence[str]) -> None:
    old_names.answer(words)
    command, ranks = parse(words), Ranks.from_environment()
    try:
        command(ranks, words)
    except ConfigError as error:
        if ranks.local_rank == 0:
            arguments.refuse(error)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        if ranks.local_rank == 0:
            print("stopped by Ctrl-C", file=sys.stderr)
        raise SystemExit(arguments.INTERRUPTED) from None
