"""Sequence parallelism of video transformers: diffusers' own, over the lockstep groups of a run.

Each rank has a share of the tokens. In self-attention an all-to-all gives each rank some heads of all tokens, and
another one gives the tokens back (Jacobs et al. 2023, "DeepSpeed Ulysses"). No sum is reordered. Where a model cuts and
gathers its tokens is its `_cp_plan`. diffusers' `enable_parallelism` is for accelerators only; what it does is not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vdpp_core.config.errors import ConfigError
from vdpp_core.models.patches import Patches
from vdpp_core.models.stand_ins import sample_of
from vdpp_core.parallel.frames import frame_axis
from vdpp_core.parallel.group import Group

if TYPE_CHECKING:
    from vdpp_core.models.stage import Call

CROSS = "attn2"  # diffusers' name of the attention from the video to the text


def split(denoiser: Any, group: Group, patches: Patches) -> None:
    """Have each rank of `group` compute its share of the tokens: whole latents in, whole prediction out.

    The shares are equal: in a call, a number of tokens that the ranks do not divide raises an AssertionError.
    """
    from diffusers import ContextParallelConfig, ParallelConfig
    from diffusers.hooks.context_parallel import apply_context_parallel, remove_context_parallel

    _reroute()

    def configuration(layer: str) -> ContextParallelConfig:
        made = ContextParallelConfig(ulysses_degree=group.size)
        made._flattened_mesh = made._ulysses_mesh = LayerGroup(group, layer)
        made._world_size = group.size
        return made

    for name, module in denoiser.named_modules():
        if hasattr(getattr(module, "processor", None), "_parallel_config") and not name.endswith(CROSS):
            module.processor._parallel_config = ParallelConfig(context_parallel_config=configuration(name))
            patches.undoing.append(partial(setattr, module.processor, "_parallel_config", None))
    plan = _plan(denoiser)
    apply_context_parallel(denoiser, configuration(""), plan)
    patches.undoing.append(lambda: remove_context_parallel(denoiser, plan))


@dataclass
class LayerGroup:
    """A lockstep group for one layer, given to diffusers in place of a device mesh and of its process group."""

    group: Group
    layer: str

    def get_group(self) -> LayerGroup:
        """Return what diffusers takes for the mesh's process group."""
        return self

    def shard(self, whole: Tensor, dim: int) -> Tensor:
        """Cut this rank's share of the tokens."""
        assert whole.shape[dim] % self.group.size == 0, f"{whole.shape[dim]} tokens: {self.group.size} must divide them"
        return whole.chunk(self.group.size, dim)[self.group.rank]

    def unshard(self, own: Tensor, dim: int) -> Tensor:
        """Gather the shares of all ranks."""
        return torch.cat([*self.group.all_gather(own, self.layer, "prediction")], dim)

    def exchange(self, pieces: Tensor) -> Tensor:
        """Send the n-th of equal parts to the n-th rank; return the parts of all ranks, in the same shape."""
        sizes = [pieces.numel() // self.group.size] * self.group.size
        return self.group.all_to_all(pieces.flatten(), sizes, sizes, self.layer).view(pieces.shape)


@functools.cache
def _reroute() -> None:
    """Have diffusers' functions communicate by a `LayerGroup` where they are given one, for the rest of the process."""
    from diffusers.hooks.context_parallel import EquipartitionSharder
    from diffusers.models import attention_dispatch

    def replace(owner: Any, name: str, by_group: Callable[..., Tensor]) -> None:
        theirs = getattr(owner, name)

        def function(*args: Any, **kwargs: Any) -> Tensor:
            *given, where = args
            return by_group(where, *given) if isinstance(where, LayerGroup) else theirs(*args, **kwargs)

        setattr(owner, name, function)

    replace(EquipartitionSharder, "shard", LayerGroup.shard)
    replace(EquipartitionSharder, "unshard", LayerGroup.unshard)
    replace(attention_dispatch, "_all_to_all_single", LayerGroup.exchange)


def _plan(denoiser: Any) -> dict[str, Any]:
    """diffusers' plan, except that the text stays whole where attention to it is apart from that among the tokens.

    Such cross-attention then needs no communication. diffusers' own for LTX fails: its mask is of all heads.
    """
    plan = dict(denoiser._cp_plan)
    if "" in plan and any(name.endswith(CROSS) for name, _ in denoiser.named_modules()):
        plan[""] = {name: cut for name, cut in plan[""].items() if not name.startswith("encoder_")}
    return plan


def refusal(denoiser: Any, ranks: int) -> str | None:
    """Why a denoiser cannot be split over so many ranks by tokens or frames; None where nothing is known against it."""
    if frame_axis(denoiser) is not None:
        return None
    name = type(denoiser).__name__
    if not getattr(denoiser, "_cp_plan", None):
        return f"diffusers has no plan to split {name} by tokens, and only video UNets are split by frames"
    heads = denoiser.config.num_attention_heads
    return f"must divide the {heads} attention heads of {name}" if heads % ranks else None


def check(denoisers: dict[str, nn.Module], calls: Sequence[Call], ranks: int) -> None:
    """Check that the denoisers of a run can be split over so many ranks.

    Args:
        denoisers: on the meta device.
        calls: of the run's loop.

    Raises:
        ConfigError: they cannot.
    """
    if ranks == 1:
        return
    for name, denoiser in denoisers.items():
        if reason := refusal(denoiser, ranks):
            raise ConfigError("frames", ranks, reason)
        for call in [call for call in calls if call.denoiser == name][:1]:  # all have the same sizes
            if (axis := frame_axis(denoiser)) is not None:
                if (count := sample_of(call.args, call.kwargs).shape[axis]) < ranks:
                    raise ConfigError("frames", ranks, f"must be at most num_frames, {count}")
                continue
            for tokens in _tokens(denoiser, call):
                if tokens % ranks:
                    raise ConfigError("frames", ranks, f"must divide the {tokens} tokens that {name} splits")


def _tokens(denoiser: Any, call: Call) -> set[int]:
    """The numbers of tokens that a call cuts. It runs on the meta device, with hooks that stay."""
    from diffusers.hooks import HookRegistry
    from diffusers.hooks.context_parallel import ContextParallelSplitHook, _get_submodule_by_name

    found: set[int] = set()

    class Noting(ContextParallelSplitHook):
        def _prepare_cp_input(self, x: Tensor, cp_input: Any) -> Tensor:
            if cp_input.expected_dims in (None, x.dim()):
                found.add(x.shape[cp_input.split_dim])
            return x

    for path, plan in _plan(denoiser).items():
        if isinstance(plan, dict):
            modules = _get_submodule_by_name(denoiser, path)
            for module in modules if isinstance(modules, list) else [modules]:
                HookRegistry.check_if_exists_or_initialize(module).register_hook(Noting(plan, None), f"noting {path}")
    with torch.no_grad():
        denoiser(*call.args, **call.kwargs)
    return found
