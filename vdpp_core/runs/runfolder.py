"""The run folder: the contract between ranks, launchers and notebooks. Its files and who writes them.

config.json      the RunConfig, by whoever starts the run
manifest.csv     or manifest.jsonl: a copy of the run's manifest, where it has one, by whoever starts the run
events/          rank-N.jsonl, by each rank
latents/         sample-NNN.safetensors (key "latents", B C F H W), by a replica's last stage when the sample is done,
                 with the SHA-256 of its bytes and of the record in origin.json
origin.json      what the samples are made from (origin.py), by rank 0; by one rank of each of several machines
videos/          generate: sample-NNN.mp4, .gif and .png (a row of frames), by the rank that decoded it;
                 contact-sheet.png (the first 32 videos) and input.png, by rank 0
profile/         of a run with --profile: rank-N.json.gz, what torch.profiler recorded of two steps, by each rank
videos.csv       of a run with a manifest: the row that each video was made from, by rank 0
predicted.json   what was predicted before the run: peak memory of a rank, bytes handed on; by the launcher; the times
                 as well where whoever started the run had seen them
result.json      last, atomically, by rank 0; after a failure by the launcher or a surviving rank
job.json         the launcher's process, where there is one (launch/); job-HOST.json on each of several machines
logs/            what torchrun kept of each rank; logs/HOST/ on each of several machines
todo.json        of a resumed run: what this attempt has to do (launch/resuming.py)
attempts/N/      of a resumed run: events/, logs/, result.json, job*.json and todo.json of attempt N, which ended early,
                 and those of its latents/ and videos/ that are made again
.resuming        locked while the run is being resumed
.reserve         room for the last words on a full disk; removed when the run ends

Of a run over several machines each has a folder; on shared storage it is the same one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import time
from pathlib import Path
from typing import Any

from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.runs import files
from vdpp_core.runs.events import events_paths
from vdpp_core.runs.files import write_atomically
from vdpp_core.runs.processes import launcher_path

PARTS = ("events", "latents", "videos", "logs")
TODO = "todo.json"
OUTCOMES = ("ok", "oom", "failed", "stopped")
_LAST_WORDS = 256 * 1024  # bytes, and those of each sample in a result
_OF_A_SAMPLE = 100


def runs_root(here: Path | None = None) -> Path:
    """runs/ of the clone of this project that the current folder, or `here`, lies in; elsewhere runs/ right there."""
    project, here = Path(__file__).resolve().parents[2], here or Path.cwd()
    inside = (project / "pyproject.toml").exists() and here.is_relative_to(project)
    return (project if inside else here) / "runs"


def holds(folder: Path, name: str) -> bool:
    """Whether a folder exists and has such a file."""
    try:
        return (folder / name).is_file()
    except OSError:  # not a name that a file could have
        return False


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's. One that lost its config.json still records its launcher."""
    return any(holds(folder, name) for name in ("config.json", "job.json", launcher_path(folder).name))


def new_run_id(config: RunConfig) -> str:
    """A name for the run folder: time, command, model, layout and four random digits."""
    model = re.sub(r"[^\w.-]", "_", Path(config.model_id).name)[:40] if config.model_id else config.model
    layout = config.parallel.slug if config.parallel else ""
    return "-".join([time.strftime("%Y%m%d-%H%M%S"), config.command, model, layout, secrets.token_hex(2)])


def check_place(config: RunConfig) -> Path:
    """Where the run folder will be.

    Raises:
        ConfigError: something exists there already, or it cannot be written.
    """
    folder = (config.output_dir or runs_root() / new_run_id(config)).absolute()
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError("output_dir", folder, "exists already: name a new folder")
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError as error:
        raise _not_writable(folder, error) from None
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ConfigError("output_dir", folder, f"must be a folder that can be written ({nearest} is not)")
    return folder


def _not_writable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError("output_dir", folder, f"must be a folder that can be written ({error.strerror})")


def create(config: RunConfig) -> Path:
    """Make the run folder and write config.json.

    Raises:
        ConfigError: something exists there already, or it cannot be written.
    """
    folder = check_place(config)
    try:
        for part in ("events", "latents", "logs"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        _copy_manifest(config, folder)
        write_atomically(folder / "config.json", config.replace(output_dir=folder).to_json())
        reserve(folder, config)
    except OSError as error:
        (folder / "config.json").unlink(missing_ok=True)  # or it would be a run that never starts
        raise _not_writable(folder, error) from None
    return folder


def _copy_manifest(config: RunConfig, folder: Path) -> None:
    if config.manifest is not None:
        copied = config.manifest.read_bytes()
        files.write_whole(folder / f"manifest{config.manifest.suffix.lower()}", lambda draft: draft.write_bytes(copied))


def reserve(folder: Path, config: RunConfig) -> None:
    """Reserve room on the disk for the last words of all ranks and the result."""
    files.reserve(folder, _LAST_WORDS + _OF_A_SAMPLE * config.num_samples)


def join(config: RunConfig) -> Path:
    """Make the run folder that the configuration names, or use the one that another machine made on shared storage.

    Raises:
        ConfigError: that machine's configuration is different, or something else exists at that place.
    """
    folder = Path(config.output_dir or "").absolute()
    path, draft = folder / "config.json", folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        if not path.exists():
            check_place(config)
            folder.mkdir(parents=True, exist_ok=True)
            _copy_manifest(config, folder)
            write_atomically(draft, config.replace(output_dir=folder).to_json())
            with contextlib.suppress(FileExistsError):  # of two machines that arrive together the first one wins
                path.hardlink_to(draft)
            draft.unlink()
        if events_paths(folder) or launcher_path(folder).exists() or (folder / "result.json").exists():
            raise ConfigError("output_dir", folder, "exists already: name a new folder or --rdzv-id")
        theirs = facts(RunConfig.read(folder))
        for name, value in facts(config).items():
            if value != theirs[name]:
                raise ConfigError(name, value, f"must be as on the machine that came first, {theirs[name]}")
        for part in ("events", "latents", "logs"):
            (folder / part).mkdir(exist_ok=True)
        reserve(folder, config)
        logs_path(folder).mkdir()  # claims the name of this machine
    except OSError as error:
        raise _not_writable(folder, error) from None
    return folder


def facts(config: RunConfig) -> dict[str, Any]:
    """What must be the same on all machines of a run."""
    return config.model_dump(mode="json", exclude={"output_dir", "parallel"}) | config.layout.model_dump()


def write_result(folder: Path, result: dict[str, Any]) -> None:
    """Write result.json, the last of the files, in the room that was reserved for it."""
    files.release(folder)
    write_atomically(folder / "result.json", json.dumps(result, indent=2) + "\n")


def write_prediction(folder: Path, prediction: dict[str, Any]) -> None:
    """Record what was predicted before a run, as of `Run.prediction`, for the result."""
    write_atomically(folder / "predicted.json", json.dumps(prediction) + "\n")


def logs_path(folder: Path) -> Path:
    """Where this machine, one of several, keeps its logs."""
    return folder / "logs" / socket.gethostname()


def video_names(config: RunConfig, sample: int) -> list[str]:
    """The names, without suffix, of the files of a sample's videos: one for each video of its batch."""
    batch = config.shape[0]
    return [f"sample-{sample:03d}" + (f"-{index}" if batch > 1 else "") for index in range(batch)]
