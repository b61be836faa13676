"""What this machine is and whether it can do a run: asked before any rank starts. Starts nothing itself."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from vdpp_core.config import MODELS, RunConfig
from vdpp_core.errors import ConfigError, in_one_line, redacted
from vdpp_core.limits import GIB, can_limit
from vdpp_core.media import read_image

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
WEIGHTS = [f"unet/diffusion_pytorch_model{kind}" for kind in (".safetensors", ".fp16.safetensors")]
LIBRARIES = ("torch", "diffusers", "transformers", "accelerate", "safetensors")
PARTS = {  # of a pipeline -> the class that runs here
    "unet": "UNetSpatioTemporalConditionModel",
    "vae": "AutoencoderKLTemporalDecoder",
    "scheduler": "EulerDiscreteScheduler",  # others remember steps, which no hand-off does
}
AMPERE = (8, 0)  # the first compute capability with arithmetic in bf16


def device_type(config: RunConfig) -> str:
    """cuda, mps or cpu; `auto` takes CUDA where there is some, else the CPU."""
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device.partition(":")[0]


def dtype(config: RunConfig) -> torch.dtype:
    """The element type of UNet and latents; `auto` is fp16 on CUDA and fp32 elsewhere."""
    if config.dtype == "auto":
        return torch.float16 if device_type(config) == "cuda" else torch.float32
    return DTYPES[config.dtype]


def element_size(config: RunConfig) -> int:
    """Bytes of a value of UNet and latents."""
    return torch.empty(0, dtype=dtype(config)).element_size()


def backend(config: RunConfig) -> str:
    """nccl or gloo; `auto` is nccl on CUDA and gloo elsewhere."""
    if config.backend == "auto":
        return "nccl" if device_type(config) == "cuda" else "gloo"
    return config.backend


def cards(config: RunConfig, local_ranks: int) -> range:
    """The numbers of the GPUs that so many ranks on this machine use: the one that was named, or one each."""
    named = config.device.partition(":")[2]
    return range(int(named), int(named) + 1) if named else range(local_ranks)


def cores() -> int:
    """Cores that this process may use."""
    return len(_cores_of(psutil.Process()))


def _cores_of(process: psutil.Process) -> set[int]:
    if hasattr(process, "cpu_affinity"):
        return set(process.cpu_affinity() or ())
    return set(range(os.cpu_count() or 1))


def threads(config: RunConfig, local_ranks: int) -> int:
    """CPU threads of each of so many ranks on this machine: its share of the cores. Other runs do not change it, since
    the bits depend on it."""
    return config.threads or max(1, cores() // local_ranks)


def before_start(config: RunConfig, local_ranks: int) -> list[str]:
    """What is to be said before a run starts on so many ranks of this machine, about its cores and its disk."""
    found = []
    if device_type(config) == "cpu":
        each = threads(config, local_ranks)
        if local_ranks * each > cores():
            found.append(f"{local_ranks} × {each} threads on {cores()} cores: ranks take turns, and times say little")
        elif others := in_the_way(config, local_ranks):
            at_work = f"{ranks_of_other_runs(others)} {'is' if others == 1 else 'are'} at work on these {cores()} cores"
            found.append(f"{at_work}: this one will take longer")
    needed = config.num_samples * math.prod(config.shape) * element_size(config) * config.save_latents
    place = (config.output_dir or Path.cwd()).absolute()
    free = shutil.disk_usage(next(path for path in (place, *place.parents) if path.exists())).free
    if needed > free:
        found.append(
            f"the latents of {config.num_samples} samples take {needed / 1e9:.3g} GB, {free / 1e9:.3g} are free"
        )
    return found


def in_the_way(config: RunConfig, local_ranks: int) -> int:
    """Ranks of other runs that a run on so many ranks of this machine takes turns with: none where there are cores for
    all of them, or GPUs."""
    if device_type(config) != "cpu":
        return 0
    others = ranks_at_work()
    return others if local_ranks * threads(config, local_ranks) + others > cores() else 0


def ranks_of_other_runs(number: int) -> str:
    return "1 rank of another run" if number == 1 else f"{number} ranks of other runs"


def ranks_at_work() -> int:
    """Ranks of other runs, of this user or another, that share cores with this process."""
    ranks = (process for process in psutil.process_iter(["cmdline"]) if _is_rank(process.info["cmdline"] or []))
    return sum(map(_is_in_company, ranks))


def _is_in_company(process: psutil.Process) -> bool:
    """Whether a rank belongs to another run than this process and may use a core that this one may use."""
    try:
        if process.pid == os.getpid() or not _cores_of(psutil.Process()) & _cores_of(process):
            return False
        meeting = _meeting_place(os.environ)
        return meeting is None or _meeting_place(process.environ()) != meeting
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True  # another user's


def _meeting_place(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """What the ranks of one run, and no others, have in common; None outside of torchrun."""
    found = tuple(environment.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"))
    return found if environment.get("MASTER_PORT") else None


def _is_rank(command: list[str]) -> bool:
    """Whether a process is one, and not the torchrun that started it, which also has its command among its words."""
    return "-m" in command and command[command.index("-m") + 1 :][:1] == ["vdpp_core"]


def hardware() -> dict[str, Any]:
    """What results name: the GPUs, or the CPU and its cores."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "gpus": gpus,
        "cpu": _cpu_name(),
        "cores": cores(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "platform": platform.platform(),
    }


