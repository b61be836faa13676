"""Checks that a pipeline's files exist and fit together, before any rank starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError, in_one_line, redacted
from vdpp_core.config.execution import Execution
from vdpp_core.config.fields import MODELS

WEIGHTS = [f"unet/diffusion_pytorch_model{kind}" for kind in (".safetensors", ".fp16.safetensors")]


UNET = "UNetSpatioTemporalConditionModel"
PARTS = {  # part of a pipeline -> the classes that run here, the usual one first
    "unet": (UNET, "Experts"),
    "vae": ("AutoencoderKLTemporalDecoder",),
    "scheduler": ("EulerDiscreteScheduler",),  # the only one that is tested with it
}
OURS = ["vdpp_core.models.experts", "Experts"]  # in model_index.json


def weights_in_cache(repository: str = str(MODELS["svd"])) -> bool:
    """Whether the UNet weights of a hub model are in the local cache."""
    import huggingface_hub as hub

    return any(isinstance(hub.try_to_load_from_cache(repository, name), str) for name in WEIGHTS)


def check_guidance(config: RunConfig, execution: Execution) -> None:
    """Check that the official pipeline works with these guidance scales.

    It decides twice whether to guide: by the last frame's scale, and by the largest scale of all frames in the latents'
    type. If the two disagree, it fails.

    Raises:
        ConfigError: they disagree.
    """
    first, last, frames = config.min_guidance_scale, config.guidance_scale, config.shape[2]
    if last <= 1 or torch.linspace(first, last, frames).to(execution.dtype).max() > 1:
        return
    fails = "and the official pipeline then fails"
    if frames == 1:
        allowed = f"is all the guidance of a single frame, {fails}: must be above 1, or guidance_scale 1"
        raise ConfigError("min_guidance_scale", first, allowed)
    allowed = f"is 1 in {execution.dtype_name}, {fails}: must be 1, or farther above it"
    raise ConfigError("guidance_scale", last, allowed)


def check_model(config: RunConfig, execution: Execution) -> None:
    """Check that the model files which a run needs exist and fit together.

    Raises:
        ConfigError: they do not; one line that names the file.
    """
    if config.source is None:
        return
    argument, _ = config.model_argument
    if "://" in config.source or redacted(config.source) != config.source:
        raise ConfigError(argument, config.source, "must be a folder or a hub name, no URL and no token")
    folder = Path(config.source)
    try:
        on_disk = folder.exists() or config.source.startswith((".", "/", "~"))
    except OSError as error:
        raise ConfigError(argument, config.source, f"must be a folder or a hub name ({error.strerror})") from None
    parts = [f"unet/{name}" for name in config.svd_experts] or ["unet"]
    parts += [] if config.image_path is None else ["vae", "image_encoder"]
    for part in parts if on_disk and not config.random_weights else ():
        if not any(folder.glob(f"{part}/*.safetensors")):
            raise ConfigError(argument, config.source, f"must be a pipeline's folder with {part}/*.safetensors")
    for name, kinds in _settings_needed(config).items():
        try:
            settings = folder / name if on_disk else _hub_file(config, argument, name)
            if not settings.is_file():
                raise ConfigError(argument, config.source, f"must be a pipeline's folder, it has no {name}")
        except ConfigError:
            if name == "model_index.json" and config.image_path is None:
                continue  # a UNet and a scheduler are enough
            raise
        try:
            contents = json.loads(settings.read_bytes())
            found = contents.get("_class_name", kinds and kinds[0])
        except (ValueError, AttributeError, RecursionError):
            raise ConfigError(argument, config.source, f"must have whole JSON in {name}") from None
        if kinds and found not in kinds:
            raise ConfigError(argument, config.source, f"must have a {kinds[0]}, not a {found}, in {name}")
        if name == "model_index.json":
            _check_parts(config, argument, contents)
    if on_disk and config.model_id is not None:
        _check_unet(config, execution.dtype)


def check_settings(config: RunConfig) -> None:
    """Check that each denoiser is described, where the model is a folder.

    Raises:
        ConfigError: one is not; names the file.
    """
    from vdpp_core import models

    folder = Path(str(config.source)).expanduser()
    for name in models.denoisers(config) if folder.is_dir() else ():
        _contents(config, folder, f"{name}/config.json")


def _contents(config: RunConfig, folder: Path, name: str) -> dict[str, Any]:
    """The settings in one of the files of a pipeline's folder."""
    try:
        contents = json.loads((folder / name).read_bytes())
        if isinstance(contents, dict):
            return contents
    except FileNotFoundError:
        raise ConfigError(*config.model_argument, f"must be a pipeline's folder, it has no {name}") from None
    except (OSError, ValueError, RecursionError):
        pass
    raise ConfigError(*config.model_argument, f"must have whole JSON in {name}")


