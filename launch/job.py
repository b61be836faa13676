"""A run as a background job. It is stateless: everything comes from the run folder, so any process can attach."""

from __future__ import annotations

import contextlib
import json
import socket
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch import resuming, warm_start
from launch.machines.nodes import MEETING_PATIENCE_S, Nodes
from launch.terminate import STOP_PATIENCE_S, end, end_by_name, end_ranks, launchers, settle
from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError, in_one_line
from vdpp_core.config.layout import Parallel
from vdpp_core.engine import preflight
from vdpp_core.plots import perfetto
from vdpp_core.predict import cores_and_disk, memory
from vdpp_core.runs import processes, results, runfolder
from vdpp_core.runs.event_types import Start, of
from vdpp_core.runs.events import Follower
from vdpp_core.runs.progress import progress
from vdpp_core.runs.run import Run

if TYPE_CHECKING:
    from launch.sweep import Sweep

COMMAND = "python -m launch"
POLL_S = 0.2
LEAVING_S = 10.0  # after a result, for the launchers of other machines


class NoRunError(ConfigError):
    """There is no run or sweep of that name."""

    def __init__(self, run_id: str, root: Path) -> None:
        super().__init__("run_id", run_id, "must be a run or a sweep")
        self.root = root

    def __str__(self) -> str:
        inside = self.root.is_relative_to(here := Path.cwd())
        shown = self.root.relative_to(here) if inside else self.root
        return f"No run {in_one_line(str(self.value))!r} in {shown}/; `{COMMAND} status` lists them"


