"""Tensor parallelism: a rank holds some heads, columns or channels of a layer (Shoeybi et al. 2019, "Megatron-LM").

Attention is cut by heads, a feed-forward by the columns of its first layer and the rows of its second, a resnet by the
channels between its convolutions. Each such layer ends with one all-reduce of partial sums. What the ranks do not
divide stays whole.

Resnets are cut because they gain most. A layer pays while the work it saves takes longer than its all-reduce. With C
channels, two ranks, a link of b bytes/s and f operations/s in half precision, saved time / time of the exchange is
9·C·b/f for a resnet's two 3×3 convolutions, 6·C·b/f for a feed-forward, and 2·C·b/f and more for attention. Of the
published UNet at 14 × 72 × 128, resnets save 11.5 % of the operations for 1.5 GB sent in a step, feed-forwards 16 %
for 4.4 GB, attention 5 % for 1.3 GB. Resnets alone bring a step at 60 TFLOP/s to 0.97 of one rank's time at 12 GB/s,
where feed-forwards alone take 1.08; all together take 0.70 at 200 GB/s, 0.87 at 25, 1.07 at 12 and 6 at 0.9 GB/s.
Temporal resnets stay whole: with 3·C·b/f they gain half as much as feed-forwards, and `frames` splits them already.

Parameters are plain tensors, not DTensors: bytes are counted and lost ranks reported as on every axis, a rehearsal on
the meta device needs no processes, and FSDP shards the pieces over a mesh of its own. On CPUs, a block of 192 channels
and 128 tokens takes 5.5 ms so and 6.8 ms with DTensors; large blocks take the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from vdpp_core.config.errors import ConfigError
from vdpp_core.models.patches import Patches
from vdpp_core.parallel.group import Group

PIECES = "_pieces"
NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
INPUTS = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")  # of attention


class Piece(NamedTuple):
    """What a rank holds of a parameter: along `dim`, its share of each of the blocks, which are cut on their own."""

    dim: int
    blocks: tuple[int, ...]
    group: Group

    def of(self, whole: Any) -> Tensor:
        """Cut the rank's piece out of a tensor, or read it from a slice of a safetensors file."""
        parts, begin = [], 0
        for block in self.blocks:
            own = block // self.group.size
            first = begin + self.group.rank * own
            place = (slice(None),) * self.dim + (slice(first, first + own),)
            parts.append(whole[place])
            begin += block
        return torch.cat(parts, self.dim)

    def whole(self, own: Tensor) -> Tensor:
        """Put the pieces of all ranks together."""
        sizes = [block // self.group.size for block in self.blocks]
        pieces = [piece.split(sizes, self.dim) for piece in self.group.all_gather(own, "", "parameters")]
        return torch.cat([piece[block] for block in range(len(sizes)) for piece in pieces], self.dim)


class Unit(NamedTuple):
    """Layers that are cut together.

    Attributes:
        kind: "attention", "feed-forward" or "resnet".
        parts: number of heads, columns or groups, which the ranks have to divide.
        plan: path -> how it is cut.
    """

    kind: str
    parts: int
    plan: dict[str, Style]


@dataclass
class Style(ParallelStyle):
    """How a layer is cut.

    Args:
        how: "colwise", "rowwise" (diffusers' words), "heads", "channels" of a group norm, or "mean" of an RMS norm.
        blocks: relative sizes of the parts of the dimension, each of which is cut on its own: 1, 1 for GEGLU.
    """

    how: str
    blocks: tuple[int, ...] = (1,)
    name: str = ""
    patches: Patches = field(default_factory=Patches)
    pieces: dict[str, Piece] = field(default_factory=dict)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = cast(Group, device_mesh)
        if self.how == "heads":
            self._divide(module, "heads", group.size)
            self.patches.before(module, partial(_own_rotation, group))
            return module
        if self.how == "channels":
            self._divide(module, "num_groups", group.size)
        elif self.how == "rowwise":
            self.patches.forward(module, partial(_partial_sums, module, group, self.name))
        elif self.how == "mean":
            self.patches.forward(module, partial(_normalise, module, group, self.name))
        for name, parameter in [*module.named_parameters(recurse=False)]:
            if self.how != "rowwise" or name == "weight":
                self._cut(module, name, parameter, group)
        return module

    def _divide(self, module: nn.Module, name: str, ranks: int) -> None:
        had = getattr(module, name)
        setattr(module, name, had // ranks)
        self.patches.undoing.append(partial(setattr, module, name, had))

    def _cut(self, module: nn.Module, name: str, parameter: nn.Parameter, group: Group) -> None:
        dim = int(self.how == "rowwise")
        unit = parameter.shape[dim] // sum(self.blocks)
        piece = Piece(dim, tuple(unit * block for block in self.blocks), group)
        self.pieces[f"{self.name}.{name}"] = piece

        def hold(tensor: Tensor) -> None:
            setattr(module, name, nn.Parameter(tensor, parameter.requires_grad))

        with torch.no_grad():
            hold(piece.of(parameter))
        self.patches.undoing.append(lambda: hold(piece.whole(getattr(module, name).detach())))


def split(denoiser: nn.Module, group: Group, patches: Patches) -> None:
    """Have each rank of `group` keep its piece of the layers: whole latents in, whole prediction out.

    The denoiser may be on the meta device. Undoing the patches gathers the pieces, so all ranks have to do that.
    """
    pieces: dict[str, Piece] = {}
    units = (unit for unit in _units(denoiser) if unit.parts % group.size == 0)
    plan = {path: style for unit in units for path, style in unit.plan.items()}
    for path, style in plan.items():
        style.name, style.patches, style.pieces = path, patches, pieces
    parallelize_module(denoiser, cast(DeviceMesh, group), cast(Any, plan))
    for name, value in {PIECES: pieces, "save_pretrained": _refuse_to_save}.items():
        setattr(denoiser, name, value)
        patches.undoing.append(partial(delattr, denoiser, name))


def _refuse_to_save(*_: Any, **__: Any) -> None:
    raise ValueError("this rank holds only pieces of the parameters: vdpp_core.restore comes first")


def pieces_of(denoiser: nn.Module) -> Mapping[str, Piece]:
    """Name -> the piece of a parameter that this rank holds, of the parameters that are cut."""
    return getattr(denoiser, PIECES, {})


def refusal(denoiser: nn.Module, ranks: int) -> str | None:
    """Why a denoiser cannot be split over so many ranks by tensors; None where some of its layers can."""
    counts = Counter((unit.kind, unit.parts) for unit in _units(denoiser))
    if any(count % ranks == 0 for _, count in counts):
        return None
    if not counts:
        return f"{type(denoiser).__name__} has no attention, feed-forward or resnet in a form that can be cut"
    sizes = {kind: sorted({count for other, count in counts if other == kind}) for kind, _ in counts}
    words = (f"{OF[kind]} ({' or '.join(map(str, found))})" for kind, found in sizes.items())
    return f"must divide at least one of these of {type(denoiser).__name__}: {', '.join(words)}"


OF = {"attention": "attention heads", "feed-forward": "feed-forward columns", "resnet": "groups of channels"}


def left_whole(denoiser: nn.Module, ranks: int) -> str | None:
    """Say which layers stay whole over so many ranks; None where all are cut."""
    units = [*_units(denoiser)]
    words = []
    for kind, plural in (("attention", "attentions"), ("feed-forward", "feed-forwards"), ("resnet", "resnets")):
        counts = [unit.parts for unit in units if unit.kind == kind]
        if whole := [count for count in counts if count % ranks]:
            sizes = " or ".join(map(str, sorted(set(whole))))
            what = OF[kind].split()[-1] if kind != "resnet" else OF[kind]
            words.append(f"{len(whole)} of {len(counts)} {plural} stay whole: {ranks} does not divide {sizes} {what}")
    return "; ".join(words) or None


def check(denoisers: Mapping[str, nn.Module], ranks: int, among: int = 1) -> None:
    """Check that denoisers can be split over so many ranks.

    Args:
        among: ranks that split the tokens, and so divide the heads that a rank is left with.

    Raises:
        ConfigError: they cannot.
    """
    for denoiser in denoisers.values() if ranks > 1 else ():
        if reason := refusal(denoiser, ranks):
            raise ConfigError("tp", ranks, reason)
        heads = getattr(denoiser.config, "num_attention_heads", None)
        if among > 1 and isinstance(heads, int) and getattr(denoiser, "_cp_plan", None) and heads % (ranks * among):
            name = type(denoiser).__name__
            raise ConfigError("tp", ranks, f"times frames, {among}, must divide the {heads} attention heads of {name}")


def _units(denoiser: nn.Module) -> Iterator[Unit]:
    """What can be cut in a denoiser."""
    from diffusers.models.attention import FeedForward
    from diffusers.models.resnet import ResnetBlock2D

    consumed = set()
    for path, module in denoiser.named_modules():
        single = {name for name, _ in module.named_children()} >= {"attn", "proj_mlp", "proj_out"}
        if single and _is_attention(module.attn):  # HunyuanVideo: one layer ends attention and feed-forward
            inner, width = module.attn.to_q.out_features, module.proj_mlp.out_features
            if module.proj_out.in_features == inner + width and width % module.attn.heads == 0:
                plan = _attention(f"{path}.attn", module.attn)
                rows = Style("rowwise", (inner // module.attn.heads, width // module.attn.heads))
                plan |= {f"{path}.proj_mlp": Style("colwise"), f"{path}.proj_out": rows}
                yield Unit("attention", module.attn.heads, plan)
            consumed.add(module.attn)
        elif module not in consumed and _is_attention(module) and module.to_out is not None:
            yield Unit("attention", module.heads, _attention(path, module))
        elif isinstance(module, FeedForward):
            ((name, first),) = (
                (name, one) for name, one in module.net[0].named_modules() if isinstance(one, nn.Linear)
            )
            inner = module.net[2].in_features
            if first.out_features in (inner, 2 * inner):
                blocks = (1,) * (first.out_features // inner)
                plan = {f"{path}.net.0.{name}": Style("colwise", blocks), f"{path}.net.2": Style("rowwise")}
                yield Unit("feed-forward", inner, plan)
        elif isinstance(module, ResnetBlock2D) and module.time_embedding_norm == "default":
            plan = {f"{path}.{name}": Style("colwise") for name in ("conv1", "time_emb_proj") if getattr(module, name)}
            plan |= {f"{path}.norm2": Style("channels"), f"{path}.conv2": Style("rowwise")}
            yield Unit("resnet", module.norm2.num_groups, plan)


def _is_attention(module: Any) -> bool:
    """Whether a module is an attention of diffusers whose heads can be given to different ranks."""
    if not all(hasattr(module, name) for name in ("heads", "to_q", "to_k", "to_v", "to_out")):
        return False
    widths = {module.to_q.out_features, module.to_k.out_features, module.to_v.out_features}
    norms = [norm for name in NORMS if (norm := getattr(module, name, None)) is not None]
    across = [norm for norm in norms if _width(norm) in widths]
    return (
        len(widths) == 1
        and not getattr(module, "fused_projections", False)
        and all("RMSNorm" in type(norm).__name__ and getattr(norm, "bias", None) is None for norm in across)
    )


def _attention(path: str, module: Any) -> dict[str, Style]:
    plan = {path: Style("heads")}
    plan |= {f"{path}.{name}": Style("colwise") for name in INPUTS if getattr(module, name, None) is not None}
    for name in NORMS:
        if _width(getattr(module, name, None)) == module.to_q.out_features:
            plan[f"{path}.{name}"] = Style("mean")
    if module.to_out is not None:
        plan[f"{path}.to_out.0"] = Style("rowwise")
    if getattr(module, "to_add_out", None) is not None:
        plan[f"{path}.to_add_out"] = Style("rowwise")
    return plan


def _width(norm: Any) -> int | None:
    """The number of values that a norm normalises together."""
    sizes = getattr(norm, "normalized_shape", getattr(norm, "dim", None))
    return sizes[-1] if isinstance(sizes, Sequence) else None


def _own_rotation(group: Group, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Give attention the rotation of its own heads where that is of all heads (LTX); a forward pre-hook."""
    given = kwargs.get("image_rotary_emb")
    own = module.to_q.weight.shape[0]  # type: ignore[union-attr,index]
    if given is None or given[0].shape[-1] != own * group.size:
        return None
    return args, kwargs | {"image_rotary_emb": tuple(one.chunk(group.size, -1)[group.rank] for one in given)}


def _partial_sums(layer: Any, group: Group, name: str, hidden: Tensor) -> Tensor:
    """Apply a linear layer or a convolution to the own channels, and sum over the ranks, of which one adds the bias."""
    bias = layer.bias if group.rank == 0 else None
    apply = layer._conv_forward if isinstance(layer, nn.Conv2d) else F.linear
    return group.all_reduce(apply(hidden, layer.weight, bias), name, "partial sums")


def _normalise(norm: Any, group: Group, name: str, hidden: Tensor) -> Tensor:
    """RMS norm over the channels of all ranks (..., C / ranks) -> the same."""
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    squares = group.all_reduce(wide.square().mean(-1, keepdim=True), name, "statistics") / group.size
    eps = torch.finfo(wide.dtype).eps if norm.eps is None else norm.eps
    made = wide * torch.rsqrt(squares + eps)
    return (made if norm.weight is None else made * norm.weight).to(hidden.dtype)
