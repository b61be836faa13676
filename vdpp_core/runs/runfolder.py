"""The run folder: the contract between ranks, launchers and notebooks. Its files and who writes them.

config.json      the RunConfig, by whoever starts the run
events/          rank-N.jsonl, by each rank
latents/         sample-NNN.safetensors (key "latents", B C F H W), by a replica's last stage when the sample is done;
                 with the SHA-256 of its bytes and that of origin.json's record
origin.json      what the samples are made from (origin.py), by rank 0; by a rank of each of several machines
videos/          generate: sample-NNN.mp4, .gif and .png (a row of frames), by whichever rank decoded it;
                 contact-sheet.png (the first 32 videos) and input.png, by rank 0
predicted.json   the predicted peak memory of a rank, by whoever starts the run
result.json      last, atomically, by rank 0; by the launcher or a surviving rank after a failure
job.json         the launcher's process, where there is one (launch/); job-HOST.json on each of several machines
logs/            what torchrun kept of each rank; logs/HOST/ on each of several machines
todo.json        of a resumed run: what this attempt has to do (resuming.py)
attempts/N/      of a resumed run: events/, logs/, result.json, job*.json and todo.json of attempt N, which ended early,
                 and what is made again of its latents/ and videos/
.resuming        locked by who resumes it
.reserve         room for the last words on a full disk; goes when the run ends

Of a run over several machines each has a folder; on shared storage that is the same one.
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
from vdpp_core.runs.events import Event, Follower, events_paths
from vdpp_core.runs.files import read_object, write_atomically
from vdpp_core.runs.processes import _launcher_path

__all__ = ["Event", "events_paths", "write_atomically"]  # those of others that belong to the folder

PARTS = ("events", "latents", "videos", "logs")
OUTCOMES = ("ok", "oom", "failed", "stopped")
_LAST_WORDS = 256 * 1024  # bytes, and those of each sample in a result
_OF_A_SAMPLE = 100


def runs_root(here: Path | None = None) -> Path:
    """runs/ of the clone that this package lies in when the caller, or `here`, is in that clone, else of that place."""
    project, here = Path(__file__).resolve().parents[2], here or Path.cwd()
    inside = (project / "pyproject.toml").exists() and here.is_relative_to(project)
    return (project if inside else here) / "runs"


def holds(folder: Path, name: str) -> bool:
    """Whether there is such a folder, with such a file."""
    try:
        return (folder / name).is_file()
    except OSError:  # no name that a file could have
        return False


def is_run(folder: Path) -> bool:
    """Whether it is a run's folder, also one that lost its config.json: who watches over it is still told there."""
    return any(holds(folder, name) for name in ("config.json", "job.json", _launcher_path(folder).name))


def new_run_id(config: RunConfig) -> str:
    layout = str(config.parallel or "").replace(" × ", "-").replace(" ", "")
    model = re.sub(r"[^\w.-]", "_", Path(config.model_id).name)[:40] if config.model_id else config.model
    return "-".join([time.strftime("%Y%m%d-%H%M%S"), config.command, model, layout, secrets.token_hex(2)])


def check_place(config: RunConfig) -> Path:
    """Where the run folder will be.

    Raises:
        ConfigError: there is something at that place already, or it cannot be written.
    """
    folder = (config.output_dir or runs_root() / new_run_id(config)).absolute()
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError("output_dir", folder, "exists already: name a new folder")
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError as error:
        raise ConfigError("output_dir", folder, f"must be a folder that can be written ({error.strerror})") from None
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ConfigError("output_dir", folder, f"must be a folder that can be written ({nearest} is not)")
    return folder


def create(config: RunConfig) -> Path:
    """Make the run folder and write config.json.

    Raises:
        ConfigError: there is something at that place already, or it cannot be written.
    """
    folder = check_place(config)
    try:
        for part in ("events", "latents", "logs"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "config.json", config.replace(output_dir=folder).to_json())
        files.reserve(folder, room(config))
    except OSError as error:
        (folder / "config.json").unlink(missing_ok=True)  # or it would be a run that never starts
        raise ConfigError("output_dir", folder, f"must be a folder that can be written ({error.strerror})") from None
    return folder