class Job:
    """A run that was started, here or elsewhere; everything is read from its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_id = folder, folder.name

    @property
    def run(self) -> Run:
        """The run as its folder is now. A new object each time: the run may be edited and resumed meanwhile."""
        return Run(self.folder)

    def __repr__(self) -> str:
        return f"Job({self.run_id!r}, {self.status()})"

    def status(self) -> str:
        """Return the phase (starting, loading, warming up, running, decoding, comparing) or the outcome (ok, oom,
        failed, stopped)."""
        return self.outcome() or progress(self.run)["phase"]

    def outcome(self) -> str | None:
        """Return how the run ended; None while it is running. Cheaper than `status`."""
        result = self._settled()
        return None if result is None else result["outcome"]

    def progress(self) -> dict[str, Any]:
        """Return how far the run is.

        Keys: status, samples_finished, num_samples, share (0 to 1), seconds_left, stalled (which rank, in words), and
        ranks with the phase, sample and step of each.
        """
        outcome, far = self.outcome(), progress(self.run)
        return {"status": outcome or far["phase"], **far, "stalled": None if outcome else far["stalled"]}

    def damaged(self) -> list[str]:
        """Return one line for each damaged event and each damaged file of latents."""
        follower = Follower(self.folder)
        follower.events()
        try:
            return follower.damaged + resuming.intact(self.run)[1]
        except ConfigError as error:
            return [*follower.damaged, str(error)]

    def disturbed(self) -> list[str]:
        """Return one line for each thing that disturbed the timing of a finished run (`vdpp_core.runs.disturbed`)."""
        return (self._settled() or {}).get("disturbed") or []

    def tail(self, rank: int = 0, lines: int = 20) -> str:
        """Return the last lines that a rank wrote to stdout and stderr."""
        written: list[str] = []
        for stream in ("stdout", "stderr"):
            for path in sorted(self.folder.glob(f"{self.run.logs_of(rank)}/{stream}.log")):
                written += path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(written[-lines:])

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait for the run to end and return its result.

        Raises:
            TimeoutError: the run is still running after `timeout` seconds; it is not stopped.
        """
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (result := self._settled()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.run_id} is still running after {timeout:g} s: {self.status()}")
            time.sleep(POLL_S)
        return result

    def stop(self) -> dict[str, Any]:
        """End the run, keep its finished samples, and return the result; that of a run that ended earlier as it is.

        No result is written where the folder is gone or config.json is damaged.

        Raises:
            ConfigError: it was started by hand or on another machine, and has to be stopped there.
        """
        if not self.folder.is_dir():
            end_by_name(self.folder)
        if (result := self._settled()) is not None:
            return result
        if self.run.launcher() is None and not launchers(self.folder) and self._ranks():
            raise ConfigError(
                "run", self.run_id, "was started by hand: stop it there, with Ctrl-C or by stopping the kernel"
            )
        end(self.folder)
        try:
            return settle(self.run, reason="stopped")
        except ConfigError:
            return {"run_id": self.run_id, "outcome": "stopped"}

    def resume(self, nodes: Nodes | None = None) -> Job:
        """Compute what is missing from a run that has ended, in its own folder, and return at once.

        With `nodes`, every machine calls this on the folder that they share. The machine at the endpoint resumes the
        run, and the others wait until it has.

        Raises:
            ConfigError: the run has not ended, nothing is missing, or this machine would compute other latents.
        """
        config = self.run.config
        local_ranks = config.layout.world_size if nodes is None else nodes.share_of(config)
        if nodes is not None and not nodes.address[1]:
            self._join(config, nodes)
            return self
        self._check_ended()
        preflight.check(config, local_ranks)
        with resuming.lock(self.run):
            self._check_ended()  # nobody has resumed it meanwhile
            deadline = time.monotonic() + STOP_PATIENCE_S  # the launcher settles the result after the ranks
            while self._has_launcher():
                if time.monotonic() > deadline:
                    raise ConfigError("run", self.run_id, "its launcher or sweep has not ended yet: wait, then resume")
                time.sleep(POLL_S)
            for line in resuming.begin(self.run, asdict(nodes) if nodes else None):
                warnings.warn(line, stacklevel=2)
            _launch_part(self.folder, nodes)
        return self

    def why_not_resume(self) -> str | None:
        """Return why `resume` would refuse on this machine, in words; None where it would not."""
        try:
            self._check_ended()
            preflight.check(self.run.config, self.run.config.layout.world_size)
            resuming.plan(self.run)
        except ConfigError as error:
            return str(error)
        return None

    def _check_ended(self) -> None:
        if self.outcome() is None:
            raise self._not_ended()

    def _not_ended(self) -> ConfigError:
        return ConfigError("run", self.run_id, f"has not ended ({self.status()}): wait, or stop it, then resume")

    def _has_launcher(self) -> bool:
        """Whether a launcher may still write to the folder of a run that has ended."""
        launcher = self.run.launcher()
        if launcher is None or launcher["host"] == socket.gethostname():
            return self.run.launcher_alive()
        return time.time() - (self.folder / "result.json").stat().st_mtime < LEAVING_S

    def _join(self, config: RunConfig, nodes: Nodes) -> None:
        """Join a run as soon as the machine at the endpoint has resumed it."""
        preflight.check(config, local_ranks=nodes.nproc)
        resuming.as_before(self.run)
        deadline, is_resumed = None, partial(resuming.is_resumed, self.run, asdict(nodes))
        while not is_resumed():
            if self.outcome() is None and not is_resumed():  # again: it may just have been resumed
                raise self._not_ended()
            if deadline is None:
                warnings.warn(f"{self.run_id}: waiting until {nodes.endpoint} resumes it", stacklevel=3)
                deadline = time.monotonic() + MEETING_PATIENCE_S
            if time.monotonic() > deadline:
                allowed = "was not resumed at the endpoint; to resume it together, machines must share its folder"
                raise ConfigError("run", self.run_id, allowed)
            time.sleep(POLL_S)
        _check_there_is_room(self.folder, nodes)
        _launch_part(self.folder, nodes)

    def result(self) -> dict[str, Any]:
        """Return the result of a run that has ended.

        Raises:
            RuntimeError: it has not ended.
        """
        result = self._settled()
        if result is None:
            raise RuntimeError(f"{self.run_id} has no result yet: {self.status()}")
        return result

    def trace(self, path: Path | None = None) -> Path:
        """Write what each rank did when as a trace for https://ui.perfetto.dev, and return its path.

        Raises:
            ConfigError: the trace cannot be written there.
        """
        return perfetto.write(self.folder, path)

    def _ranks(self) -> list[Start]:
        """The start events of the ranks that are alive on this machine."""
        starts = of(self.run.events(), Start)
        return [start for start in starts if processes.is_rank(start)]

    def _settled(self) -> dict[str, Any] | None:
        if not self.folder.is_dir():
            failure = {"rank": None, "sample": None, "step": None, "cause": "its folder is gone"}
            return {"run_id": self.run_id, "outcome": "failed", "failure": failure}
        result = self.run.result()
        if result is None and (self.folder / "result.json").exists():  # it was written, and is damaged
            return settle(self.run)
        if result is None and self.run.launcher() is None:  # started by hand, or about to start
            return settle(self.run) if results.all_ended(self.run) else None
        if result is None and not self.run.launcher_alive():
            end_ranks(self.folder)
            result = settle(self.run, reason="the launcher was killed")
        return result


def start(
    config: RunConfig,
    nproc: int | None = None,
    nodes: Nodes | None = None,
    predicted: Mapping[str, Any] | None = None,
) -> Job:
    """Start a run on `nproc` ranks of this machine (default: as many as its layout needs) and return at once.

    With `nodes`, start this machine's ranks of a run over several machines; every machine makes the same call.

    Args:
        predicted: the prediction that was shown before, kept in the folder and compared with the run afterwards, as of
            `Run.prediction`. By default the times are predicted from the steps before the clock starts.

    Raises:
        ConfigError: the run is impossible on this machine; nothing was started.
    """
    folder = prepare(config, nproc) if nodes is None else _prepare_node(config, nodes)
    if predicted is not None:
        runfolder.write_prediction(folder, dict(predicted))
    _launch_part(folder, nodes)
    return Job(folder)


def _launch_part(folder: Path, nodes: Nodes | None) -> None:
    """Launch this machine's ranks of a run: all ranks without `nodes`."""
    logs = folder / "logs" if nodes is None else runfolder.logs_path(folder)
    logs.mkdir(exist_ok=True)
    launch([folder], log=logs / "launcher.log", nodes=nodes)


