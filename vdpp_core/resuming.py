"""A run that ended early, taken up again in its own folder: what is missing is computed, with the same latents.

Sample m depends on the configuration and on seed + m alone, so nothing has to be known of the others. What is there is
trusted only where its checksum says so. The earlier attempt's events stay, in attempts/N/, and are not counted.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vdpp_core import files, machine, runfolder
from vdpp_core.config import RunConfig
from vdpp_core.errors import ConfigError
from vdpp_core.files import DamagedError

TODO = "todo.json"
_ENDS = {".mp4": b"", ".gif": b";", ".png": b"IEND\xaeB`\x82"}  # an MP4 is checked when it is written


@dataclass(frozen=True)
class Work:
    """What an attempt at a run has to do.

    attempt: counted from 1
    latents: the samples to compute
    kept:    samples whose latents are there from before
    videos:  those of them that have to be decoded
    nodes:   of several machines, what each was called with
    """

    attempt: int
    latents: Sequence[int]
    kept: Sequence[int] = ()
    videos: Sequence[int] = ()
    nodes: Mapping[str, Any] | None = None


def work(folder: Path, config: RunConfig) -> Work:
    """Of the run in a folder: all samples, unless it was resumed."""
    told = runfolder.read_object(folder / TODO, "attempt", "latents", "kept", "videos")
    return Work(**told) if told else Work(attempt=1, latents=range(config.num_samples))


def missing(folder: Path, config: RunConfig) -> tuple[Work, list[str]]:
    """What is left to do, and a line on each file that cannot be trusted."""
    kept, damaged = [], []
    for sample in range(config.num_samples):
        try:
            _check(runfolder.load_latents(folder, sample), config, runfolder.latents_path(folder, sample))
            kept.append(sample)
        except FileNotFoundError:
            pass
        except DamagedError as error:
            damaged.append(f"{error}; computed again")
    makes_videos = config.command == "generate"
    videos = [m for m in kept if config.compare_official or not _has_videos(folder, config, m)] if makes_videos else []
    whole = set(kept)
    latents = [sample for sample in range(config.num_samples) if sample not in whole]
    return Work(len(_attempts(folder)) + 2, latents, kept, videos), damaged


@contextmanager
def by_one(folder: Path) -> Iterator[None]:
    """Only one process at a time is in here, for a folder.

    Raises:
        ConfigError: another one is.
    """
    try:
        file = (folder / ".resuming").open("w")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError("run", folder.name, "is being resumed by somebody else") from None
    except OSError as error:
        raise ConfigError("run", folder.name, f"cannot be resumed ({error.strerror})") from None
    with file:
        yield


def was_taken_up(folder: Path, nodes: Mapping[str, Any]) -> bool:
    """Whether another machine has begun the run again, in this shared folder, and calls this one."""
    return work(folder, RunConfig.read(folder)).nodes == nodes and runfolder.read_result(folder) is None


def begin_again(folder: Path, nodes: Mapping[str, Any] | None = None) -> list[str]:
    """Put what the last attempt left aside, and write down what is left to do; the run can then be started.

    Args:
        nodes: for several machines, what each of them is called with.

    Returns:
        A line on each file that is damaged and will be made again.

    Raises:
        ConfigError: nothing is missing, nothing was kept, or this machine would compute other latents.
    """
    config, name = RunConfig.read(folder), folder.name
    if not config.save_latents:
        raise ConfigError("run", name, "kept no latents (save_latents), so nothing of it is left: start it anew")
    todo, damaged = missing(folder, config)
    ended_well = (runfolder.read_result(folder) or {}).get("outcome") == "ok"
    if ended_well and not todo.latents and not todo.videos:
        raise ConfigError("run", name, "has all its samples, nothing is missing")
    todo, config = replace(todo, nodes=nodes), as_before(folder, config)
    aside = folder / "attempts" / str(todo.attempt - 1)
    try:
        for draft in [*folder.glob("latents/.*"), *folder.glob("videos/.*")]:
            draft.unlink()  # of a process that died in the middle of writing
        files.reserve(folder, runfolder.room(config))
        aside.mkdir(parents=True)
        for path in (folder / "events", folder / "logs", folder / TODO, *folder.glob("job*.json")):
            if path.exists():
                path.rename(aside / path.name)
        for part in ("events", "logs", "latents"):
            (folder / part).mkdir(exist_ok=True)
        runfolder.write_atomically(folder / "config.json", config.to_json())
        runfolder.write_atomically(folder / TODO, json.dumps(asdict(todo)) + "\n")
        if (folder / "result.json").exists():  # last: as long as it is there, the run has ended and can be resumed
            (folder / "result.json").rename(aside / "result.json")
    except OSError as error:
        files.release(folder)
        raise ConfigError("run", name, f"cannot be resumed: {os.strerror(error.errno or 0)} in {folder}") from None
    return damaged


def _attempts(folder: Path) -> list[Path]:
    return list((folder / "attempts").glob("*"))


def _check(latents: torch.Tensor, config: RunConfig, path: Path) -> None:
    if latents.shape != config.shape:
        raise DamagedError(path, f"is {tuple(latents.shape)}, not {config.shape}")
    if not torch.isfinite(latents).all():
        raise DamagedError(path, "is not finite")


def _has_videos(folder: Path, config: RunConfig, sample: int) -> bool:
    def whole(path: Path) -> bool:
        return path.is_file() and path.stat().st_size > 0 and path.read_bytes().endswith(_ENDS[path.suffix])

    names = runfolder.video_names(config, sample)
    return all(whole(folder / "videos" / f"{name}{suffix}") for name in names for suffix in _ENDS)


def as_before(folder: Path, config: RunConfig) -> RunConfig:
    """The configuration with what the earlier attempt was given by its machine, on which the bits depend.

    Raises:
        ConfigError: this machine would compute other latents.
    """
    places = [folder, *_attempts(folder)]
    starts = [event for place in places for event in runfolder.read_events(place) if event["kind"] == "start"]
    if not starts:
        return config.replace(output_dir=folder.absolute())
    before = starts[0]
    was = before["device"].partition(":")[0], before["dtype"]
    here = machine.device_type(config), str(machine.dtype(config)).removeprefix("torch.")
    if was != here:
        allowed = f"was computed on {was[0]} in {was[1]}; here it would be {here[0]} in {here[1]}: other latents"
        raise ConfigError("run", folder.name, allowed)
    return config.replace(output_dir=folder.absolute(), threads=before["threads"])
