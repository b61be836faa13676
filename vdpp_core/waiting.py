"""Which rank of another machine the ranks of this one wait for, as far as their own events tell."""

from __future__ import annotations

import socket
from pathlib import Path

from vdpp_core import results, runfolder
from vdpp_core.config import RunConfig
from vdpp_core.layout import Parallel
from vdpp_core.runfolder import Event


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
        own = [event for event in events if event["rank"] == rank and event["kind"] not in results.ENDS[1:]]
        steps = config.stages()[config.layout.place(rank).stage]
        for other in _needed(config.layout, rank, own[-1], steps):
            if other in elsewhere:
                sample, step = results.position(own, steps)
                at = "" if sample is None else f" at sample {sample}" + ("" if step is None else f", step {step}")
                return {other: f"{words}; rank {rank} waits for it{at}"}
    return {min(elsewhere): words} if surely else {}


def _needed(layout: Parallel, rank: int, last: Event, steps: range) -> list[int]:
    """The ranks without which a rank that wrote this event last cannot go on."""
    replica, stage, member = layout.place(rank)
    if last["kind"] == "take" or (last["kind"] in ("step", "pad") and last["step"] != steps[-1]):
        replicas = range(layout.dp) if layout.fsdp else [replica]
        return [layout.rank(each, stage, mate) for each in replicas for mate in range(layout.lockstep)]
    if last["kind"] in ("step", "pad") and stage + 1 < layout.pp:
        return [layout.rank(replica, stage + 1, member)]
    if last["kind"] in ("send", "sample", "step", "pad") and stage > 0:
        return [layout.rank(replica, stage - 1, member)]
    return list(range(layout.world_size))  # all ranks meet: before the clock, before decoding, at the end
