"""What the supervisors of a run over several machines tell each other, through the store at the endpoint.

That each is there, that somebody stopped the run, and after a bad end how each machine's ranks ended. torchrun's agents
exchange none of it, and over a link that is cut they wait for minutes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from launch.machines.nodes import MEETING_PATIENCE_S, Nodes
from launch.terminate import end_children, settle
from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.runs import events, files, processes, runfolder, stalls
from vdpp_core.runs.stalls import PERIOD_S, Standstills

LAST_WORDS_S = 3.0  # after the end of another machine's ranks, for those of this one to notice
WORD_S = 3.0  # for a word to or from the others
AGENT_PATIENCE_S = 5.0  # after the end of the last rank here, for torchrun's agent


class Others(threading.Thread):
    """This machine's end of it. The thread hears the others; another one acts on what is heard, since a store whose
    link is cut does not answer."""

    def __init__(self, nodes: Nodes, folder: Path) -> None:
        super().__init__(daemon=True)
        self.nodes, self.folder, self.config = nodes, folder, RunConfig.read(folder)
        self.is_host = nodes.address[1]
        self.store: Store | None = None
        self.number = 0
        self.starts: list[events.Event] = []
        self.beats: dict[int, tuple[int, float]] = {}
        self.stalled: dict[int, str] = {}
        self.reason: str | None = None
        self.ended_elsewhere: float | None = None
        self.over = threading.Event()

    def meet(self) -> None:
        """Come to the endpoint, wherever its machine is not there yet.

        Raises:
            ConfigError: another machine was called with other arguments, or there are too many.
            TimeoutError: nobody is there.
        """
        host, port = self.nodes.place
        deadline = time.monotonic() + MEETING_PATIENCE_S
        while not self.is_host and not _answers(host, port):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no machine at {self.nodes.endpoint} within {MEETING_PATIENCE_S:.0f} s")
            time.sleep(PERIOD_S)
        server = TCPStore(host, port, is_master=self.is_host, multi_tenant=True, timeout=timedelta(minutes=1))
        store = PrefixStore(f"supervisors/{self.nodes.run_id}", server)
        self.number = store.add("came", 1)
        if self.number > self.nodes.nnodes:  # those that have come hear nothing of it
            raise ConfigError("nnodes", self.nodes.nnodes, "so many machines have come already")
        self.store = store
        self.compare(store)
        self.start()
        threading.Thread(target=self._act, daemon=True).start()

    def compare(self, store: Store) -> None:
        """Whether all machines were called with the same arguments; ConfigError if not."""
        ours = {"nnodes": self.nodes.nnodes, "nproc": self.nodes.nproc} | runfolder.facts(self.config)
        theirs = json.loads(store.compare_set("arguments", "", json.dumps(ours)))
        for name, value in ours.items():
            if value != theirs.get(name):
                raise ConfigError(name, value, f"must be as on the machine that came first, {theirs.get(name)}")

    def run(self) -> None:
        assert self.store is not None
        try:
            while not self.over.wait(PERIOD_S):
                self.store.add(f"beat/{self.number}", 1)
                for number in range(1, self.nodes.nnodes + 1):
                    beat = self.store.add(f"beat/{number}", 0)
                    if beat and beat != self.beats.get(number, (0, 0.0))[0]:
                        self.beats[number] = beat, time.monotonic()
                if self.store.check(["stopped"]) and self.reason is None:
                    self.reason = "stopped"
                    os.kill(os.getpid(), signal.SIGTERM)
                if self.store.add("ended", 0) and self.ended_elsewhere is None:
                    self.ended_elsewhere = time.monotonic()
        except RuntimeError:  # the endpoint's machine is gone: no beats are heard any more, and its ranks are lost
            return

    def _act(self) -> None:
        """End this machine's ranks when another machine is silent or has ended badly, and this process when torchrun's
        agent does not come back."""
        patience = max(self.config.timeout_s, 10 * PERIOD_S)
        ranks_ended: float | None = None
        still = Standstills()
        while not self.over.wait(PERIOD_S):
            now, heard = time.monotonic(), [heard for _, heard in list(self.beats.values())]
            still.look(now, forget=now - 2 * patience)
            silence = max((still.silence_s(each, now) for each in heard), default=0.0)
            if silence > patience and not self.stalled:
                self.stalled = stalls.unheard(self.folder, silence, surely=True)
                self.end_here(f"nothing was heard of another machine for {silence:.0f} s (timeout_s)")
            if self.ended_elsewhere is not None and still.silence_s(self.ended_elsewhere, now) > LAST_WORDS_S:
                self.end_here("another machine could not go on")
            ranks_ended = (ranks_ended or now) if self._ranks_have_ended() else None
            if ranks_ended is not None and still.silence_s(ranks_ended, now) > AGENT_PATIENCE_S:
                settle(self.folder, self.stalled, reason=self.reason)
                os._exit(1)

    def end_here(self, reason: str) -> None:
        """End this machine's ranks, whose folder says why; before they start, this process for that reason."""
        if self._starts():
            end_children()
        elif self.reason is None:
            self.reason = reason
            os.kill(os.getpid(), signal.SIGTERM)

    def _starts(self) -> list[events.Event]:
        """The start events of this machine's ranks. Once all are there the files are not read again: they grow."""
        if len(self.starts) < self.nodes.nproc:
            starts = [event for event in runfolder.read_events(self.folder) if event["kind"] == "start"]
            self.starts = [event for event in starts if event["host"] == socket.gethostname()]
        return self.starts

    def _ranks_have_ended(self) -> bool:
        starts = self._starts()
        return len(starts) == self.nodes.nproc and not any(map(processes.is_rank, starts))

    def say_stopped(self) -> None:
        """Have the run end on all machines."""
        store = self.store
        if store is not None and self.reason is None:
            self.reason = "stopped"
            _within(WORD_S, lambda: store.set("stopped", "1"))

    def settle(self, exits: Mapping[int, int | str] | None = None, reason: str | None = None) -> dict[str, Any]:
        """Settle the run folder with what is known on all machines, as far as they can be reached, and leave them."""
        result = runfolder.read_result(self.folder)
        if self.over.is_set() and result is not None:
            return result
        self.over.set()
        known = dict(exits or {})
        good = result is not None and result["outcome"] == "ok"
        if self.store is not None and not good and not self.stalled:
            _within(2 * WORD_S, lambda: self._exchange(known, reason))
        result = settle(self.folder, self.stalled or dict(known), reason=self.reason or reason)
        if self.store is not None and not self.stalled:
            _within(2 * WORD_S, self._leave)
        return result

    def give_up(self) -> None:
        """Leave the other machines, which then end; there is nothing to settle here."""
        self.over.set()
        store = self.store
        if store is not None:
            _within(WORD_S, partial(store.add, "ended", 1))

    def _exchange(self, known: dict[int, int | str], reason: str | None) -> None:
        """Tell and hear what ended the run, how ranks ended, and their events where the folder is not shared."""
        assert self.store is not None
        own = [self.folder / "events" / f"rank-{start['rank']}.jsonl" for start in self._starts()]
        texts = {path.name: path.read_text(encoding="utf-8", errors="replace") for path in own}
        said = {"reason": None if self.reason else reason, "exits": known, "events": texts}
        self.store.set(f"said/{self.number}", json.dumps(said))
        self.store.add("ended", 1)
        deadline = time.monotonic() + WORD_S
        while self.store.add("ended", 0) < self._came() and time.monotonic() < deadline:
            time.sleep(PERIOD_S / 5)
        if self.store.check(["stopped"]):
            self.reason = "stopped"
        for number in range(1, self._came() + 1):
            if number != self.number and self.store.check([f"said/{number}"]):
                said = json.loads(self.store.get(f"said/{number}"))
                self.reason = said["reason"] or self.reason
                known |= {int(rank): how for rank, how in said["exits"].items()}
                for name, text in said["events"].items():
                    if not (self.folder / "events" / name).exists():
                        files.write_atomically(self.folder / "events" / name, text)

    def _came(self) -> int:
        assert self.store is not None
        return min(self.store.add("came", 0), self.nodes.nnodes)

    def _leave(self) -> None:
        """The endpoint's machine stays until the others have heard it all."""
        assert self.store is not None
        self.store.add("left", 1)
        deadline = time.monotonic() + WORD_S
        while self.is_host and self.store.add("left", 0) < self._came() and time.monotonic() < deadline:
            time.sleep(PERIOD_S / 5)


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=PERIOD_S):
            return True
    except OSError:
        return False


def _within(seconds: float, work: Callable[[], object]) -> None:
    """Do it, or go on after so many seconds: over a link that is cut a store does not answer."""

    def quietly() -> None:
        try:
            work()
        except RuntimeError:  # the endpoint's machine is gone
            return

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(seconds)
