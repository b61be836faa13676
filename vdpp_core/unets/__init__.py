"""UNets behind one interface: the call of diffusers' `UNetSpatioTemporalConditionModel`, and its `config`.

unet(sample (B, F, 8, H, W), timestep, encoder_hidden_states (B, 1, D), added_time_ids (B, 3), return_dict=False)
returns a tuple with the prediction (B, F, 4, H, W). Nothing here knows of ranks.
"""

from typing import Any

import torch
from diffusers.schedulers.scheduling_euler_discrete import EulerDiscreteScheduler

from vdpp_core.config import RunConfig
from vdpp_core.unets.dummy import make_dummy
from vdpp_core.unets.svd import load_pipeline, load_scheduler, load_unet


def load(config: RunConfig, device: torch.device, dtype: torch.dtype) -> tuple[Any, EulerDiscreteScheduler]:
    """The UNet of a run on `device` and its scheduler; fp32, fp16 or bf16."""
    scheduler = load_scheduler(config)
    unet = make_dummy(device=device, dtype=dtype).eval() if config.source is None else load_unet(config, device, dtype)
    if config.enable_memory_opt:
        unet.enable_forward_chunking(chunk_size=1, dim=1)
    return unet, scheduler


__all__ = ["load", "load_pipeline"]
