"""How long other machines of a run are silent, and which of their ranks are waited for here."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from vdpp_core.runs import event_types as kinds
from vdpp_core.runs import processes
from vdpp_core.runs.event_types import position
from vdpp_core.runs.events import now
from vdpp_core.runs.run import Run
from vdpp_core.runs.stalls import LAST_WORDS_S, PERIOD_S, Standstills, needed, unheard


class Silence:
    """Measures the silence of other machines of a run. Time in which this watcher itself stood still does not count.

    Args:
        timeout_s: seconds of silence that end the run.
    """

    def __init__(self, timeout_s: float) -> None:
        self.patience, self.still = max(timeout_s, 10 * PERIOD_S), Standstills()

    def fatal_s(self, heard: Iterable[float]) -> float | None:
        """Seconds of silence of another machine that end the run; None while there is none. To be asked every PERIOD_S.

        Args:
            heard: when each machine was last heard, as `events.now`.
        """
        at = now()
        self.still.look(at, forget=at - 2 * self.patience)
        silence = max((self.still.silence_s(each, at) for each in heard), default=0.0)
        return silence if silence > self.patience else None

    def has_waited(self, since: float | None, seconds: float = LAST_WORDS_S) -> bool:
        """Whether the watcher was awake for so many seconds since a time; not where there is no such time."""
        return since is not None and self.still.silence_s(since, now()) > seconds


def awaited(run: Run, silence_s: float, certain: bool = False) -> dict[int, str]:
    """A rank of another machine, or one that never started, that a rank of this one waits for -> the cause in words.

    Args:
        silence_s: seconds for which nothing was heard of the other machine.
        certain: it is known to be silent, so its first rank is named although nobody waits for it yet.

    Returns:
        One rank; none where a rank of this machine is what the others wait for.
    """
    config, events = run.config, run.events()
    here = {e.rank: e for e in events if isinstance(e, kinds.Start) and e.host == socket.gethostname()}
    elsewhere = set(range(config.layout.world_size)) - here.keys()
    if not elsewhere or not here or any(map(processes.is_stopped, here.values())):
        return {}
    for rank in sorted(here):
        own = [event for event in events if event.rank == rank and not isinstance(event, kinds.BadEnd)]
        for other in needed(config, rank, own[-1]):
            if other in elsewhere:
                return {other: unheard(silence_s, rank, *position(own, config.steps_of(rank)))}
    return {min(elsewhere): unheard(silence_s)} if certain else {}
