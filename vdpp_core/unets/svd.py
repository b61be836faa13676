"""Stable Video Diffusion: the published configuration, and loading from a folder, the hub or random weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.unets.unet_spatio_temporal_condition import UNetSpatioTemporalConditionModel
from diffusers.schedulers.scheduling_euler_discrete import EulerDiscreteScheduler

from vdpp_core.config import RunConfig

if TYPE_CHECKING:
    from diffusers import StableVideoDiffusionPipeline

# huggingface.co/stabilityai/stable-video-diffusion-img2vid-xt: unet/config.json, scheduler/scheduler_config.json
PUBLISHED_UNET = {
    "sample_size": 96,
    "in_channels": 8,
    "out_channels": 4,
    "down_block_types": ("CrossAttnDownBlockSpatioTemporal",) * 3 + ("DownBlockSpatioTemporal",),
    "up_block_types": ("UpBlockSpatioTemporal",) + ("CrossAttnUpBlockSpatioTemporal",) * 3,
    "block_out_channels": (320, 640, 1280, 1280),
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 768,
    "layers_per_block": 2,
    "cross_attention_dim": 1024,
    "transformer_layers_per_block": 1,
    "num_attention_heads": (5, 10, 20, 20),
    "num_frames": 25,
}
PUBLISHED_SCHEDULER = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "interpolation_type": "linear",
    "num_train_timesteps": 1000,
    "prediction_type": "v_prediction",
    "sigma_max": 700.0,
    "sigma_min": 0.002,
    "steps_offset": 1,
    "timestep_spacing": "leading",
    "timestep_type": "continuous",
    "use_karras_sigmas": True,
}


def load_unet(config: RunConfig, device: torch.device, dtype: torch.dtype) -> UNetSpatioTemporalConditionModel:
    """The UNet of `config.source` on `device`, ready for inference; random weights are the same on every rank."""
    if not config.random_weights:
        load = UNetSpatioTemporalConditionModel.from_pretrained
        unet = _half_variant_first(load, config.source, dtype, subfolder="unet")
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
    return unet.to(device, dtype).eval()


def load_scheduler(config: RunConfig) -> EulerDiscreteScheduler:
    """The scheduler of `config.source`, or the published one with random weights and for the dummy.

    Always Euler's (vdpp_core/machine.py refuses others): solvers with memory of earlier steps need it handed on.
    """
    if config.source is None or (config.random_weights and config.model == "svd" and not config.model_id):
        return EulerDiscreteScheduler(**PUBLISHED_SCHEDULER)
    return EulerDiscreteScheduler.from_pretrained(config.source, subfolder="scheduler")


def load_pipeline(
    config: RunConfig, unet: UNetSpatioTemporalConditionModel, scheduler: EulerDiscreteScheduler
) -> StableVideoDiffusionPipeline:
    """The official pipeline of `config.source` around a UNet that is loaded already, on the UNet's device."""
    from diffusers import StableVideoDiffusionPipeline

    load = StableVideoDiffusionPipeline.from_pretrained
    pipeline = _half_variant_first(load, config.source, unet.dtype, unet=unet, scheduler=scheduler)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(unet.device)


def _half_variant_first(load: Callable[..., Any], source: str | None, dtype: torch.dtype, **kwargs: Any) -> Any:
    with warnings.catch_warnings():  # diffusers ≥ 0.42 prefers `dtype`, which 0.36 does not know
        warnings.filterwarnings("ignore", message=".*torch_dtype.*")
        if dtype != torch.float32:
            try:
                return load(source, torch_dtype=dtype, variant="fp16", use_safetensors=True, **kwargs)
            except (OSError, ValueError):
                pass  # no fp16 variant there: the plain files follow
        return load(source, torch_dtype=dtype, use_safetensors=True, **kwargs)
