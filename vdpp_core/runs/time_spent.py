"""Where the time of a rank went, from its events."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from vdpp_core.runs import event_types as kinds
from vdpp_core.runs.event_types import Event


def time_spent(own: Sequence[Event]) -> dict[str, float]:
    """Seconds that a rank spent on each part of a run so far, from the start of its launcher to its last event.

    launch:  the launcher, until this rank's process began
    import:  Python, libraries, checks
    join:    meeting the other ranks
    load:    the model, and making it as the run needs it
    encode:  the encoders, loading included; on other ranks, waiting for what they return
    warm_up: untimed steps and samples, until all ranks are ready
    denoise: steps, without waiting for other ranks
    decode, write: videos
    compare: the official pipeline
    other:   the rest: hand-offs, waiting for other ranks, loading experts, saving latents, profiling
    total:   the sum of these

    Args:
        own: the rank's events, sorted by time. Without a start event (none has begun yet) nothing is known.
    """
    start = next(iter(kinds.of(own, kinds.Start)), None)
    if start is None:
        return {}
    clock = next((event.t for event in kinds.of(own, kinds.Clock)), own[-1].t)
    loaded = next(iter(kinds.of(own, kinds.Loaded)), None)
    videos, encode_s = kinds.of(own, kinds.Video), (loaded and loaded.encode_s) or 0.0
    write_s = sum(event.write_s or 0.0 for event in videos)
    spent = {
        "launch": start.launch_s or 0.0,
        "import": start.import_s or 0.0,
        "join": start.join_s or 0.0,
        "load": loaded.t - start.t - encode_s if loaded else 0.0,
        "encode": encode_s + sum(event.seconds for event in kinds.of(own, kinds.Encode)),
        "warm_up": clock - (loaded or start).t,
        "denoise": sum(event.seconds for event in own if isinstance(event, kinds.Step | kinds.Pad) and event.t > clock),
        "decode": sum(event.seconds for event in videos) - write_s,
        "write": write_s,
        "compare": sum(b.t - a.t for a, b in pairwise(own) if isinstance(b, kinds.Comparing | kinds.Official)),
    }
    total = sum(spent[part] for part in ("launch", "import", "join")) + own[-1].t - start.t
    return spent | {"other": total - sum(spent.values()), "total": total}
