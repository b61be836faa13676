"""How far a run is, where each rank is, and which one keeps the others waiting, from the event log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vdpp_core.config import RunConfig
from vdpp_core.runs import resuming, runfolder
from vdpp_core.runs.events import position
from vdpp_core.runs.stalls import look


def progress(folder: Path) -> dict[str, Any]:
    """How far a run is: its phase (starting, loading, warming up, running, decoding), samples finished, the share done,
    seconds left, each rank's last kind of event and position, and what is stalled, if something is."""
    config, events = RunConfig.read(folder), runfolder.read_events(folder)
    layout, stages, work = config.layout, config.stages(), resuming.work(folder, config)
    ranks = []
    for rank in range(layout.world_size):
        own = [event for event in events if event["rank"] == rank]
        replica, stage, _ = layout.place(rank)
        steps = sum(event["kind"] == "step" and event["sample"] >= 0 for event in own)
        sample, step = position(own, stages[stage])
        ranks.append(
            {
                "rank": rank,
                "phase": own[-1]["kind"] if own else "starting",
                "sample": sample,
                "step": step,
                "steps_done": steps,
                "steps": len(config.samples(replica, work.latents)) * len(stages[stage]),
            }
        )
    done, total = sum(rank["steps_done"] for rank in ranks), sum(rank["steps"] for rank in ranks)
    zero = min((event["t"] for event in events if event["kind"] == "clock"), default=None)
    elapsed = 0.0 if zero is None else max(event["t"] for event in events) - zero
    kinds = {event["kind"] for event in events}
    phases = (("decode", "decoding"), ("clock", "running"), ("loaded", "warming up"), ("start", "loading"))
    stall = look(config, work, events)
    return {
        "phase": next((phase for kind, phase in phases if kind in kinds), "starting"),
        "samples_finished": len(work.kept) + sum(event["kind"] == "sample" for event in events),
        "num_samples": config.num_samples,
        "share": (len(work.kept) + len(work.latents) * (done / total if total else 1)) / config.num_samples,
        "seconds_left": elapsed * (total - done) / done if done else None,
        "stalled": str(stall) if stall else None,
        "ranks": ranks,
    }
