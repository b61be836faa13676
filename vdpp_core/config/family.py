"""Which pipeline a model is, from its files."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

SVD = "StableVideoDiffusionPipeline"


def pipeline_class(model_id: str | None) -> str:
    """Name of the diffusers class that loads a model: a folder, or a hub name whose settings are in the cache.

    The package's own models are Stable Video Diffusions; so is whatever does not say what it is.
    """
    if model_id is None:
        return SVD
    path = Path(os.path.expanduser(model_id), "model_index.json")
    if not os.path.isfile(path):  # Path.is_file fails for names that are too long
        import huggingface_hub as hub

        try:
            cached = hub.try_to_load_from_cache(model_id, path.name)
        except ValueError:  # no hub name either; reported where the model is checked
            return SVD
        path = Path(cached) if isinstance(cached, str) else path
    return str(_index(path).get("_class_name", SVD))


@functools.lru_cache(maxsize=32)
def _index(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
