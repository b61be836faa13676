"""A torch.profiler trace of some steps, with the denoiser's layers and all memory that is allocated and freed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from vdpp_core.parallel.fsdp_units import units
from vdpp_core.runs.profiles import LAYER, path_of


@contextmanager
def traced(denoisers: nn.ModuleDict, device: torch.device, folder: Path, rank: int) -> Iterator[None]:
    """Trace what this rank does in the context, and write it into the run folder for Perfetto."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    path = path_of(folder, rank)
    path.parent.mkdir(exist_ok=True)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # no lines about its own stages
    with ExitStack() as named:
        for denoiser in denoisers.values():
            names = {module: name for name, module in denoiser.named_modules()}
            for layer in units(denoiser):
                _named(layer, LAYER + names[layer], named)
        with profile(activities=activities, profile_memory=True, record_shapes=True) as trace:
            yield
    trace.export_chrome_trace(str(path))


def _named(layer: nn.Module, name: str, until: ExitStack) -> None:
    """Have a layer's forward passes appear as a span, until the context ends."""
    spans: list[Any] = []

    def begin(*_: Any) -> None:
        spans.append(record_function(name))
        spans[-1].__enter__()

    def end(*_: Any) -> None:
        spans.pop().__exit__(None, None, None)

    until.callback(layer.register_forward_pre_hook(begin).remove)
    until.callback(layer.register_forward_hook(end).remove)
