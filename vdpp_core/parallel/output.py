"""What a UNet returns."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def as_asked(prediction: Tensor, return_dict: bool) -> Any:
    """The prediction as `UNetSpatioTemporalConditionModel.forward` returns it."""
    if not return_dict:
        return (prediction,)
    from diffusers.models.unets.unet_spatio_temporal_condition import UNetSpatioTemporalConditionOutput

    return UNetSpatioTemporalConditionOutput(sample=prediction)
