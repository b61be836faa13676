"""Ranks of a test module as forks of one process that has imported it: one import instead of one for each rank.

python -m tests.distributed.forked RANKS MODULE ARGUMENT…
The module's `main` finds the environment that torchrun would give it. Ends with 1 if a rank failed.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import sys
import traceback
from typing import Any

from torch.distributed import TCPStore

ADDRESS = "127.0.0.1"


def be_rank(rank: int, ranks: int, port: int, module: Any) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ |= {"MASTER_ADDR": ADDRESS, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    try:
        module.main()
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def main() -> None:
    gc.disable()  # imports are not garbage
    ranks, name, *arguments = sys.argv[1:]
    sys.argv = [name, *arguments]
    module = importlib.import_module(name)
    gc.freeze()
    gc.enable()
    listening = socket.create_server((ADDRESS, 0))
    port = listening.getsockname()[1]
    pids = []
    for rank in range(int(ranks)):
        if (pid := os.fork()) == 0:
            listening.close()
            be_rank(rank, int(ranks), port, module)
        pids.append(pid)
    # its server has threads, which a fork would lose: it begins when all ranks are there
    store = TCPStore(ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    del store
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
