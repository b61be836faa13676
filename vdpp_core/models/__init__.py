"""UNets with the signature and `config` of diffusers' `UNetSpatioTemporalConditionModel`.

unet(sample (B, F, 8, H, W), timestep, encoder_hidden_states (B, 1, D), added_time_ids (B, 3), return_dict=False)
returns a tuple with the prediction (B, F, 4, H, W). Nothing here knows about ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vdpp_core.config import RunConfig
from vdpp_core.models import attention, exact, shortcuts, weights
from vdpp_core.models.dummy import DummyUNet


def denoisers(config: RunConfig) -> tuple[str, ...]:
    """Names of a run's denoisers: components of its pipeline, or component/expert where a component is `Experts`."""
    if config.model == "dummy":
        return ("unet",)
    from vdpp_core.models import pipelines, svd  # takes seconds, which the dummy need not spend

    if config.is_svd:
        return svd.denoisers(config)
    return tuple(name for name in pipelines.DENOISERS if name in pipelines.parts(config))


def load(config: RunConfig, device: torch.device, dtype: torch.dtype, name: str = "unet") -> Any:
    """Load one of a run's denoisers whole onto `device`, ready for inference."""
    made = load_plain(config, device, dtype, name)
    return ready(config, made) if config.is_svd else made


def load_plain(config: RunConfig, device: torch.device, dtype: torch.dtype, name: str = "unet") -> Any:
    """Load one of a run's denoisers whole onto `device`, or make it with random weights, with nothing of ours in it."""
    if config.model == "dummy" or config.random_weights:
        unet = on_meta(config, dtype, name).to_empty(device=device)
        weights.fill(unet, weights.random(on_meta(config, dtype, name), device))
        return unet.eval()
    from vdpp_core.models import pipelines

    return pipelines.load_part(config, name, device, dtype)


def load_denoisers(
    config: RunConfig, device: torch.device, dtype: torch.dtype, only: Sequence[str] | None = None
) -> dict[str, Any]:
    """Load a run's denoisers whole, or only some of them: name -> module."""
    return {name: load(config, device, dtype, name) for name in (denoisers(config) if only is None else only)}


def skeletons(config: RunConfig, dtype: torch.dtype, only: Sequence[str] | None = None) -> dict[str, Any]:
    """Make a run's denoisers with parameters on the meta device: name -> module."""
    if config.is_svd:
        return {name: on_meta(config, dtype, name) for name in (denoisers(config) if only is None else only)}
    from vdpp_core.models import pipelines

    return pipelines.skeletons(config, dtype, only)


def denoisers_on_meta(config: RunConfig, dtype: torch.dtype, only: Sequence[str] | None = None) -> dict[str, Any]:
    """Make a run's denoisers without weights, ready for inference: name -> module."""
    made = skeletons(config, dtype, only)
    if config.is_svd:
        return {name: ready(config, unet) for name, unet in made.items()}
    return {name: nn.Module.to(module, "meta") for name, module in made.items()}


def on_meta(config: RunConfig, dtype: torch.dtype, name: str = "unet") -> Any:
    """Make one of Stable Video Diffusion's denoisers without weights, on the meta device."""
    with torch.device("meta"):
        if config.model == "dummy":
            unet: Any = DummyUNet()
        else:
            from vdpp_core.models.svd import structure

            unet = structure(config, name)
    # AlphaBlender ignores the device context; diffusers' own `to` warns about every change of type
    return nn.Module.to(unet, "meta", dtype)


def ready(config: RunConfig, unet: Any) -> Any:
    """Prepare a UNet for inference with the run's options, in place."""
    if config.chunked:
        unet.enable_forward_chunking(chunk_size=1, dim=0)
    if config.model != "dummy":
        exact.take(unet)
    if config.shortcuts:
        shortcuts.take(unet)
    batch, _, _, rows, columns = config.shape
    if config.model != "dummy" and 2 * batch * rows * columns > attention.MOST:
        attention.take_turns(unet)
    return unet.eval()
