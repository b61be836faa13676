"""One run as a background job. All that is known of it lies in its run folder, so any process can attach to it."""

from __future__ import annotations

import contextlib
import socket
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch import resuming, warm
from launch.machines.nodes import MEETING_PATIENCE_S, Nodes
from launch.progress import progress
from launch.terminate import STOP_PATIENCE_S, end, end_by_name, end_ranks, launchers, settle
from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.layout import Parallel
from vdpp_core.engine import checks
from vdpp_core.plots import perfetto
from vdpp_core.predict import cores_and_disk, memory
from vdpp_core.runs import processes, results, runfolder
from vdpp_core.runs.events import Follower
from vdpp_core.runs.kinds import Start
from vdpp_core.runs.run import Run

if TYPE_CHECKING:
    from launch.sweep import Sweep

POLL_S = 0.2
LEAVING_S = 10.0  # after a result, for the launchers of other machines


class Job:
    """A run that was started. `status`, `progress` and `tail` read its folder; nothing is kept in this object."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_id = folder, folder.name

    @property
    def run(self) -> Run:
        """The run as its folder is now. A new object each time: the run may be edited and resumed meanwhile."""
        return Run(self.folder)

    def __repr__(self) -> str:
        return f"Job({self.run_id!r}, {self.status()})"

    def status(self) -> str:
        """starting, loading, warming up, running, decoding; or the outcome: ok, oom, failed, stopped."""
        return self.outcome() or progress(self.run)["phase"]

    def outcome(self) -> str | None:
        """How the run ended; None while it goes on. Cheaper than `status`."""
        result = self._settled()
        return None if result is None else result["outcome"]

    def progress(self) -> dict[str, Any]:
        """samples_finished, num_samples, share (0 … 1), seconds_left, which rank is stalled, and each rank's phase,
        sample and step."""
        outcome, far = self.outcome(), progress(self.run)
        return {"status": outcome or far["phase"], **far, "stalled": None if outcome else far["stalled"]}

    def damaged(self) -> list[str]:
        """A line on each line of events and each file of latents that cannot be trusted."""
        follower = Follower(self.folder)
        follower.events()
        try:
            return follower.damaged + resuming.intact(self.run)[1]
        except ConfigError as error:
            return [*follower.damaged, str(error)]

    def disturbed(self) -> list[str]:
        """A line on each thing that disturbed the times of a run that has ended; `vdpp_core.runs.disturbed`."""
        return (self._settled() or {}).get("disturbed") or []

    def tail(self, rank: int = 0, lines: int = 20) -> str:
        """The last lines that a rank wrote to stdout and stderr."""
        written: list[str] = []
        for stream in ("stdout", "stderr"):
            for path in sorted(self.folder.glob(f"{self.run.logs_of(rank)}/{stream}.log")):
                written += path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(written[-lines:])

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """The result, once there is one.

        Raises:
            TimeoutError: the run goes on after `timeout` seconds; it is not stopped.
        """
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (result := self._settled()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.run_id} goes on after {timeout:g} s: {self.status()}")
            time.sleep(POLL_S)
        return result

    def stop(self) -> dict[str, Any]:
        """End the run; samples that are finished stay. Returns the result, also of a run that had ended before.

        Of a run whose folder is gone, or whose config.json is damaged, no result is written.

        Raises:
            ConfigError: somebody else started it, here or on another machine, and has to end it there.
        """
        if not self.folder.is_dir():
            end_by_name(self.folder)
        if (result := self._settled()) is not None:
            return result
        if self.run.launcher() is None and not launchers(self.folder) and self._ranks():
            raise ConfigError("run", self.run_id, "was started by hand: end it there, with Ctrl-C or the kernel's stop")
        end(self.folder)
        try:
            return settle(self.run, reason="stopped")
        except ConfigError:
            return {"run_id": self.run_id, "outcome": "stopped"}

    def resume(self, nodes: Nodes | None = None) -> Job:
        """Compute what is missing of a run that has ended, in its own folder, and return at once.

        With `nodes`, do this machine's part of it, as each of them does, in a folder that they share. The one at the
        endpoint takes the run up; the others wait for that.

        Raises:
            ConfigError: it goes on, nothing is missing, or this machine would compute other latents.
        """
        config = self.run.config
        local_ranks = config.layout.world_size if nodes is None else nodes.share_of(config)
        if nodes is not None and not nodes.address[1]:
            self._join(config, nodes)
            return self
        self._check_ended()
        checks.check(config, local_ranks)
        with resuming.lock(self.run):
            self._check_ended()  # nobody took it up meanwhile
            deadline = time.monotonic() + STOP_PATIENCE_S  # the launcher sees to the result after the ranks did
            while self._is_watched_over():
                if time.monotonic() > deadline:
                    raise ConfigError(
                        "run", self.run_id, "is watched over: wait until its launcher, or sweep, has ended"
                    )
                time.sleep(POLL_S)
            for line in resuming.begin(self.run, asdict(nodes) if nodes else None):
                warnings.warn(line, stacklevel=2)
            _launch_part(self.folder, nodes)
        return self

    def _check_ended(self) -> None:
        if self.outcome() is None:
            raise self._goes_on()

    def _goes_on(self) -> ConfigError:
        return ConfigError("run", self.run_id, f"goes on ({self.status()}): it can be resumed when it has ended")

    def _is_watched_over(self) -> bool:
        """Whether a launcher may still write to the folder of a run that has ended."""
        launcher = self.run.launcher()
        if launcher is None or launcher["host"] == socket.gethostname():
            return self.run.launcher_alive()
        return time.time() - (self.folder / "result.json").stat().st_mtime < LEAVING_S

    def _join(self, config: RunConfig, nodes: Nodes) -> None:
        """Take part in a run that the machine at the endpoint takes up, as soon as it does."""
        checks.check(config, local_ranks=nodes.nproc)
        resuming.as_before(self.run)
        deadline, taken_up = None, partial(resuming.is_resumed, self.run, asdict(nodes))
        while not taken_up():
            if self.outcome() is None and not taken_up():  # asked once more: it may have been taken up in between
                raise self._goes_on()
            if deadline is None:
                warnings.warn(f"{self.run_id}: waits until it is taken up at {nodes.endpoint}", stacklevel=3)
                deadline = time.monotonic() + MEETING_PATIENCE_S
            if time.monotonic() > deadline:
                allowed = "was not taken up at the endpoint; machines have to share its folder to resume it together"
                raise ConfigError("run", self.run_id, allowed)
            time.sleep(POLL_S)
        _check_there_is_room(self.folder, nodes)
        _launch_part(self.folder, nodes)

    def result(self) -> dict[str, Any]:
        """The result of a run that has ended.

        Raises:
            RuntimeError: it has not.
        """
        result = self._settled()
        if result is None:
            raise RuntimeError(f"{self.run_id} has no result yet: {self.status()}")
        return result

    def trace(self, path: Path | None = None) -> Path:
        """Write what each rank did when, for https://ui.perfetto.dev; `vdpp_core.plots.perfetto.write`."""
        return perfetto.write(self.folder, path)

    def _ranks(self) -> list[Start]:
        """The start events of ranks that live, on this machine."""
        starts = [event for event in self.run.events() if isinstance(event, Start)]
        return [start for start in starts if processes.is_rank(start)]

    def _settled(self) -> dict[str, Any] | None:
        if not self.folder.is_dir():
            failure = {"rank": None, "sample": None, "step": None, "cause": "its folder is gone"}
            return {"run_id": self.run_id, "outcome": "failed", "failure": failure}
        result = self.run.result()
        if result is None and (self.folder / "result.json").exists():  # it was there, and is damaged
            return settle(self.run)
        if result is None and self.run.launcher() is None:  # started by hand, or about to start
            return settle(self.run) if results.all_ended(self.run) else None
        if result is None and not self.run.launcher_alive():
            end_ranks(self.folder)
            result = settle(self.run, reason="the launcher was killed")
        return result


