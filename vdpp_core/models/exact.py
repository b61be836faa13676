"""Work that SVD's UNet need not do. Its prediction stays bit-equal, so this is always on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vdpp_core.models.patches import Patches

PASSES = 2  # guidance passes, which may alternate


def take(unet: Any) -> Patches:
    """Have SVD's UNet leave out work that changes no bit, in place; `undo` of the returned patches takes it back.

    Cross-attention: the context is one token, the image. A softmax over one key is 1, so the output is the same for
    every query. It is computed once per context, by the attention itself, and kept if all its rows are indeed equal.
    Blending, and on a CPU gating: they overwrite tensors that nobody needs any more instead of filling fresh memory. On
    a GPU, gating in place would save no time, and the peak of memory stays that of the official pipeline.
    """
    from diffusers.models.activations import GEGLU
    from diffusers.models.resnet import AlphaBlender

    patches, context = Patches(), Context(unet.forward)
    for module in unet.modules():
        if getattr(module, "attn2", None) is not None:
            patches.forward(module.norm2, partial(context.normalise, module.attn2, module.norm2.forward))
            patches.forward(module.attn2, partial(context.attend, module.attn2, module.attn2.forward))
        elif isinstance(module, AlphaBlender) and not module.switch_spatial_to_temporal_mix:
            patches.forward(module, partial(_blend, module))
        elif isinstance(module, GEGLU):
            patches.forward(module, partial(gate, module))
    patches.forward(unet, context.forward)
    return patches


class Known:
    """A context (B, tokens, D), and each cross-attention's output for it (B, 1, C); None where it varies."""

    def __init__(self, context: Tensor) -> None:
        self.context = context.clone()
        self.outputs: dict[tuple[Any, ...], Tensor | None] = {}

    def is_of(self, context: Tensor) -> bool:
        """Whether a context has these values."""
        one, other = ((each.shape, each.dtype, each.device) for each in (self.context, context))
        return one == other and (context.is_meta or torch.equal(self.context, context))


class Context:
    """The context of a UNet's forward pass `compute`, and what is known of the last ones."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        self.compute = compute
        self.known: deque[Known] = deque(maxlen=PASSES)
        self.now: Known | None = None  # of the pass that is running

    def forward(self, sample: Tensor, timestep: Any, encoder_hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the UNet's forward pass."""
        found = next((known for known in self.known if known.is_of(encoder_hidden_states)), None)
        self.now = found or Known(encoder_hidden_states)
        if found is None:
            self.known.append(self.now)
        return self.compute(sample, timestep, encoder_hidden_states, *args, **kwargs)

    def normalise(self, attention: Any, compute: Callable[[Tensor], Tensor], hidden_states: Tensor) -> Tensor:
        """Layer norm before an attention, unless its output is known."""
        known = self.now is not None and self.now.outputs.get(_key(attention, hidden_states)) is not None
        return hidden_states if known else compute(hidden_states)

    def attend(
        self,
        attention: Any,
        compute: Callable[..., Tensor],
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        **kwargs: Any,
    ) -> Tensor:
        """(B·n, S, C), n frames or positions a video, and the context of each (B·n, tokens, D) -> (B·n, 1 or S, C)."""
        if self.now is None:  # outside the UNet
            return compute(hidden_states, encoder_hidden_states=encoder_hidden_states, **kwargs)
        repeats, outputs = len(hidden_states) // len(self.now.context), self.now.outputs
        key = _key(attention, hidden_states)
        if (one := outputs.get(key)) is not None:
            return one.repeat_interleave(repeats, 0)
        whole = compute(hidden_states, encoder_hidden_states=encoder_hidden_states, **kwargs)
        if key not in outputs:
            one = whole[::repeats, :1].detach().clone()
            same = whole.is_meta or torch.equal(one.repeat_interleave(repeats, 0).expand_as(whole), whole)
            outputs[key] = one if same else None
        return whole


def _key(attention: Any, hidden_states: Tensor) -> tuple[Any, ...]:
    """What an attention's output for a context depends on: its queries' shape, and its parameters' type and changes."""
    weights = ((each.dtype, 0 if each.is_inference() else each._version) for each in attention.parameters())
    return attention, hidden_states.shape, *weights


def _blend(blender: Any, x_spatial: Tensor, x_temporal: Tensor, image_only_indicator: Tensor) -> Tensor:
    alpha = blender.get_alpha(image_only_indicator, x_spatial.ndim).to(x_spatial.dtype)
    return (alpha * x_spatial).add_(x_temporal.mul_(1.0 - alpha))


def gate(geglu: Any, hidden_states: Tensor) -> Tensor:
    """GEGLU: the first half of a projection times the GELU of the second."""
    first, second = geglu.proj(hidden_states).chunk(2, dim=-1)
    activated = F.gelu(second)
    return activated.mul_(first) if activated.is_cpu else first * activated
