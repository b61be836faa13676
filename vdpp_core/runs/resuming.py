"""A run that ended early, taken up again in its own folder: what is missing is computed, with the same latents.

Sample m depends on the run's origin (origin.py) and on seed + m alone, so nothing has to be known of the others. What
is there is trusted only where its checksum says so, and kept only where it was made from what the others will be made
from. The earlier attempt's events stay, in attempts/N/, with what is made again, and are not counted.
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

from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.execution import resolve
from vdpp_core.runs import files, origin, runfolder, saved_latents
from vdpp_core.runs.files import DamagedError
from vdpp_core.runs.origin import Origin

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
    told = files.read_object(folder / TODO, "attempt", "latents", "kept", "videos")
    return Work(**told) if told else Work(attempt=1, latents=range(config.num_samples))


def whole(folder: Path, config: RunConfig) -> tuple[list[int], list[str]]:
    """The samples whose latents are there, and a line on each file of them that cannot be trusted."""
    found, damaged = [], []
    for sample in range(config.num_samples):
        try:
            _check(saved_latents.load_latents(folder, sample), config, saved_latents.latents_path(folder, sample))
            found.append(sample)
        except FileNotFoundError:
            pass
        except DamagedError as error:
            damaged.append(f"{error}; computed again")
    return found, damaged


def _missing(
    folder: Path, config: RunConfig, before: Origin | None, decoded_otherwise: str | None
) -> tuple[Work, list[str]]:
    """What is left to do, and a line on what is there and made again.

    Samples are kept that were made from what the others will be made from, and their videos unless those are
    `decoded_otherwise` by now.
    """
    kept, lines = whole(folder, config)
    if before is None and kept:
        lines.append(f"{folder.name} has no record of what its samples were made from; all are computed again")
        kept = []
    for sample in list(kept):
        if before and saved_latents.origin_of(folder, sample) != before.digest:
            path = saved_latents.latents_path(folder, sample)
            lines.append(f"{path}: is not one of the samples that {origin.FILE} is about; computed again")
            kept.remove(sample)
    videos: list[int] = []
    if config.command == "generate":
        anew = config.compare_official or decoded_otherwise is not None
        videos = [sample for sample in kept if anew or not _has_videos(folder, config, sample)]
        lines += [f"{decoded_otherwise}; videos are made again"] if decoded_otherwise and videos else []
    latents = sorted(set(range(config.num_samples)) - set(kept))
    return Work(len(_attempts(folder)) + 2, latents, kept, videos), lines


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
        A line on each file that is damaged, or made otherwise, and will be made again; and on what may differ.

    Raises:
        ConfigError: nothing is missing, nothing was kept, or other latents would be computed here and now. Nothing was
            changed.
    """
    config, name = RunConfig.read(folder), folder.name
    if not config.save_latents:
        raise ConfigError("run", name, "kept no latents (save_latents), so nothing of it is left: start it anew")
    before, ended_well = origin.read(folder), (runfolder.read_result(folder) or {}).get("outcome") == "ok"
    if before is None and ended_well and len(whole(folder, config)[0]) == config.num_samples:
        raise _is_complete(name)  # as runs of before there were records
    config = as_before(folder, config)
    decoded_otherwise = origin.other_videos(before, config) if before else None
    todo, lines = _missing(folder, config, before, decoded_otherwise)
    if ended_well and not todo.latents and not todo.videos:
        raise _is_complete(name)
    try:
        _put_aside(folder, config, todo, todo.videos if decoded_otherwise else ())
        if before is not None:
            origin.write(folder, before.model_copy(update={"videos": origin.videos_of(config)}))
        files.write_atomically(folder / "config.json", config.to_json())
        files.write_atomically(folder / TODO, json.dumps(asdict(replace(todo, nodes=nodes))) + "\n")
        if (folder / "result.json").exists():  # last: as long as it is there, the run has ended and can be resumed
            (folder / "result.json").rename(_aside(folder, todo) / "result.json")
    except OSError as error:
        files.release(folder)
        raise ConfigError("run", name, f"cannot be resumed: {os.strerror(error.errno or 0)} in {folder}") from None
    return lines + (origin.other_versions(before) if before else [])


def _is_complete(name: str) -> ConfigError:
    return ConfigError("run", name, "has all its samples, nothing is missing")


def _aside(folder: Path, todo: Work) -> Path:
    return folder / "attempts" / str(todo.attempt - 1)


def _put_aside(folder: Path, config: RunConfig, todo: Work, other_videos: Sequence[int]) -> None:
    """Move what the last attempt left, what is made again, and videos that will be others, into attempts/N/."""
    aside = _aside(folder, todo)
    for draft in [*folder.glob("latents/.*"), *folder.glob("videos/.*")]:
        draft.unlink()  # of a process that died in the middle of writing
    files.reserve(folder, runfolder.room(config))
    aside.mkdir(parents=True)
    for path in (folder / "events", folder / "logs", folder / TODO, *folder.glob("job*.json")):
        if path.exists():
            path.rename(aside / path.name)
    for part in ("events", "logs", "latents"):
        (folder / part).mkdir(exist_ok=True)
    names = [name for sample in (*todo.latents, *other_videos) for name in saved_latents.video_names(config, sample)]
    stale = [saved_latents.latents_path(folder, sample) for sample in todo.latents]
    stale += [folder / "videos" / f"{name}{suffix}" for name in names for suffix in _ENDS]
    for path in stale:
        if path.exists():
            (aside / path.parent.name).mkdir(exist_ok=True)
            path.rename(aside / path.parent.name / path.name)


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

    names = saved_latents.video_names(config, sample)
    return all(whole(folder / "videos" / f"{name}{suffix}") for name in names for suffix in _ENDS)


def as_before(folder: Path, config: RunConfig) -> RunConfig:
    """The configuration with what the earlier attempt was given by its machine, on which the bits depend.

    Raises:
        ConfigError: other latents would be computed: by this machine, or from what is there by now.
    """
    config, record = config.replace(output_dir=folder.absolute()), origin.read(folder)
    if record is None:
        return config
    before, config = record.samples, config.replace(threads=record.samples.threads)
    here = resolve(config)
    if (before.device, before.dtype) != (here.device_type, here.dtype_name):
        allowed = f"was computed on {before.device} in {before.dtype}; here it would be "
        raise ConfigError("run", folder.name, f"{allowed}{here.device_type} in {here.dtype_name}: other latents")
    origin.check(record, origin.of(config, here), folder.name)
    return config
