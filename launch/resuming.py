"""Resuming a run that ended early, in its own folder: what is missing is computed, with the same latents.

Sample m depends only on the run's origin (`vdpp_core.runs.origin`) and on seed + m. Saved latents are trusted only
where their checksum matches, and kept only where they were made from what the others will be made from. The earlier
attempt's events go to attempts/N/, together with files that are made again, and are not counted.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.execution import resolve
from vdpp_core.runs import files, origin, runfolder, saved_latents
from vdpp_core.runs.files import DamagedError
from vdpp_core.runs.origin import Origin
from vdpp_core.runs.run import Run, Work

_ENDS = {".mp4": b"", ".gif": b";", ".png": b"IEND\xaeB`\x82"}  # an MP4 is checked when it is written


def intact(run: Run) -> tuple[list[int], list[str]]:
    """The samples whose saved latents can be trusted, and a line on each file that cannot."""
    found, damaged = [], []
    for sample in range(run.config.num_samples):
        path = run.latents_path(sample)
        try:
            latents = run.load_latents(sample)
            if latents.shape != run.config.shape:
                raise DamagedError(path, f"its shape is {tuple(latents.shape)}, not {run.config.shape}")
            if not torch.isfinite(latents).all():
                raise DamagedError(path, "its numbers are not finite")
            found.append(sample)
        except FileNotFoundError:
            pass
        except DamagedError as error:
            damaged.append(f"{error}; computed again")
    return found, damaged


def _missing(run: Run, before: Origin | None, decoded_otherwise: str | None) -> tuple[Work, list[str]]:
    """What is left to do, and a line on each existing file that is made again.

    Samples with the same origin as the others are kept, and so are their videos, unless those would now be
    `decoded_otherwise`.
    """
    kept, lines = intact(run)
    if before is None and kept:
        lines.append(f"{run.id} has no record of what its samples were made from; all are computed again")
        kept = []
    for sample in list(kept):
        path = run.latents_path(sample)
        if before and saved_latents.origin_of(path) != before.digest:
            lines.append(f"{path}: was not made from what {origin.FILE} records; computed again")
            kept.remove(sample)
    videos: list[int] = []
    if run.config.command == "generate":
        anew = run.config.compare_official or decoded_otherwise is not None
        videos = [sample for sample in kept if anew or not all(map(_is_whole, _videos(run, sample)))]
        lines += [f"{decoded_otherwise}; videos are made again"] if decoded_otherwise and videos else []
    latents = sorted(set(range(run.config.num_samples)) - set(kept))
    attempts = len(list((run.folder / "attempts").glob("*")))
    return Work(attempts + 2, latents, kept, videos), lines


@contextmanager
def lock(run: Run) -> Iterator[None]:
    """Keep other processes from resuming a run at the same time.

    Raises:
        ConfigError: another process is resuming it.
    """
    try:
        file = (run.folder / ".resuming").open("w")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError("run", run.id, "is being resumed by another process") from None
    except OSError as error:
        raise ConfigError("run", run.id, f"cannot be resumed ({error.strerror})") from None
    with file:
        yield


def is_resumed(run: Run, nodes: Mapping[str, Any]) -> bool:
    """Whether another machine has resumed a run in this shared folder, and expects this one."""
    return run.work.nodes == nodes and run.result() is None


def plan(run: Run) -> tuple[RunConfig, Work, list[str], str | None]:
    """What resuming a run would do: its configuration, what is left to do, a line on each file that is made again, and
    why the kept samples' videos are.

    Raises:
        ConfigError: nothing is missing, nothing was kept, or this machine would now compute other latents.
    """
    if not run.config.save_latents:
        raise ConfigError("run", run.id, "saved no latents (save_latents), so nothing can be kept: start a new run")
    before, ended_well = origin.read(run.folder), (run.result() or {}).get("outcome") == "ok"
    if before is None and ended_well and len(intact(run)[0]) == run.config.num_samples:  # before origins were recorded
        raise _is_complete(run)
    config = as_before(run)
    decoded_otherwise = origin.other_videos(before, config) if before else None
    todo, lines = _missing(run, before, decoded_otherwise)
    if ended_well and not todo.latents and not todo.videos:
        raise _is_complete(run)
    return config, todo, lines, decoded_otherwise


def begin(run: Run, nodes: Mapping[str, Any] | None = None) -> list[str]:
    """Set the last attempt's files aside and record what is left to do. The run can then be started again.

    Args:
        nodes: for several machines, the arguments that each is called with.

    Returns:
        A line on each file that is damaged or outdated and will be made again, and on what may come out differently.

    Raises:
        ConfigError: nothing is missing, nothing was kept, or this machine would now compute other latents. Nothing was
            changed.
    """
    folder, (config, todo, lines, decoded_otherwise) = run.folder, plan(run)
    before = origin.read(folder)
    aside = folder / "attempts" / str(todo.attempt - 1)
    try:
        _put_aside(run, aside, todo, todo.videos if decoded_otherwise else ())
        if before is not None:
            origin.write(folder, before.model_copy(update={"videos": origin.videos_of(config)}))
        files.write_atomically(folder / "config.json", config.to_json())
        files.write_atomically(folder / runfolder.TODO, json.dumps(asdict(replace(todo, nodes=nodes))) + "\n")
        if (folder / "result.json").exists():  # last: until it is gone the run has ended and can be resumed
            (folder / "result.json").rename(aside / "result.json")
    except OSError as error:
        files.release(folder)
        raise ConfigError("run", run.id, f"cannot be resumed: {os.strerror(error.errno or 0)} in {folder}") from None
    return lines + (origin.other_versions(before) if before else [])


def _is_complete(run: Run) -> ConfigError:
    return ConfigError("run", run.id, "has all its samples, nothing is missing")


def _put_aside(run: Run, aside: Path, todo: Work, other_videos: Sequence[int]) -> None:
    """Move what belongs to the last attempt, and the latents and videos that are made again, into attempts/N/."""
    folder = run.folder
    for draft in [*folder.glob("latents/.*"), *folder.glob("videos/.*")]:
        draft.unlink()  # of a process that died while writing
    runfolder.reserve(folder, run.config)
    aside.mkdir(parents=True)
    for path in (folder / "events", folder / "logs", folder / runfolder.TODO, *folder.glob("job*.json")):
        if path.exists():
            path.rename(aside / path.name)
    for part in ("events", "logs", "latents"):
        (folder / part).mkdir(exist_ok=True)
    stale = [run.latents_path(sample) for sample in todo.latents]
    stale += [path for sample in (*todo.latents, *other_videos) for path in _videos(run, sample)]
    for path in stale:
        if path.exists():
            (aside / path.parent.name).mkdir(exist_ok=True)
            path.rename(aside / path.parent.name / path.name)


def _videos(run: Run, sample: int) -> list[Path]:
    return [path for suffix in _ENDS for path in run.video_paths(sample, suffix)]


def _is_whole(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0 and path.read_bytes().endswith(_ENDS[path.suffix])


def as_before(run: Run) -> RunConfig:
    """The configuration, with the settings that the earlier attempt took from its machine and that affect the bits.

    Raises:
        ConfigError: this machine, or the present files, would give other latents.
    """
    config, record = run.config.replace(output_dir=run.folder.absolute()), origin.read(run.folder)
    if record is None:
        return config
    before, config = record.samples, config.replace(threads=record.samples.threads)
    here = resolve(config)
    if (before.device, before.dtype) != (here.device_type, here.dtype_name):
        allowed = f"was computed on {before.device} in {before.dtype}; here, {here.device_type} in {here.dtype_name}"
        raise ConfigError("run", run.id, f"{allowed} gives other latents")
    origin.check(record, origin.of(config, here), run.id)
    return config