def start(config: RunConfig, nproc: int | None = None, nodes: Nodes | None = None) -> Job:
    """Start a run on `nproc` ranks of this machine (default: as many as its layout needs) and return at once.

    With `nodes`, start this machine's part of a run over several, each of which does the same.

    Raises:
        ConfigError: one line on what cannot be; nothing was started.
    """
    folder = prepare(config, nproc) if nodes is None else _prepare_node(config, nodes)
    _launch_part(folder, nodes)
    return Job(folder)


def _launch_part(folder: Path, nodes: Nodes | None) -> None:
    """Launch what one machine has to do of a run: all of it without `nodes`."""
    logs = folder / "logs" if nodes is None else runfolder.logs_path(folder)
    logs.mkdir(exist_ok=True)
    launch([folder], log=logs / "launcher.log", nodes=nodes)


def _check_there_is_room(folder: Path, nodes: Nodes) -> None:
    """Whether this machine, in a shared folder, is one of those that are awaited."""
    came = [path.name for path in folder.glob("job-*.json")]
    if runfolder.logs_path(folder).exists() or len(came) >= nodes.nnodes:
        raise ConfigError("nnodes", nodes.nnodes, "so many machines take part already, or this one does")


def prepare(config: RunConfig, nproc: int | None = None) -> Path:
    """Check a run and make its folder."""
    ranks = nproc if nproc is not None else (config.parallel or Parallel()).world_size
    config = config.for_ranks(ranks)
    execution = checks.check(config, local_ranks=ranks)
    for line in [*cores_and_disk.before_start(config, execution), *memory.before_start(config, execution)]:
        warnings.warn(line, stacklevel=3)
    return runfolder.create(config)


