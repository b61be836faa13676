"""The end of a run over several machines: collect their files in rank 0's run folder, and give them the result."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vdpp_core.parallel.rendezvous import PATIENCE, Ranks
from vdpp_core.parallel.world import communication
from vdpp_core.runs import results, runfolder
from vdpp_core.runs.events import EventLog
from vdpp_core.runs.files import write_whole
from vdpp_core.runs.run import Run

CHUNK = 16 * 2**20  # bytes per message


def finish(run: Run, ranks: Ranks, log: EventLog, predict_times: results.PredictTimes | None = None) -> None:
    """Collect the files, have rank 0 write the result, and give it to all machines. All ranks have to call it.

    On one machine this does nothing. On shared storage there is nothing to collect: a machine that sees a file which
    rank 0 has just made has no folder of its own.

    Raises:
        LostRankError: another rank is gone.
    """
    if not ranks.several_machines:
        return
    folder = run.folder
    log.sync()
    with communication():
        group = dist.new_group(backend="gloo", timeout=PATIENCE)
        separate = not _shared(folder, ranks, group)
        leads = separate and ranks.local_rank == 0
        files: list[Any] = [None] * ranks.world_size
        dist.all_gather_object(files, _files(folder) if leads else [], group=group)
        for rank, own in enumerate(files):
            for name, size in own:
                if ranks.rank == rank:
                    _send(folder / name, size, group, log)
                elif ranks.rank == 0:
                    _receive(folder / name, size, rank, group, log)
    result: list[dict[str, Any]] = [{}]
    if ranks.rank == 0:
        if run.config.command == "generate" and any(files):
            from vdpp_core.engine import videos  # takes seconds, which the other commands need not spend

            videos.write_overview(run.config, folder)
        result = [results.write(run, "ok", predict_times=predict_times)]
    with communication(0):
        dist.broadcast_object_list(result, src=0, group=group)
    if leads and ranks.rank != 0:
        runfolder.write_result(folder, result[0])


def _shared(folder: Path, ranks: Ranks, group: dist.ProcessGroup | None) -> bool:
    """Whether this is rank 0's folder. The name is new, so that no network file system has it cached as missing."""
    names = [f".shared-{secrets.token_hex(8)}"]
    if ranks.rank == 0:
        (folder / names[0]).touch()
    dist.broadcast_object_list(names, src=0, group=group)
    seen = (folder / names[0]).exists()
    dist.barrier(group=group)
    if ranks.rank == 0:
        (folder / names[0]).unlink()
    return seen


def _files(folder: Path) -> list[tuple[str, int]]:
    """Names below the folder with their sizes in bytes. What is appended later is left out."""
    paths = [path for part in runfolder.PARTS for path in sorted((folder / part).rglob("*"))]
    return [
        (str(path.relative_to(folder)), path.stat().st_size) for path in paths if path.is_file() and path.name[0] != "."
    ]


def _send(path: Path, size: int, group: dist.ProcessGroup | None, log: EventLog) -> None:
    with path.open("rb") as file:
        for start in range(0, size, CHUNK):
            part = bytearray(file.read(min(CHUNK, size - start)))
            dist.send(torch.frombuffer(part, dtype=torch.uint8), dst=0, group=group)
            log.write("gather")


def _receive(path: Path, size: int, rank: int, group: dist.ProcessGroup | None, log: EventLog) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)

    def write(draft: Path) -> None:
        with draft.open("wb") as file:
            for start in range(0, size, CHUNK):
                part = torch.empty(min(CHUNK, size - start), dtype=torch.uint8)
                dist.recv(part, src=rank, group=group)
                file.write(part.numpy().tobytes())
                log.write("gather")

    write_whole(path, write)
