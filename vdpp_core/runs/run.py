"""A run as its folder shows it. Whatever looks at a run takes a Run; `runfolder` describes the files."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from vdpp_core.config import RunConfig
from vdpp_core.runs import event_types as kinds
from vdpp_core.runs import events, files, processes, runfolder, saved_latents
from vdpp_core.runs.event_types import Event


@dataclass(frozen=True)
class Work:
    """What an attempt at a run has to do.

    attempt: counted from 1
    latents: the samples to compute
    kept:    samples whose latents an earlier attempt left
    videos:  those of the kept samples that have to be decoded
    nodes:   for several machines, the arguments that each was called with
    """

    attempt: int
    latents: Sequence[int]
    kept: Sequence[int] = ()
    videos: Sequence[int] = ()
    nodes: Mapping[str, Any] | None = None


class Run:
    """Reads a run folder. Only the configuration is read once and kept; everything else may change meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.id = folder, folder.name

    @classmethod
    def of(cls, place: Path | Run) -> Run:
        """The run itself, or the one in a folder."""
        return place if isinstance(place, Run) else cls(place)

    @cached_property
    def config(self) -> RunConfig:
        """The configuration.

        Raises:
            ConfigError: config.json is missing or damaged.
        """
        return RunConfig.read(self.folder)

    def events(self) -> list[Event]:
        """All ranks' events so far, sorted by time. Damaged lines are skipped; `events.Follower` names them."""
        return events.Follower(self.folder).events()

    def result(self) -> dict[str, Any] | None:
        """result.json; None where there is none yet, or a damaged one, which can be computed again."""
        result = files.read_object(self.folder / "result.json", "outcome")
        return result if result and result["outcome"] in runfolder.OUTCOMES else None

    @property
    def work(self) -> Work:
        """What the current attempt has to do: all samples, unless the run was resumed."""
        todo = files.read_object(self.folder / runfolder.TODO, "attempt", "latents", "kept", "videos")
        return Work(**todo) if todo else Work(attempt=1, latents=range(self.config.num_samples))

    @property
    def prediction(self) -> dict[str, Any] | None:
        """What was predicted before the run: `memory`, the peak of a rank in GB (1e9 bytes) by part, and, where it has
        stages, `handoff_bytes_per_rank` and the `solver`; the times, named as in the result, with their `source` and
        `makespan_range_s`, where they were shown; None where nothing was."""
        return files.read_object(self.folder / "predicted.json", "memory")

    def silence_s(self) -> float:
        """Seconds since the rank that has been silent for longest wrote an event."""
        return time.time() - min((path.stat().st_mtime for path in self._event_paths()), default=time.time())

    def latents_path(self, sample: int) -> Path:
        """Where the latents of a finished sample are saved."""
        return self.folder / "latents" / f"sample-{sample:03d}.safetensors"

    def save_latents(self, sample: int, latents: Tensor, origin: str = "") -> None:
        """Save latents (B, C, F, H, W) atomically, with the digest of what they were made from (`Origin.digest`).

        Raises:
            FullDiskError: there is no room for them.
        """
        saved_latents.save(self.latents_path(sample), latents, origin)

    def load_latents(self, sample: int) -> Tensor:
        """The latents (B, C, F, H, W) of a finished sample.

        Raises:
            FileNotFoundError: there are none.
            DamagedError: the file does not hold what was written.
        """
        return saved_latents.load(self.latents_path(sample))

    def video_paths(self, sample: int, suffix: str = ".mp4") -> list[Path]:
        """The files of a sample's videos with one suffix, one for each video of its batch."""
        names = runfolder.video_names(self.config, sample)
        return [self.folder / "videos" / f"{name}{suffix}" for name in names]

    def launcher(self) -> dict[str, Any] | None:
        """pid, created and host of the process that watches over the run, on this machine where there are several.

        None where there is none: torchrun was called by hand, or the run has not started.
        """
        own = processes.launcher_path(self.folder)
        paths = [own, self.folder / "job.json", *sorted(self.folder.glob("job-*.json"))]
        return next((found for path in paths if (found := files.read_object(path, "pid", "created", "host"))), None)

    def launcher_alive(self) -> bool:
        """Whether a launcher watches over the run. One on another machine is assumed to for PATIENCE_S of silence."""
        launcher = self.launcher()
        if launcher is None:
            return False
        if launcher["host"] == socket.gethostname():
            return processes.is_alive(launcher["pid"], launcher["created"])
        paths = (self.folder / "config.json", *self._event_paths())
        written = [path.stat().st_mtime for path in paths if path.exists()]
        return time.time() - max(written, default=0.0) < processes.PATIENCE_S

    def logs_of(self, rank: int) -> str:
        """A glob pattern, relative to the folder, for what a rank printed.

        torchrun numbers its logs by the rank's number on its machine.
        """
        if not any(self.folder.glob("job-*.json")):
            return f"logs/*/attempt_0/{rank}"
        host = kinds.hosts(self.events())
        if rank not in host:
            return "logs/none"
        first = min(each for each in host if host[each] == host[rank])
        return f"logs/{host[rank]}/*/attempt_0/{rank - first}"

    def _event_paths(self) -> list[Path]:
        return events.events_paths(self.folder)
