"""Sequence parallelism of video transformers: diffusers' own, over the process groups of a run.

Each rank has a share of the tokens. In self-attention an all-to-all gives each rank some heads of all tokens, and
another one gives the tokens back (Jacobs et al. 2023, "DeepSpeed Ulysses"). No sum is reordered. Where a model cuts and
gathers its tokens is its `_cp_plan`. diffusers' `enable_parallelism` is for accelerators only; what it does is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from vdpp_core.config.errors import ConfigError
from vdpp_core.models.patches import Patches
from vdpp_core.parallel.frames import frame_axis
from vdpp_core.parallel.group import Collectives
from vdpp_core.parallel.world import LostRankError

if TYPE_CHECKING:
    from vdpp_core.models.stage import Call

CROSS = "attn2"  # diffusers' name of the attention from the video to the text


def split(denoiser: Any, group: Collectives, patches: Patches) -> None:
    """Have each rank of `group` compute its share of the tokens: whole latents in, whole prediction out.

    The shares are equal: in a call, a number of tokens that the ranks do not divide raises an AssertionError. What is
    sent is not counted. A lost rank raises a LostRankError.
    """
    from diffusers import ContextParallelConfig, ParallelConfig
    from diffusers.hooks.context_parallel import apply_context_parallel, remove_context_parallel

    config = ContextParallelConfig(ulysses_degree=group.size)
    line = DeviceMesh.from_group(group.group, next(denoiser.parameters()).device.type)
    config._flattened_mesh = config._ulysses_mesh = line
    config._world_size = group.size
    whole = ParallelConfig(context_parallel_config=config)
    for name, module in denoiser.named_modules():
        if hasattr(getattr(module, "processor", None), "_parallel_config") and not name.endswith(CROSS):
            module.processor._parallel_config = whole
            patches.undoing.append(partial(setattr, module.processor, "_parallel_config", None))
    plan = _plan(denoiser)
    apply_context_parallel(denoiser, config, plan)
    patches.undoing.append(lambda: remove_context_parallel(denoiser, plan))
    compute = denoiser.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return compute(*args, **kwargs)
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or "gloo/" in str(error):
                raise LostRankError("unknown", str(error).splitlines()[0]) from error
            raise

    patches.forward(denoiser, forward)


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
        if frame_axis(denoiser) is not None:
            continue  # the configuration checks the number of frames
        for call in [call for call in calls if call.denoiser == name][:1]:  # all have the same sizes
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
