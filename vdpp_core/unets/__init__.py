"""UNets behind one interface: the call of diffusers' `UNetSpatioTemporalConditionModel`, and its `config`.

unet(sample (B, F, 8, H, W), timestep, encoder_hidden_states (B, 1, D), added_time_ids (B, 3), return_dict=False)
returns a tuple with the prediction (B, F, 4, H, W). Nothing here knows of ranks.
"""

from typing import Any

import torch
from diffusers.schedulers.scheduling_euler_discrete import EulerDiscreteScheduler

from vdpp_core.config import RunConfig
from vdpp_core.unets.dummy import make_dummy
from vdpp_core.unets.published import PUBLISHED_SCHEDULER


def load(config: RunConfig, device: torch.device, dtype: torch.dtype) -> tuple[Any, EulerDiscreteScheduler]:
    """The UNet of a run on `device` and its scheduler; fp32, fp16 or bf16."""
    if config.source is None:
        return make_dummy(device=device, dtype=dtype).eval(), EulerDiscreteScheduler(**PUBLISHED_SCHEDULER)
    from vdpp_core.unets.svd import load_scheduler, load_unet  # seconds that the dummy does not need

    unet, scheduler = load_unet(config, device, dtype), load_scheduler(config)
    if config.enable_memory_opt:
        unet.enable_forward_chunking(chunk_size=1, dim=1)
    return unet, scheduler


__all__ = ["load"]