def _check_there_is_room(folder: Path, nodes: Nodes) -> None:
    """Refuse a machine that a run in a shared folder does not expect (any more)."""
    came = [path.name for path in folder.glob("job-*.json")]
    if runfolder.logs_path(folder).exists() or len(came) >= nodes.nnodes:
        raise ConfigError("nnodes", nodes.nnodes, "as many machines have joined already, this one perhaps among them")


def prepare(config: RunConfig, nproc: int | None = None) -> Path:
    """Check a run, make its folder and return that.

    Raises:
        ConfigError: the run is impossible on this machine.
    """
    ranks = nproc if nproc is not None else (config.parallel or Parallel()).world_size
    config = preflight.complete(config, ranks)
    execution = preflight.check(config, local_ranks=ranks)
    for line in [*cores_and_disk.before_start(config, execution), *memory.before_start(config, execution)]:
        warnings.warn(line, stacklevel=3)
    return runfolder.create(config)


def _prepare_node(config: RunConfig, nodes: Nodes) -> Path:
    nodes.check()
    config = preflight.complete(config, nodes.world_size)
    execution = preflight.check(config, local_ranks=nodes.nproc)
    for line in [*memory.before_start(config, execution), *nodes.crossings(config)]:
        warnings.warn(line, stacklevel=3)
    return runfolder.join(config.replace(output_dir=config.output_dir or runfolder.runs_root() / nodes.run_id))


def launch(folders: Sequence[Path], log: Path, sweep: Path | None = None, nodes: Nodes | None = None) -> None:
    """Start the supervisor that executes these runs in turn, and return at once. It outlives the caller.

    It is forked from a warm server where there is one: `launch.warm_start`.
    """
    words = ["launch.supervisor", *map(str, folders)]
    if sweep is not None:
        words += ["--sweep", str(sweep)]
    if nodes is not None:
        words += nodes.as_flags()

    def note(pid: int) -> None:
        for folder in folders:
            processes.write_launcher(folder, pid, alone=nodes is None)

    with log.open("ab") as file:
        warm_start.start(words, stdout=file.fileno(), stderr=file.fileno(), note=note)


def attach(run_id: str, root: Path | None = None) -> Job | Sweep:
    """Return the job or sweep with this id, also one that another process started.

    Args:
        run_id: name of a folder under `root`, or its path; SWEEP/RUN for a run of a sweep.
        root: default runs/.

    Raises:
        NoRunError: there is no such run.
    """
    from launch.sweep import Sweep

    root = root or runfolder.runs_root()
    folder = _folder_of(run_id, root)
    if runfolder.holds(folder, "sweep.json"):
        return Sweep(folder)
    if runfolder.is_run(folder):
        return Job(folder)
    raise NoRunError(run_id, root)


def stop_what_is_left(run_id: str, root: Path | None = None) -> None:
    """End the processes of a run or sweep whose folder is gone; the process table has its path.

    Raises:
        ConfigError: there are no such processes.
    """
    root = root or runfolder.runs_root()
    if not end_by_name(_folder_of(run_id, root)):
        raise NoRunError(run_id, root)


def _folder_of(run_id: str, root: Path) -> Path:
    sweep, _, name = run_id.removeprefix(f"{root}/").removeprefix(f"{root.name}/").rstrip("/").rpartition("/")
    try:
        return within(within(root, sweep) if sweep else root, name)
    except ConfigError:
        raise NoRunError(run_id, root) from None


def within(folder: Path, name: str) -> Path:
    """Return the run folder with this name directly below `folder`.

    Raises:
        ConfigError: the name leads elsewhere, through a link for example.
    """
    with contextlib.suppress(OSError):  # no name that a file could have
        if name.strip(".") and Path(name).name == name and not (folder / name).is_symlink():
            return folder / name
    raise ConfigError("run_id", name, f"must be the name of a folder in {folder}")


def jobs(root: Path | None = None) -> list[Job | Sweep]:
    """Return all jobs and sweeps under `root` (default runs/), oldest first; warn of those that cannot be read."""
    root = root or runfolder.runs_root()
    folders = [path.parent for name in ("config.json", "sweep.json") for path in root.glob(f"*/{name}")]
    found = []
    made: dict[Path, float] = {}
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):  # it has just gone
            made |= {} if folder.is_symlink() else {folder: _started(folder)}
    for folder in sorted(made, key=lambda folder: made[folder]):
        try:
            found.append(attach(folder.name, root))
        except ConfigError as error:
            warnings.warn(f"left out: {error}", stacklevel=2)
    return found


def _started(folder: Path) -> float:
    """When a run or sweep was first started, in seconds since 1970; resuming it, or trying to, changes nothing.

    Raises:
        FileNotFoundError: the folder is gone.
    """
    first = folder / "attempts" / "1"
    events = (first if first.is_dir() else folder) / "events" / "rank-0.jsonl"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError), events.open(encoding="utf-8") as log:
        return float(json.loads(log.readline())["t"])
    files = (folder / name for name in ("sweep.json", "config.json"))  # of one that has not begun, or is damaged
    return next((path for path in files if path.exists()), folder).stat().st_mtime
