"""The run folder: the contract between ranks, launchers and notebooks. Its files and who writes them.

config.json      the RunConfig, by whoever starts the run
events/          rank-N.jsonl, by each rank
latents/         sample-NNN.safetensors (key "latents", B C F H W), by a replica's last stage when the sample is done
videos/          generate: sample-NNN.mp4, .gif and .png (a row of frames), by whichever rank decoded it;
                 contact-sheet.png (the first 32 videos) and input.png, by rank 0
result.json      last, atomically, by rank 0; by the launcher or a surviving rank after a failure
job.json         the launcher's process, where there is one (launch/)
logs/            what torchrun kept of each rank
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import time
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file, save_file
from torch import Tensor

from vdpp_core.config import RunConfig
from vdpp_core.errors import ConfigError

Event = dict[str, Any]


def runs_root() -> Path:
    """runs/ of the clone that this package lies in when the caller stands in that clone, else of where they stand."""
    project, here = Path(__file__).resolve().parent.parent, Path.cwd()
    inside = (project / "pyproject.toml").exists() and here.is_relative_to(project)
    return (project if inside else here) / "runs"


def holds(folder: Path, name: str) -> bool:
    """Whether there is such a folder, with such a file."""
    try:
        return (folder / name).is_file()
    except OSError:  # no name that a file could have
        return False


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
    except OSError as error:
        raise ConfigError("output_dir", folder, f"must be a folder that can be written ({error.strerror})") from None
    return folder


def write_atomically(path: Path, text: str) -> None:
    """All of it or nothing, also when the process dies in the middle."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def save_latents(folder: Path, sample: int, latents: Tensor) -> None:
    """latents (B, C, F, H, W) of a finished sample, whole or not at all."""
    path = latents_path(folder, sample)
    draft = path.with_suffix(f".{secrets.token_hex(4)}")
    save_file({"latents": latents.contiguous().cpu()}, draft)
    draft.replace(path)


def latents_path(folder: Path, sample: int) -> Path:
    return folder / "latents" / f"sample-{sample:03d}.safetensors"


def load_latents(folder: Path, sample: int) -> Tensor:
    """(B, C, F, H, W) of a finished sample."""
    return load_file(latents_path(folder, sample))["latents"]


def video_names(config: RunConfig, sample: int) -> list[str]:
    """What the files of a sample's videos are called; one each, or one for each of its batch."""
    batch = config.shape[0]
    return [f"sample-{sample:03d}" + (f"-{index}" if batch > 1 else "") for index in range(batch)]


def events_paths(folder: Path) -> list[Path]:
    return sorted((folder / "events").glob("rank-*.jsonl"))


def read_events(folder: Path) -> list[Event]:
    """All ranks' events in the order of time. A line that is still being written is left out."""
    events = []
    for path in events_paths(folder):
        for line in path.read_text(errors="replace").splitlines():
            try:
                events.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return sorted(events, key=lambda event: event["t"])


def silence_s(folder: Path) -> float:
    """Seconds since any rank last wrote an event."""
    return time.time() - max((path.stat().st_mtime for path in events_paths(folder)), default=time.time())


def read_result(folder: Path) -> dict[str, Any] | None:
    """result.json, or None while there is none."""
    return _read_json(folder / "result.json", "outcome")


def write_launcher(folder: Path, pid: int) -> None:
    """Record the process that watches over the run and settles it after a bad end."""
    facts = {"pid": pid, "created": psutil.Process(pid).create_time(), "host": socket.gethostname()}
    write_atomically(folder / "job.json", json.dumps(facts) + "\n")


def read_launcher(folder: Path) -> dict[str, Any] | None:
    """pid and creation time of that process; None where torchrun was called by hand."""
    return _read_json(folder / "job.json", "pid", "created", "host")


def _read_json(path: Path, *names: str) -> dict[str, Any] | None:
    """What a file that is written whole says; None while there is none.

    Raises:
        ConfigError: it is damaged, or one of the names is not in it.
    """
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not found.keys() >= set(names):
        raise ConfigError("folder", path.parent, f"must have whole JSON in {path.name}")
    return found


def launcher_alive(folder: Path) -> bool:
    """Whether somebody watches over the run; of another machine's launcher it is assumed."""
    launcher = read_launcher(folder)
    if launcher is None:
        return False
    return launcher["host"] != socket.gethostname() or _is_process(launcher["pid"], launcher["created"])


def is_rank(start: Event) -> bool:
    """Whether the process of a rank's start event is still that rank, and on this machine."""
    return start["host"] == socket.gethostname() and _is_process(start["pid"], start["created"])


def has_vanished(start: Event) -> bool:
    """Whether the process of a rank's start event is known to be gone; of another machine's nothing is known."""
    return start["host"] == socket.gethostname() and not is_rank(start)


def stands_still(start: Event) -> bool:
    """Whether the process of a rank's start event is known to be stopped, as by SIGSTOP."""
    return is_rank(start) and psutil.Process(start["pid"]).status() == psutil.STATUS_STOPPED


def _is_process(pid: int, created: float) -> bool:
    """Whether a process is there, is no zombie, and no later one with the same number."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - created) < 2
    except psutil.NoSuchProcess:
        return False
