"""How a run's samples compare with the official pipeline's, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

WITHIN = 1e-5  # of latents in fp32, where one forward pass is split over ranks: sums are made in another order


def in_words(official: Mapping[str, Any]) -> dict[str, str]:
    """What `official` of a result says about "latents" and "frames".

    Latents are bit-equal, or their relative difference is named: the largest difference of two values, divided by the
    largest magnitude of an official one. Results of earlier versions have the largest difference alone.
    """
    return {"latents": _latents(official), "frames": _frames(official)}


def table(results: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """A row of `in_words` for each named result of a run that was compared."""
    return pd.DataFrame({name: in_words(result["official"]) for name, result in results.items()}).T


def _latents(official: Mapping[str, Any]) -> str:
    equal, samples = official["equal_latents"], official["samples"]
    if equal == samples:
        return f"bit-equal to the official pipeline{_counted(samples)}"
    some = f"; {equal} of {samples} bit-equal" * (equal > 0)
    relative = official.get("relative_latent_difference")
    if relative is None:
        return f"up to {official['max_latent_difference']:.1e} from the official pipeline{some}"
    if not math.isfinite(relative):
        return f"not finite, here or in the official pipeline{some}"
    if relative <= WITHIN:
        return f"within {WITHIN:.0e} of the official pipeline ({relative:.1e}){some}"
    return f"up to {relative:.1e} (relative) from the official pipeline{some}"


def _frames(official: Mapping[str, Any]) -> str:
    equal, samples = official["equal_frames"], official["samples"]
    if equal == samples:
        return f"equal to the official pipeline's{_counted(samples)}"
    levels = official["max_frame_difference"]
    some = f"; {equal} of {samples} equal" * (equal > 0)
    return f"up to {levels} of 255 grey levels from the official pipeline's{some}"


def _counted(samples: int) -> str:
    return f", all {samples} samples" if samples > 1 else ""
