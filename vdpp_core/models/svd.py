"""Stable Video Diffusion: the published configuration, and loading from a folder, the hub or random weights."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.unets.unet_spatio_temporal_condition import UNetSpatioTemporalConditionModel
from diffusers.schedulers.scheduling_euler_discrete import EulerDiscreteScheduler

from vdpp_core.config import RunConfig
from vdpp_core.models import weights
from vdpp_core.models.architectures import PUBLISHED

if TYPE_CHECKING:
    from diffusers import StableVideoDiffusionPipeline


def structure(config: RunConfig) -> UNetSpatioTemporalConditionModel:
    """Construct the UNet of a run from its architecture alone, with the constructor's values."""
    if config.source is None:
        return UNetSpatioTemporalConditionModel.from_config(PUBLISHED[config.model])
    architecture = UNetSpatioTemporalConditionModel.load_config(config.source, subfolder="unet")
    return UNetSpatioTemporalConditionModel.from_config(architecture)


def weights_folder(config: RunConfig, dtype: torch.dtype, part: str = "unet") -> Path:
    """Folder of a part's weights; those of a hub model are downloaded unless they are in the cache."""
    folder = Path(str(config.source)).expanduser()
    if not folder.is_dir():
        import huggingface_hub as hub

        half, full = (f"{part}/*.fp16*.safetensors", None), (f"{part}/*.safetensors", "*.fp16*")
        for wanted, unwanted in (full, half) if dtype == torch.float32 else (half, full):
            place = hub.snapshot_download(
                str(config.source), allow_patterns=[wanted, f"{part}/*.json"], ignore_patterns=unwanted
            )
            folder = Path(place)
            if any(folder.glob(f"{part}/*.safetensors")):
                break
    return folder / part


def load_unet(config: RunConfig, device: torch.device, dtype: torch.dtype) -> UNetSpatioTemporalConditionModel:
    """Load the whole UNet of `config.source` onto `device` with diffusers."""
    folder = weights_folder(config, dtype)
    return _load(UNetSpatioTemporalConditionModel, folder, weights.variant(folder, dtype), dtype).to(device)


def load_pipeline(
    config: RunConfig, unet: Any, scheduler: EulerDiscreteScheduler, device: torch.device, dtype: torch.dtype
) -> StableVideoDiffusionPipeline:
    """Load the official pipeline of `config.source` around a given UNet and scheduler; the rest goes to `device`."""
    pipeline = _load_pipeline(config, dtype, ("vae", "image_encoder"), unet=unet, scheduler=scheduler)
    for part in (pipeline.vae, pipeline.image_encoder):
        part.to(device)
    return pipeline


def load_official(config: RunConfig, device: torch.device, dtype: torch.dtype) -> StableVideoDiffusionPipeline:
    """Load the official pipeline as any user would, without anything of ours in it."""
    return _load_pipeline(config, dtype, ("unet", "vae", "image_encoder")).to(device)


def load_decoder(config: RunConfig, device: torch.device, dtype: torch.dtype) -> StableVideoDiffusionPipeline:
    """Load the official pipeline with its VAE only."""
    absent = dict.fromkeys(("unet", "image_encoder", "scheduler", "feature_extractor"))
    return _load_pipeline(config, dtype, ("vae",), **absent).to(device)


def _load_pipeline(config: RunConfig, dtype: torch.dtype, parts: tuple[str, ...], **given: Any) -> Any:
    """The official pipeline with the weights of these parts and the given objects; of the rest the settings.

    Without its own progress bar: the rank shows one.
    """
    from diffusers import StableVideoDiffusionPipeline

    folder = Path(str(config.source)).expanduser()
    if not folder.is_dir():
        import huggingface_hub as hub

        folder = Path(hub.snapshot_download(str(config.source), allow_patterns="*.json"))
    variants = {weights.variant(weights_folder(config, dtype, part), dtype) for part in parts}
    variant = next(filter(None, variants), None)  # diffusers uses it for the parts that have it
    pipeline = _load(StableVideoDiffusionPipeline, folder, variant, dtype, **given)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _load(kind: Any, folder: Path, variant: str | None, dtype: torch.dtype, **kwargs: Any) -> Any:
    with warnings.catch_warnings():  # diffusers ≥ 0.42 prefers `dtype`, which 0.36 does not know
        warnings.filterwarnings("ignore", message=".*torch_dtype.*")
        return kind.from_pretrained(folder, torch_dtype=dtype, variant=variant, use_safetensors=True, **kwargs)
