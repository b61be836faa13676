"""simulate, benchmark and generate: a new run. run: run folders that were prepared before."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional

from vdpp_core.cli import arguments, progress_bar, show
from vdpp_core.cli.arguments import N, RunCommand, shown
from vdpp_core.config.errors import ConfigError, redacted
from vdpp_core.config.layout import Parallel
from vdpp_core.engine import preflight
from vdpp_core.engine.measure import keep_freed_memory
from vdpp_core.engine.memory_limit import OutOfMemoryError
from vdpp_core.parallel.rendezvous import Ranks, agree
from vdpp_core.predict import cores_and_disk, memory, prediction
from vdpp_core.predict.schedule import run_times
from vdpp_core.runs import events, processes, runfolder
from vdpp_core.runs.run import Run as RunRead


@dataclass(frozen=True)
class NewRun(RunCommand):
    """A run that is made from flags."""

    world_size: Annotated[str | None, N] = None  # ranks to start where torchrun does not; default: 1

    def __call__(self, ranks: Ranks, argv: Sequence[str]) -> None:
        folder = self._prepare(ranks, argv)
        carry_out(partial(_record_and_execute, folder, ranks), ranks, folder)
        if ranks.rank == 0:
            show.run(folder, self.as_json)

    def _prepare(self, ranks: Ranks, argv: Sequence[str]) -> Path:
        """Check everything, then make the run folder; all ranks know its place."""
        wanted, local_ranks = how_many(self.world_size, ranks, alone=1)
        counted_by = "torchrun" if ranks.under_torchrun and self.world_size is None else "world_size"
        counted = ranks.under_torchrun or self.world_size is not None
        config = preflight.complete(arguments.run_config(self.flags, wanted, counted_by, counted), wanted)
        execution = preflight.check(config, local_ranks)
        if not ranks.under_torchrun:
            runfolder.check_place(config)
        if ranks.rank == 0 and (ranks.under_torchrun or wanted == 1):  # said once, by the process that runs
            arguments.warn([*cores_and_disk.before_start(config, execution), *memory.before_start(config, execution)])
        if wanted != ranks.world_size:
            become_torchrun(wanted, argv)
        return Path(agree(ranks, lambda: str(runfolder.create(config))))


@dataclass(frozen=True)
class Run:
    """Execute prepared run folders one after another, under torchrun."""

    folder: Positional[Annotated[tuple[str, ...], shown("FOLDER [FOLDER ...]")]]  # run folders with a config.json

    def __call__(self, ranks: Ranks, _: Sequence[str]) -> None:
        folders = [Path(name) for name in self.folder]
        _each_once(folders)
        for number, folder in enumerate([_prepared(folder, ranks) for folder in folders]):
            carry_out(partial(_execute, folder, ranks, first=number == 0), ranks, folder)


def how_many(world_size: str | None, ranks: Ranks, alone: int) -> tuple[int, int]:
    """The number of ranks in all and on this machine; `alone`: where neither torchrun nor --world-size sets it."""
    wanted = ranks.world_size if ranks.under_torchrun else alone
    if world_size is not None:
        wanted = arguments.whole_number("world_size", world_size)
    if ranks.under_torchrun and wanted != ranks.world_size:
        raise ConfigError("world_size", wanted, f"must be torchrun's number of ranks, {ranks.world_size}")
    return wanted, ranks.local_world_size if ranks.under_torchrun else wanted


def become_torchrun(ranks: int, argv: Sequence[str]) -> None:
    """Replace this process by torchrun's agent, which starts the same command on every rank."""
    torchrun = ["-m", "vdpp_core.cli.local_torchrun", f"--nproc_per_node={ranks}"]
    os.execv(sys.executable, [sys.executable, *torchrun, "-m", "vdpp_core", *argv])


def carry_out(work: Any, ranks: Ranks, folder: Path | None = None) -> None:
    """Do a rank's work; end this process at once where that fails or is interrupted.

    A communicator that lost its peer may never let the interpreter end.
    """
    try:
        arguments.quiet()
        arguments.imported()
        work()
        return
    except KeyboardInterrupt:  # before the rank's own guard takes over
        code, said = arguments.INTERRUPTED, ""
        if ranks.rank == 0:
            said = f"stopped by Ctrl-C{_settle_stopped(folder)}"
    except OutOfMemoryError as error:
        code, said = 1, f"rank {ranks.rank}: {error}"
    except BaseException:
        code, said = 1, redacted(traceback.format_exc())
    if said:
        print(said, file=sys.stderr, flush=True)
    os._exit(code)


def _settle_stopped(folder: Path | None) -> str:
    from vdpp_core.runs.results import settle

    if folder is None:
        return ""
    run = RunRead(folder)
    if not run.launcher_alive():
        settle(run, reason="stopped", predict_times=run_times)
    return f"; run folder: {folder}"


def _each_once(folders: Sequence[Path]) -> None:
    if not folders:
        raise ConfigError("folder", "", "must be one or several run folders")
    for folder in folders:
        if not runfolder.holds(folder, "config.json"):
            raise ConfigError("folder", folder, "must be a run folder, it has no config.json")
    names = [folder.resolve().name for folder in folders]  # machines with folders of their own know a run by its name
    for name in names:
        if names.count(name) > 1:
            raise ConfigError("folder", name, "is named twice; a run folder is run once")


def _prepared(folder: Path, ranks: Ranks) -> Path:
    """A run folder that was made for this number of ranks and was not run before."""
    needed = (RunRead(folder).config.parallel or Parallel()).world_size
    if needed != ranks.world_size:
        raise ConfigError("folder", folder, f"was made for {needed} ranks, not {ranks.world_size}")
    agree(ranks, lambda: _not_run_before(folder), folder.name)
    return folder


def _not_run_before(folder: Path) -> str:
    if events.events_paths(folder) or RunRead(folder).result():
        raise ConfigError("folder", folder, "was run before; a run folder is run once")
    return ""


def _record_and_execute(folder: Path, ranks: Ranks) -> None:
    with _followed(folder, ranks):
        if ranks.rank == 0:
            prediction.record(folder)
        _execute(folder, ranks)


def _followed(folder: Path, ranks: Ranks) -> contextlib.AbstractContextManager[None]:
    return progress_bar.of_run(folder) if ranks.rank == 0 else contextlib.nullcontext()


def _execute(folder: Path, ranks: Ranks, first: bool = True) -> None:
    """Do a run, the `first` of this process or a later one."""
    from vdpp_core.engine import worker  # takes seconds to import: after the arguments were checked
    from vdpp_core.runs.results import settle

    run = RunRead(folder)
    keep_freed_memory(run.config.memory_limit_gib is None)
    try:
        before = _startup(ranks) if first else {}
        worker.execute(run, ranks, predict_times=run_times, before=before)
    except BaseException:
        if not run.launcher_alive():
            settle(run, again=True, predict_times=run_times)
        raise


def _startup(ranks: Ranks) -> dict[str, float]:
    """How long its launcher took to start this process, and this process to import and check, for its start event."""
    launch_s = processes.launch_s() if ranks.under_torchrun else 0.0
    return {"launch_s": launch_s, "import_s": processes.age_s(os.getpid())}
