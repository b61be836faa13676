"""One transformer block cut by this package and by torch's own styles, which make DTensors."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from diffusers.models.attention import BasicTransformerBlock
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from vdpp_core.models.patches import Patches
from vdpp_core.parallel import tensor
from vdpp_core.parallel.group import Collectives

COLUMNS = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn2.to_q", "attn2.to_k", "attn2.to_v", "ff.net.0.proj")
ROWS = ("attn1.to_out.0", "attn2.to_out.0", "ff.net.2")


def block(width: int = 32, heads: int = 4) -> Any:
    torch.manual_seed(0)
    return BasicTransformerBlock(width, heads, width // heads, cross_attention_dim=12, activation_fn="geglu").eval()


def ours(made: nn.Module) -> nn.Module:
    world = dist.group.WORLD
    assert world is not None
    tensor.split(made, Collectives(world), Patches())
    return made


def torchs(made: Any, mesh: DeviceMesh) -> nn.Module:
    """The halves of GEGLU's projection are put in the order in which torch's style gives each rank a part of both."""
    ranks = mesh.size()
    for parameter in made.ff.net[0].proj.parameters():
        gate_last = parameter.data.unflatten(0, (2, ranks, -1))
        parameter.data = gate_last.transpose(0, 1).flatten(0, 2).clone()
    for attention in (made.attn1, made.attn2):
        attention.heads //= ranks
    styles = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
    return parallelize_module(made, mesh, styles)


def given(tokens: int = 6, width: int = 32) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"hidden_states": torch.randn(2, tokens, width), "encoder_hidden_states": torch.randn(2, 3, 12)}


def compare(mesh: DeviceMesh) -> float:
    """The largest difference between both, relative to the largest value."""
    whole = block()
    mine, theirs = ours(copy.deepcopy(whole))(**given()), torchs(copy.deepcopy(whole), mesh)(**given())
    return ((mine - theirs).abs().max() / theirs.abs().max()).item()
