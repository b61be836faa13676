"""Shortcuts that save work and change the prediction by at most 1e-6 (measured by tests/benchmarks/latency.py)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vdpp_core.models.patches import Patches

PASSES = 2  # guidance passes, which may alternate


class Known(NamedTuple):
    """A context (B, 1, D) and each attention's output for it (B, 1, C)."""

    context: Tensor
    constants: dict[nn.Module, Tensor]


def take(unet: Any) -> Patches:
    """Apply both shortcuts to SVD's UNet in place; `undo` of the returned patches removes them.

    Cross-attention: the context is one token, the image. A softmax over one key is 1, so the output is
    to_out(to_v(context)) for every query, and the layer norm before it is not needed. It is computed once per context.
    Temporal convolutions: (3, 1, 1) over frames, rows and columns equals (3, 1) over frames and positions.

    The UNet then raises ValueError for a context of more than one token.
    """
    patches, attention = Patches(), ConstantAttention()
    for module in unet.modules():
        if getattr(module, "attn2", None) is not None:
            patches.processor(module.attn2, attention)
            patches.forward(module.norm2, lambda hidden_states: hidden_states)
        elif isinstance(module, nn.Conv3d) and module.kernel_size == (3, 1, 1):
            patches.forward(module, partial(_convolve, module))
    patches.forward(unet, partial(attention.forward, unet.forward))
    return patches


def _convolve(conv: nn.Conv3d, hidden: Tensor) -> Tensor:
    """(B, C, F, H, W) -> (B, C', F, H, W)."""
    flat = hidden.reshape(*hidden.shape[:3], -1)
    return F.conv2d(flat, conv.weight[..., 0], conv.bias, padding=(1, 0)).unflatten(-1, hidden.shape[3:])


class ConstantAttention:
    """The processor of all cross-attentions of a UNet; it caches their outputs for the last contexts."""

    def __init__(self) -> None:
        self.known: deque[Known] = deque(maxlen=PASSES)

    def forward(
        self,
        compute: Callable[..., Any],
        sample: Tensor,
        timestep: Any,
        encoder_hidden_states: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run the UNet's forward pass `compute` with the constants of its context.

        Raises:
            ValueError: the context has more than one token.
        """
        if encoder_hidden_states.shape[1] != 1:
            tokens = encoder_hidden_states.shape[1]
            raise ValueError(f"encoder_hidden_states of {tokens} tokens: the shortcuts need exactly one")
        self.constants = self._constants(encoder_hidden_states)
        self.batch = sample.shape[0]
        return compute(sample, timestep, encoder_hidden_states, *args, **kwargs)

    def _constants(self, context: Tensor) -> dict[nn.Module, Tensor]:
        for known in self.known:
            if _equal(known.context, context):
                return known.constants
        self.known.append(Known(context.clone(), {}))
        return self.known[-1].constants

    def __call__(
        self, attention: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """(B·n, S, C), n frames or positions a video, and the context repeated to (B·n, 1, D) -> (B·n, 1, C)."""
        repeats = hidden_states.shape[0] // self.batch
        if attention not in self.constants:
            self.constants[attention] = attention.to_out[0](attention.to_v(encoder_hidden_states[::repeats]))
        return self.constants[attention].repeat_interleave(repeats, dim=0)


def _equal(context: Tensor, other: Tensor) -> bool:
    alike = (context.shape, context.dtype, context.device) == (other.shape, other.dtype, other.device)
    return alike and (context.is_meta or torch.equal(context, other))