def hardware_name(facts: dict[str, Any]) -> str:
    """`hardware()` or what a result recorded of it, in a few words."""
    if facts["gpus"]:
        return f"{len(facts['gpus'])} × {facts['gpus'][0]}"
    return f"{facts['cpu']}, {facts['cores']} cores"


def versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES}


def git_commit() -> str | None:
    """Of the clone that this package lies in; None where there is none."""
    project = Path(__file__).resolve().parent.parent
    if not (project / ".git").exists():
        return None
    command = ["git", "-C", str(project), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def weights_in_cache(repository: str = str(MODELS["svd"])) -> bool:
    """Whether the UNet's weights of a hub model were downloaded before."""
    import huggingface_hub as hub

    return any(isinstance(hub.try_to_load_from_cache(repository, name), str) for name in WEIGHTS)


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def capacity(config: RunConfig, local_ranks: int) -> int:
    """Bytes that each of so many ranks on this machine may use: its limit, the smallest of their GPUs, what Metal
    recommends as the most, or its share of free memory."""
    if config.memory_limit_gib is not None:
        return int(config.memory_limit_gib * GIB)
    if device_type(config) == "cuda":
        return min(torch.cuda.get_device_properties(card).total_memory for card in cards(config, local_ranks))
    if device_type(config) == "mps":
        return torch.mps.recommended_max_memory()
    return psutil.virtual_memory().available // local_ranks


def check(config: RunConfig, local_ranks: int) -> None:
    """Whether this machine can do the run, whose layout is known, with so many of its ranks.

    Raises:
        ConfigError: one line that says what cannot be and what can.
    """
    _check_device(config, local_ranks)
    _check_memory_options(config)
    _check_dtype(config, local_ranks)
    check_guidance(config)
    check_model(config)
    if config.image_path is not None:
        read_image(config.image_path, config.image_size)


def _check_device(config: RunConfig, local_ranks: int) -> None:
    kind = device_type(config)
    if kind == "cuda":
        gpus = torch.cuda.device_count()
        if not gpus:
            raise ConfigError("device", config.device, "no CUDA device here: use cpu or auto")
        if ":" in config.device and cards(config, local_ranks)[0] >= gpus:
            raise ConfigError("device", config.device, f"must be below cuda:{gpus}, this machine has {gpus}")
        if local_ranks > gpus:
            raise ConfigError("world_size", local_ranks, f"must be at most the GPUs of this machine, {gpus}")
        if local_ranks > 1 and ":" in config.device:
            raise ConfigError("device", config.device, "must be cuda with several ranks: the local rank picks the GPU")
        if config.backend == "gloo" and config.layout.world_size > 1:
            raise ConfigError("backend", "gloo", "must be nccl or auto with several ranks on CUDA: gloo is for CPUs")
    if kind == "mps":
        if not torch.backends.mps.is_available():
            raise ConfigError("device", config.device, "no Apple GPU here: use cpu or auto")
        if local_ranks > 1:
            raise ConfigError("device", config.device, "serves one rank only")
    if kind != "cuda" and config.backend == "nccl":
        raise ConfigError("backend", "nccl", f"needs CUDA devices; on {kind} use gloo or auto")


def _check_memory_options(config: RunConfig) -> None:
    kind = device_type(config)
    if config.memory_limit_gib is not None and not can_limit(kind):
        raise ConfigError("memory_limit_gib", config.memory_limit_gib, f"needs CUDA, or a CPU under Linux; not {kind}")
    if config.fsdp_cpu_offload and kind != "cuda":
        raise ConfigError("fsdp_cpu_offload", True, f"needs CUDA: on {kind} the shards are in the host's memory anyway")


def _check_dtype(config: RunConfig, local_ranks: int) -> None:
    kind = device_type(config)
    if kind == "cuda" and dtype(config) == torch.bfloat16:
        _check_bf16(config, local_ranks)
    elif kind == "cpu" and dtype(config) != torch.float32:
        _try_on_cpu(config)


def _check_bf16(config: RunConfig, local_ranks: int) -> None:
    """PyTorch takes it on older cards, too, and computes it by emulation, where it has a kernel for it at all."""
    for card in cards(config, local_ranks):
        capability = torch.cuda.get_device_capability(card)
        if capability < AMPERE:
            known = f"{torch.cuda.get_device_name(card)}, compute capability {'.'.join(map(str, capability))}"
            raise ConfigError("dtype", config.dtype, f"must be fp16 or fp32: cuda:{card} ({known}) only emulates bf16")


@torch.no_grad()
def _try_on_cpu(config: RunConfig) -> None:
    """Tries the kinds of operation that the UNet is made of; on a CPU some builds lack them in half precision."""
    try:
        values = torch.ones(1, 4, 2, 4, 4, dtype=dtype(config))
        values = torch.nn.functional.conv3d(values, torch.ones(4, 4, 3, 1, 1, dtype=values.dtype), padding=(1, 0, 0))
        values = torch.nn.functional.group_norm(values, 2).flatten(2)
        torch.nn.functional.scaled_dot_product_attention(values, values, values)
    except RuntimeError as error:
        allowed = f"must be fp32, this CPU cannot ({str(error).splitlines()[0]})"
        raise ConfigError("dtype", config.dtype, allowed) from None


def check_guidance(config: RunConfig) -> None:
    """Whether the official pipeline guides with these scales; ConfigError if not.

    It asks twice whether to: by the last frame's scale, and by the largest of all frames in the type of the latents.
    Where the answers differ it fails.
    """
    first, last, frames = config.min_guidance_scale, config.guidance_scale, config.shape[2]
    if last <= 1 or torch.linspace(first, last, frames).to(dtype(config)).max() > 1:
        return
    fails = "and the official pipeline then fails"
    if frames == 1:
        allowed = f"is all the guidance of a single frame, {fails}: must be above 1, or guidance_scale 1"
        raise ConfigError("min_guidance_scale", first, allowed)
    kind = str(dtype(config)).removeprefix("torch.")
    raise ConfigError("guidance_scale", last, f"is 1 in {kind}, {fails}: must be 1, or farther above it")


def check_model(config: RunConfig) -> None:
    """Whether the files that a run needs of its model are there and fit together; ConfigError if not."""
    if config.source is None:
        return
    argument = "model" if config.model_id is None else "model_id"
    if "://" in config.source or redacted(config.source) != config.source:
        raise ConfigError(argument, config.source, "must be a folder or a hub name, no URL and no token")
    folder = Path(config.source)
    try:
        on_disk = folder.exists() or config.source.startswith((".", "/", "~"))
    except OSError as error:
        raise ConfigError(argument, config.source, f"must be a folder or a hub name ({error.strerror})") from None
    parts = ("unet",) if config.image_path is None else ("unet", "vae", "image_encoder")
    for part in parts if on_disk and not config.random_weights else ():
        if not any(folder.glob(f"{part}/*.safetensors")):
            raise ConfigError(argument, config.source, f"must be a pipeline's folder with {part}/*.safetensors")
    for name, kind in _settings_needed(config).items():
        try:
            settings = folder / name if on_disk else _hub_file(config, argument, name)
            if not settings.is_file():
                raise ConfigError(argument, config.source, f"must be a pipeline's folder, it has no {name}")
        except ConfigError:
            if name == "model_index.json" and config.image_path is None:
                continue  # a UNet and a scheduler are enough
            raise
        try:
            told = json.loads(settings.read_bytes())
            found = told.get("_class_name", kind)
        except (ValueError, AttributeError, RecursionError):
            raise ConfigError(argument, config.source, f"must have whole JSON in {name}") from None
        if kind is not None and found != kind:
            raise ConfigError(argument, config.source, f"must have a {kind}, not a {found}, in {name}")
        if name == "model_index.json":
            _check_parts(config, argument, told)
    if on_disk and config.model_id is not None:
        _check_unet(config)


def _check_parts(config: RunConfig, argument: str, index: dict[str, Any]) -> None:
    """Whether the official pipeline would load the classes that run here: those of model_index.json, whatever class the
    settings of a part name."""
    places = {part: place for part, place in index.items() if isinstance(place, list) and len(place) == 2}
    for part, (library, _) in places.items():
        if library not in (None, "diffusers", "transformers"):
            allowed = f"must have parts of diffusers and transformers, not code of its own ({part}: {library})"
            raise ConfigError(argument, config.source, allowed)
    for part, kind in PARTS.items():
        named = places.get(part, [None, None])[1]
        if named != kind and (part != "vae" or config.image_path is not None):
            allowed = f"must have a {kind}: model_index.json names {named or 'none'}, which the official pipeline loads"
            raise ConfigError(argument, config.source, allowed)


def _check_unet(config: RunConfig) -> None:
    from vdpp_core.unets import on_meta, weights  # seconds that the models of the package do not need
    from vdpp_core.unets.svd import weights_folder

    try:
        structure = on_meta(config, dtype(config))
    except (ValueError, TypeError, KeyError, IndexError, RuntimeError, ZeroDivisionError) as error:
        words = in_one_line(str(error))[:120]
        raise ConfigError("model_id", config.source, f"must describe a UNet in unet/config.json ({words})") from None
    if not config.random_weights:
        weights.check(weights_folder(config, dtype(config)), dtype(config), structure)


def _settings_needed(config: RunConfig) -> dict[str, str | None]:
    """The files that a run reads of a pipeline -> the class that each must name."""
    needed: dict[str, str | None] = {
        "unet/config.json": PARTS["unet"],
        "scheduler/scheduler_config.json": PARTS["scheduler"],
    }
    if config.image_path is not None:
        needed["vae/config.json"] = PARTS["vae"]
        needed |= {"image_encoder/config.json": None, "feature_extractor/preprocessor_config.json": None}
    return needed | {"model_index.json": None if config.image_path is None else "StableVideoDiffusionPipeline"}


def _hub_file(config: RunConfig, argument: str, name: str) -> Path:
    """A settings file from the cache or the hub; one answer at once where the hub cannot be reached."""
    import huggingface_hub as hub
    from huggingface_hub import errors

    # those of whichever HTTP library the hub client is built on
    transport_errors: tuple[type[BaseException], ...] = errors.HfHubHTTPError.__bases__
    repository = str(config.source)
    try:
        cached = hub.try_to_load_from_cache(repository, name)
        if isinstance(cached, str) and (config.random_weights or weights_in_cache(repository)):
            return Path(cached)
        hub.get_hf_file_metadata(hub.hf_hub_url(repository, name), timeout=10)
        return Path(hub.hf_hub_download(repository, name))
    except errors.GatedRepoError:
        allowed = "is gated: accept its licence on the hub, then log in with `hf auth login`"
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        allowed = "no such model on the hub; if it is private, log in with `hf auth login`"
    except errors.EntryNotFoundError:
        allowed = f"must be a Stable Video Diffusion, it has no {name}"
    except transport_errors:
        allowed = "is not in the cache and the hub cannot be reached: log in (`hf auth login`) where it can"
    shown = repository if config.model_id else f"{config.model} ({repository})"
    raise ConfigError(argument, shown, f"{allowed}, or pass a folder with --model-id")
