"""Stable Video Diffusion: the published configuration, and loading from a folder, the hub or random weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.unets.unet_spatio_temporal_condition import UNetSpatioTemporalConditionModel
from diffusers.schedulers.scheduling_euler_discrete import EulerDiscreteScheduler

from vdpp_core.config import RunConfig
from vdpp_core.unets.published import PUBLISHED_SCHEDULER, PUBLISHED_UNET

if TYPE_CHECKING:
    from diffusers import StableVideoDiffusionPipeline


def load_unet(config: RunConfig, device: torch.device, dtype: torch.dtype) -> UNetSpatioTemporalConditionModel:
    """The UNet of `config.source` on `device`, ready for inference; random weights are the same on every rank."""
    if not config.random_weights:
        load = UNetSpatioTemporalConditionModel.from_pretrained
        unet = _load_either_variant(load, config.source, dtype, subfolder="unet")
        return unet.to(device).eval()

    architecture: dict[str, Any] = PUBLISHED_UNET
    if config.model == "tiny" or config.model_id:
        architecture = UNetSpatioTemporalConditionModel.load_config(config.source, subfolder="unet")
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # 1.5 billion parameters are never held in fp32 first
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
            torch.manual_seed(0)
            unet = UNetSpatioTemporalConditionModel.from_config(architecture)
    finally:
        torch.set_default_dtype(default)
    return unet.to(device).eval()


def load_scheduler(config: RunConfig) -> EulerDiscreteScheduler:
    """The scheduler of `config.source`, or the published one with random weights of the published size.

    Always Euler's (vdpp_core/machine.py refuses others): solvers with memory of earlier steps need it handed on.
    """
    if config.random_weights and config.model == "svd" and not config.model_id:
        return EulerDiscreteScheduler(**PUBLISHED_SCHEDULER)
    return EulerDiscreteScheduler.from_pretrained(config.source, subfolder="scheduler")


def load_pipeline(
    config: RunConfig, unet: UNetSpatioTemporalConditionModel, scheduler: EulerDiscreteScheduler
) -> StableVideoDiffusionPipeline:
    """The official pipeline of `config.source` around a UNet that is loaded already, on the UNet's device."""
    from diffusers import StableVideoDiffusionPipeline

    load = StableVideoDiffusionPipeline.from_pretrained
    pipeline = _load_either_variant(load, config.source, unet.dtype, unet=unet, scheduler=scheduler)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(unet.device)


def load_official(config: RunConfig, device: torch.device, dtype: torch.dtype) -> StableVideoDiffusionPipeline:
    """The official pipeline as a user would load it."""
    return load_pipeline(config, load_unet(config, device, dtype), load_scheduler(config))


def load_decoder(config: RunConfig, device: torch.device, dtype: torch.dtype) -> StableVideoDiffusionPipeline:
    """The official pipeline with nothing but its VAE."""
    from diffusers import StableVideoDiffusionPipeline

    absent = dict.fromkeys(("unet", "image_encoder", "scheduler", "feature_extractor"))
    load = StableVideoDiffusionPipeline.from_pretrained
    return _load_either_variant(load, config.source, dtype, **absent).to(device)


def _load_either_variant(load: Callable[..., Any], source: str | None, dtype: torch.dtype, **kwargs: Any) -> Any:
    with warnings.catch_warnings():  # diffusers ≥ 0.42 prefers `dtype`, which 0.36 does not know
        warnings.filterwarnings("ignore", message=".*torch_dtype.*")
        variants = (None, "fp16") if dtype == torch.float32 else ("fp16", None)
        try:
            return load(source, torch_dtype=dtype, variant=variants[0], use_safetensors=True, **kwargs)
        except (OSError, ValueError) as error:
            try:
                return load(source, torch_dtype=dtype, variant=variants[1], use_safetensors=True, **kwargs)
            except (OSError, ValueError):
                raise error from None  # what was asked for first is what should be there
