"""Which rank of another machine the ranks of this one wait for, as far as their own events tell."""

from __future__ import annotations

import socket
from pathlib import Path

from vdpp_core import runfolder
from vdpp_core.config import RunConfig
from vdpp_core.progress import ENDS, needed, position


def unheard(folder: Path, silence_s: float, surely: bool = False) -> dict[int, str]:
    """A rank of another machine, or one that never started, that a rank of this one waits for -> what is known of it.

    Empty where there is none, or where a rank of this machine is what the others wait for; but where another machine
    is `surely` silent, its first rank is named while nobody waits for it yet.
    """
    config, events = RunConfig.read(folder), runfolder.read_events(folder)
    here = {e["rank"]: e for e in events if e["kind"] == "start" and e["host"] == socket.gethostname()}
    elsewhere = set(range(config.layout.world_size)) - here.keys()
    if not elsewhere or not here or any(runfolder.stands_still(start) for start in here.values()):
        return {}
    words = f"nothing was heard of it for {silence_s:.0f} s (timeout_s)"
    for rank in sorted(here):
        own = [event for event in events if event["rank"] == rank and event["kind"] not in ENDS[1:]]
        steps = config.stages()[config.layout.place(rank).stage]
        for other in needed(config, rank, own[-1]):
            if other in elsewhere:
                sample, step = position(own, steps)
                at = "" if sample is None else f" at sample {sample}" + ("" if step is None else f", step {step}")
                return {other: f"{words}; rank {rank} waits for it{at}"}
    return {min(elsewhere): words} if surely else {}
