"""How far a run is, where each rank is, and which one is stalled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vdpp_core.runs import event_types as kinds
from vdpp_core.runs.event_types import Event, position
from vdpp_core.runs.run import Run
from vdpp_core.runs.stalls import look

_PHASES = {  # the last one first
    "comparing": "comparing",
    "decode": "decoding",
    "clock": "running",
    "loaded": "warming up",
    "start": "loading",
}


def progress(run: Run, events: Sequence[Event] | None = None) -> dict[str, Any]:
    """How far a run is, from all ranks' `events` so far, which are read if they are not given.

    Its phase (starting, loading, warming up, running, decoding, comparing), samples finished, the share done (0 … 1),
    seconds left, the stall in words if there is one, and each rank's last kind of event, position and steps done.
    """
    config, work = run.config, run.work
    events = run.events() if events is None else events
    layout, stages = config.layout, config.stages()
    ranks: list[dict[str, Any]] = []
    for rank in range(layout.world_size):
        own = [event for event in events if event.rank == rank]
        place = layout.place(rank)
        sample, step = position(own, stages[place.stage])
        ranks.append(
            {
                "rank": rank,
                "phase": own[-1].kind if own else "starting",
                "sample": sample,
                "step": step,
                "steps_done": sum(isinstance(event, kinds.Step) and event.sample >= 0 for event in own),
                "steps": len(config.samples_at(place, work.latents)) * len(stages[place.stage]),
            }
        )
    done, total = sum(rank["steps_done"] for rank in ranks), sum(rank["steps"] for rank in ranks)
    zero = min((clock.t for clock in kinds.of(events, kinds.Clock)), default=None)
    elapsed = 0.0 if zero is None else max(event.t for event in events) - zero
    seen = {event.kind for event in events} - ({"decode"} if done < total else set())  # as-ready: between two samples
    stall = look(config, work, events)
    return {
        "phase": next((phase for kind, phase in _PHASES.items() if kind in seen), "starting"),
        "samples_finished": len(work.kept) + len(kinds.of(events, kinds.Finished)),
        "num_samples": config.num_samples,
        "share": (len(work.kept) + len(work.latents) * (done / total if total else 1)) / config.num_samples,
        "seconds_left": elapsed * (total - done) / done if done else None,
        "stalled": str(stall) if stall else None,
        "ranks": ranks,
    }
