"""Shortcuts that change the latents of a run by at most 1e-6 (measured by tests/benchmarks/one_rank.py)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vdpp_core.models import exact
from vdpp_core.models.patches import Patches

ONEDNN = torch.backends.mkldnn.is_available()


def take(unet: Any) -> Patches:
    """Apply the shortcuts to SVD's UNet in place; `undo` of the returned patches removes them.

    Temporal convolutions: (3, 1, 1) over frames, rows and columns equals (3, 1) over frames and positions.
    Linear layers in fp32 on a CPU: oneDNN in place of MKL, which is slow on AMD's processors and writes the bias to
    memory first. It also applies GELU and the gate where it computes them.
    """
    from diffusers.models.activations import GEGLU

    patches = Patches()
    for module in unet.modules():
        if isinstance(module, nn.Conv3d) and module.kernel_size == (3, 1, 1):
            patches.forward(module, partial(_convolve, module))
        elif isinstance(module, nn.Linear) and ONEDNN:
            patches.forward(module, partial(_linear, module))
        elif isinstance(module, GEGLU) and ONEDNN:
            patches.forward(module, partial(_geglu, module))
    return patches


def _convolve(conv: nn.Conv3d, hidden: Tensor) -> Tensor:
    """(B, C, F, H, W) -> (B, C', F, H, W)."""
    flat = hidden.reshape(*hidden.shape[:3], -1)
    return F.conv2d(flat, conv.weight[..., 0], conv.bias, padding=(1, 0)).unflatten(-1, hidden.shape[3:])


def _linear(linear: nn.Linear, hidden: Tensor) -> Tensor:
    if not _is_for_onednn(linear, hidden):
        return F.linear(hidden, linear.weight, linear.bias)
    return torch.ops.mkldnn._linear_pointwise(hidden, linear.weight, linear.bias, "none", [], "")


def _geglu(geglu: Any, hidden: Tensor) -> Tensor:
    if not _is_for_onednn(geglu.proj, hidden):
        return exact.gate(geglu, hidden)
    (weight, gate_weight), (bias, gate_bias) = geglu.proj.weight.chunk(2), geglu.proj.bias.chunk(2)
    gate = torch.ops.mkldnn._linear_pointwise(hidden, gate_weight, gate_bias, "gelu", [], "none")
    return torch.ops.mkldnn._linear_pointwise.binary(hidden, gate, weight, bias, "mul")


def _is_for_onednn(linear: nn.Linear, hidden: Tensor) -> bool:
    """Whether oneDNN can compute a layer: not those whose weights are DTensors."""
    return hidden.is_cpu and hidden.dtype == torch.float32 and type(linear.weight) is nn.Parameter