def room(config: RunConfig) -> int:
    """Bytes that suffice for the last words of all ranks and the result."""
    return _LAST_WORDS + _OF_A_SAMPLE * config.num_samples


def join(config: RunConfig) -> Path:
    """Make the run folder named by the configuration, unless another machine of this run did so on shared storage.

    Raises:
        ConfigError: that machine's configuration is another one; or there is something else at that place.
    """
    folder = Path(config.output_dir or "").absolute()
    path, draft = folder / "config.json", folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        if not path.exists():
            check_place(config)
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(draft, config.replace(output_dir=folder).to_json())
            with contextlib.suppress(FileExistsError):  # of two machines that come here the first one wins
                path.hardlink_to(draft)
            draft.unlink()
        if events_paths(folder) or _launcher_path(folder).exists() or (folder / "result.json").exists():
            raise ConfigError("output_dir", folder, "exists already: name a new folder or --rdzv-id")
        theirs = facts(RunConfig.read(folder))
        for name, value in facts(config).items():
            if value != theirs[name]:
                raise ConfigError(name, value, f"must be as on the machine that came first, {theirs[name]}")
        for part in ("events", "latents", "logs"):
            (folder / part).mkdir(exist_ok=True)
        files.reserve(folder, room(config))
        logs_path(folder).mkdir()  # the name of this machine is taken from now on
    except OSError as error:
        raise ConfigError("output_dir", folder, f"must be a folder that can be written ({error.strerror})") from None
    return folder


def facts(config: RunConfig) -> dict[str, Any]:
    """What is the same on all machines of a run."""
    return config.model_dump(mode="json", exclude={"output_dir", "parallel"}) | config.layout.model_dump()


def read_events(folder: Path) -> list[Event]:
    """All ranks' events in the order of time; lines that hold none are left out (`events.Follower` names them)."""
    return Follower(folder).events()


def longest_silence_s(folder: Path) -> float:
    """Seconds since the rank that has been silent for longest wrote an event."""
    return time.time() - min((path.stat().st_mtime for path in events_paths(folder)), default=time.time())


def write_result(folder: Path, result: dict[str, Any]) -> None:
    """The last of the files, in the room that was kept for it."""
    files.release(folder)
    write_atomically(folder / "result.json", json.dumps(result, indent=2) + "\n")


def write_prediction(folder: Path, memory: dict[str, float]) -> None:
    """Keep the predicted peak memory of a rank, in GB by part, for the result."""
    write_atomically(folder / "predicted.json", json.dumps({"memory": memory}) + "\n")


def read_prediction(folder: Path) -> dict[str, float] | None:
    """What `write_prediction` wrote; None where nobody predicted."""
    found = read_object(folder / "predicted.json", "memory")
    return found and found["memory"]


def read_result(folder: Path) -> dict[str, Any] | None:
    """result.json, or None while there is none; what was in a damaged one is computed again."""
    result = read_object(folder / "result.json", "outcome")
    return result if result is None or result["outcome"] in OUTCOMES else None


def logs_path(folder: Path) -> Path:
    """Where this machine, one of several, keeps its logs."""
    return folder / "logs" / socket.gethostname()


def logs_of(folder: Path, rank: int) -> str:
    """A pattern below the folder: where torchrun keeps what a rank printed, by the rank's number on its machine."""
    if not any(folder.glob("job-*.json")):
        return f"logs/*/attempt_0/{rank}"
    host = {event["rank"]: event["host"] for event in read_events(folder) if event["kind"] == "start"}
    if rank not in host:
        return "logs/none"
    first = min(each for each in host if host[each] == host[rank])
    return f"logs/{host[rank]}/*/attempt_0/{rank - first}"