def _prepare_node(config: RunConfig, nodes: Nodes) -> Path:
    nodes.check()
    config = config.for_ranks(nodes.world_size)
    execution = checks.check(config, local_ranks=nodes.nproc)
    for line in [*memory.before_start(config, execution), *nodes.crossings(config)]:
        warnings.warn(line, stacklevel=3)
    return runfolder.join(config.replace(output_dir=config.output_dir or runfolder.runs_root() / nodes.run_id))


def launch(folders: Sequence[Path], log: Path, sweep: Path | None = None, nodes: Nodes | None = None) -> None:
    """Start the supervisor that executes these runs in turn, and return at once. It outlives the caller.

    It is forked from a warm server where there is one: `launch.warm`.
    """
    words = ["launch.supervisor", *map(str, folders)]
    if sweep is not None:
        words += ["--sweep", str(sweep)]
    if nodes is not None:
        words += nodes.as_flags()
    with log.open("ab") as file:
        pid = warm.start(words, stdout=file.fileno(), stderr=file.fileno())
    for folder in folders:
        processes.write_launcher(folder, pid, alone=nodes is None)


def attach(run_id: str, root: Path | None = None) -> Job | Sweep:
    """The job or sweep with this id, also one that another process started; an id is a folder under `root` (runs/), or
    SWEEP/RUN for a run of a sweep.

    Raises:
        ConfigError: there is none.
    """
    from launch.sweep import Sweep

    root = root or runfolder.runs_root()
    folder = _folder_of(run_id, root)
    if runfolder.holds(folder, "sweep.json"):
        return Sweep(folder)
    if runfolder.is_run(folder):
        return Job(folder)
    raise ConfigError("run_id", run_id, f"must be a folder with a run or sweep under {root}")


def stop_what_is_left(run_id: str, root: Path | None = None) -> None:
    """End what is at work for a run or sweep whose folder is gone: its processes are known by its path.

    Raises:
        ConfigError: there is none.
    """
    root = root or runfolder.runs_root()
    if not end_by_name(_folder_of(run_id, root)):
        raise ConfigError("run_id", run_id, f"is no run or sweep under {root}, and no process is at work for one")


def _folder_of(run_id: str, root: Path) -> Path:
    sweep, _, name = run_id.rpartition("/")
    return within(within(root, sweep) if sweep else root, name)


def within(folder: Path, name: str) -> Path:
    """The run folder of that name right below `folder`, and nowhere else.

    Raises:
        ConfigError: the name leads elsewhere, also by a link.
    """
    with contextlib.suppress(OSError):  # no name that a file could have
        if name.strip(".") and Path(name).name == name and not (folder / name).is_symlink():
            return folder / name
    raise ConfigError("run_id", name, f"must be the name of a folder in {folder}")


def jobs(root: Path | None = None) -> list[Job | Sweep]:
    """All jobs and sweeps under `root` (runs/), oldest first."""
    root = root or runfolder.runs_root()
    folders = [path.parent for name in ("config.json", "sweep.json") for path in root.glob(f"*/{name}")]
    found = []
    made: dict[Path, float] = {}
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):  # it has just gone
            made |= {} if folder.is_symlink() else {folder: folder.stat().st_ctime}
    for folder in sorted(made, key=lambda folder: made[folder]):
        try:
            found.append(attach(folder.name, root))
        except ConfigError as error:
            warnings.warn(f"left out: {error}", stacklevel=2)
    return found
