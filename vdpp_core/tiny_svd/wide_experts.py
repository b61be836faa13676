"""A Stable Video Diffusion of two wide experts with random weights, to measure memory and time, not to make videos.

Its parameters outweigh its activations, as those of large models do; the trained experts are too small for that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import StableVideoDiffusionPipeline, UNetSpatioTemporalConditionModel
from torch import nn

from vdpp_core.config.fields import MODELS
from vdpp_core.models.architectures import PUBLISHED_UNET
from vdpp_core.models.experts import Experts
from vdpp_core.tiny_svd import model

WIDTHS = (64, 128, 256, 256)  # 0.2 of the published UNet's: 61 million parameters
SETTINGS: dict[str, Any] = PUBLISHED_UNET | {
    "block_out_channels": WIDTHS,
    "num_attention_heads": (2, 4, 8, 8),
    "addition_time_embed_dim": 64,
    "projection_class_embeddings_input_dim": 192,
    "cross_attention_dim": 32,  # of the tiny image encoder
}


def save(folder: Path, boundary: float) -> Path:
    """Save the pipeline, unless the folder exists, with the tiny model's VAE and image encoder; 0.25 GB in fp16.

    Args:
        boundary: the lowest timestep, a quarter of log sigma, of the expert for the noisy steps.
    """
    if folder.exists():
        return folder
    experts = {}
    for seed, name in enumerate(("high_noise", "low_noise")):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            experts[name] = nn.Module.to(UNetSpatioTemporalConditionModel.from_config(SETTINGS), torch.float16).eval()
    tiny = StableVideoDiffusionPipeline.from_pretrained(MODELS["tiny"], use_safetensors=True)
    unet = Experts(experts, [boundary])
    model.save(StableVideoDiffusionPipeline(**tiny.components | {"unet": unet}), folder)
    return folder
