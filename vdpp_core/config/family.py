"""Which pipeline a model is, from its files."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

from vdpp_core.config.errors import ConfigError

SVD = "StableVideoDiffusionPipeline"
OF_OTHERS = ("prompt", "negative_prompt", "call")  # arguments of a run that Stable Video Diffusion does not take
INDEX = "model_index.json"
UNET = "unet/config.json"
EXPERTS = "Experts"  # vdpp_core.models.experts
NAME = re.compile(r"[A-Za-z0-9_-]+")  # of an expert, whose folder has it, too


def pipeline_class(model_id: str | None, of_others: bool) -> str:
    """Name of the diffusers class that loads a model: a folder, or the name of one on the hub.

    The package's own models are Stable Video Diffusions; so is whatever does not say what it is. The check of its files
    reports that. A run of another pipeline that has been moved, or of a hub that cannot be reached, has the class "".

    Args:
        of_others: whether the run has arguments that only other pipelines take.
    """
    if model_id is None:
        return SVD
    return str(index(model_id).get("_class_name", "" if of_others else SVD))


def index(model_id: str) -> dict[str, Any]:
    """The index of a folder or of a model on the hub; empty where there is none or the hub cannot be reached."""
    return _read(Path(model_id).expanduser() / INDEX) or _from_hub(model_id, INDEX)


def experts(model_id: str) -> list[str]:
    """Names of the UNets that take turns in a Stable Video Diffusion; none where it has a plain one.

    Raises:
        ConfigError: its configuration does not say how they take turns.
    """
    found = _read(Path(model_id).expanduser() / UNET) or _from_hub(model_id, UNET)
    if found.get("_class_name") != EXPERTS:
        return []
    names = found.get("names")
    if fault := fault_of_experts(names, found.get("boundaries")):
        raise ConfigError("model_id", model_id, f"{fault}, in {UNET}")
    return list(names or ())


def fault_of_experts(names: Any, boundaries: Any) -> str:
    """Why experts of these names cannot take turns at these boundaries, in words; "" where they can."""
    as_names = isinstance(names, list) and all(isinstance(name, str) and NAME.fullmatch(name) for name in names)
    if not as_names or len(set(names)) != len(names) or len(names) < 2:
        return f"must name two experts or more, each a word of its own: names is {names!r}"
    as_numbers = isinstance(boundaries, list) and all(isinstance(each, int | float) for each in boundaries)
    falling = as_numbers and all(low < high for high, low in itertools.pairwise([math.inf, *boundaries, -math.inf]))
    if not falling or len(boundaries) != len(names) - 1:
        return f"must have falling boundaries, one fewer than its {len(names)} experts: boundaries is {boundaries!r}"
    return ""


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


@functools.lru_cache(maxsize=32)
def _from_hub(model_id: str, name: str) -> dict[str, Any]:
    """Settings of a model on the hub; downloaded, if they are not in the cache. The hub is asked once in a process."""
    import huggingface_hub as hub
    from huggingface_hub import errors

    # a malformed name; the last depends on the HTTP library of the hub client
    unreachable: tuple[type[BaseException], ...] = (OSError, ValueError, *errors.HfHubHTTPError.__bases__)
    try:
        if isinstance(cached := hub.try_to_load_from_cache(model_id, name), str):
            return _read(Path(cached))
        hub.get_hf_file_metadata(hub.hf_hub_url(model_id, name), timeout=10)  # fails at once, without another try
        return _read(Path(hub.hf_hub_download(model_id, name)))
    except unreachable:
        return {}
