"""UNets with the signature and `config` of diffusers' `UNetSpatioTemporalConditionModel`.

unet(sample (B, F, 8, H, W), timestep, encoder_hidden_states (B, 1, D), added_time_ids (B, 3), return_dict=False)
returns a tuple with the prediction (B, F, 4, H, W). Nothing here knows about ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vdpp_core.config import RunConfig
from vdpp_core.models import attention, shortcuts, weights
from vdpp_core.models.dummy import DummyUNet


def load(config: RunConfig, device: torch.device, dtype: torch.dtype) -> Any:
    """Load a run's whole UNet onto `device`, or make it with random weights."""
    if config.model == "dummy" or config.random_weights:
        unet = on_meta(config, dtype).to_empty(device=device)
        weights.fill(unet, weights.random(on_meta(config, dtype), device))
    else:
        from vdpp_core.models import pipelines  # takes seconds, which the dummy need not spend

        unet = pipelines.load_part(config, "unet", device, dtype)
    return ready(config, unet)


def load_denoisers(config: RunConfig, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Load a run's denoisers whole: component of the pipeline -> module."""
    if config.is_svd:
        return {"unet": load(config, device, dtype)}
    from vdpp_core.models import pipelines

    names = [name for name in pipelines.DENOISERS if name in pipelines.parts(config)]
    return {name: pipelines.load_part(config, name, device, dtype) for name in names}


def skeletons(config: RunConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Make a run's denoisers with parameters on the meta device: component of the pipeline -> module."""
    if config.is_svd:
        return {"unet": on_meta(config, dtype)}
    from vdpp_core.models import pipelines

    return pipelines.skeletons(config, dtype)


def denoisers_on_meta(config: RunConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Make a run's denoisers without weights, ready for inference: component of the pipeline -> module."""
    if config.is_svd:
        return {"unet": ready(config, on_meta(config, dtype))}
    return {name: nn.Module.to(module, "meta") for name, module in skeletons(config, dtype).items()}


def on_meta(config: RunConfig, dtype: torch.dtype) -> Any:
    """Make the UNet without weights, on the meta device."""
    with torch.device("meta"):
        if config.model == "dummy":
            unet: Any = DummyUNet()
        else:
            from vdpp_core.models.svd import structure

            unet = structure(config)
    # AlphaBlender ignores the device context; diffusers' own `to` warns about every change of type
    return nn.Module.to(unet, "meta", dtype)


def ready(config: RunConfig, unet: Any) -> Any:
    """Prepare a UNet for inference with the run's options, in place."""
    if config.chunked:
        unet.enable_forward_chunking(chunk_size=1, dim=0)
    if config.shortcuts:
        shortcuts.take(unet)
    batch, _, _, rows, columns = config.shape
    if config.model != "dummy" and 2 * batch * rows * columns > attention.MOST:
        attention.take_turns(unet)
    return unet.eval()
