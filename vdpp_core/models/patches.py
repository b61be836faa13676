"""Reversible changes to what the modules of a network compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Patches:
    """A list of changes, newest last. The modules' classes, parameters and state are not touched."""

    def __init__(self) -> None:
        self.undoing: list[Callable[[], Any]] = []

    def forward(self, module: nn.Module, function: Callable[..., Any]) -> None:
        """Have a module compute `function`. Its hooks, including FSDP's, still run around it."""
        had = module.__dict__.get("forward")
        module.forward = function
        self.undoing.append(lambda: setattr(module, "forward", had) if had else delattr(module, "forward"))

    def processor(self, attention: Any, processor: Any) -> None:
        """Give a diffusers attention another processor."""
        had = attention.processor
        attention.set_processor(processor)
        self.undoing.append(lambda: attention.set_processor(had))

    def before(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        """Add a forward pre-hook: hook(module, args, kwargs) -> (args, kwargs) or None."""
        self.undoing.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def undo(self) -> None:
        """Undo all changes, newest first."""
        while self.undoing:
            self.undoing.pop()()


def as_asked(prediction: Tensor, return_dict: bool) -> Any:
    """Wrap a prediction as `UNetSpatioTemporalConditionModel.forward` returns it."""
    if not return_dict:
        return (prediction,)
    from diffusers.models.unets.unet_spatio_temporal_condition import UNetSpatioTemporalConditionOutput

    return UNetSpatioTemporalConditionOutput(sample=prediction)