def check_denoisers(config: RunConfig, dtype: torch.dtype) -> None:
    """Check that the weights of all denoisers of another pipeline are there, where it is a folder.

    Raises:
        ConfigError: some are not; names the file.
    """
    from vdpp_core import models
    from vdpp_core.models import svd, weights

    if Path(str(config.source)).expanduser().is_dir():
        for name in models.denoisers(config):
            weights.files(svd.weights_folder(config, dtype, name), dtype)


def _check_parts(config: RunConfig, argument: str, index: dict[str, Any]) -> None:
    """Check that the official pipeline would load the classes that run here. It goes by model_index.json alone, not by
    the class that the settings of a part name."""
    places = {part: place for part, place in index.items() if isinstance(place, list) and len(place) == 2}
    for part, (library, _) in places.items():
        if library not in (None, "diffusers", "transformers") and places[part] != OURS:
            allowed = f"must have parts of diffusers and transformers, not code of its own ({part}: {library})"
            raise ConfigError(argument, config.source, allowed)
    own = {"unet": PARTS["unet"][1:] if config.svd_experts else PARTS["unet"][:1]}
    for part, kinds in (PARTS | own).items():
        named = places.get(part, [None, None])[1]
        if named not in kinds and (part != "vae" or config.image_path is not None):
            allowed = (
                f"must have a {kinds[0]}: model_index.json names {named or 'none'}, which the official pipeline loads"
            )
            raise ConfigError(argument, config.source, allowed)


def _check_unet(config: RunConfig, dtype: torch.dtype) -> None:
    from vdpp_core import models  # takes seconds, which the package's own models need not spend
    from vdpp_core.models import weights
    from vdpp_core.models.svd import weights_folder

    try:
        structures = models.denoisers_on_meta(config, dtype)
    except (ValueError, TypeError, KeyError, IndexError, RuntimeError, ZeroDivisionError) as error:
        words = in_one_line(str(error))[:120]
        raise ConfigError("model_id", config.source, f"must describe a UNet in unet/config.json ({words})") from None
    for name, structure in structures.items() if not config.random_weights else ():
        weights.check(weights_folder(config, dtype, name), dtype, structure)


def _settings_needed(config: RunConfig) -> dict[str, tuple[str, ...]]:
    """File that a run reads of a pipeline -> the classes of which it must name one, if any."""
    needed: dict[str, tuple[str, ...]] = {
        "unet/config.json": PARTS["unet"],
        "scheduler/scheduler_config.json": PARTS["scheduler"],
    }
    if config.image_path is not None:
        needed["vae/config.json"] = PARTS["vae"]
        needed |= {"image_encoder/config.json": (), "feature_extractor/preprocessor_config.json": ()}
    return needed | {"model_index.json": () if config.image_path is None else ("StableVideoDiffusionPipeline",)}


def _hub_file(config: RunConfig, argument: str, name: str) -> Path:
    """Get a settings file from the cache or the hub; fail at once if the hub cannot be reached."""
    import huggingface_hub as hub
    from huggingface_hub import errors

    # depends on the HTTP library of the hub client
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
