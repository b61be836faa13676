"""Coordinate the supervisors of a run over several machines, through the store at the rendezvous endpoint.

torchrun's agents share none of this, and wait for minutes when a link is cut. Keys of the store:

| key | value |
|---|---|
| arguments | the arguments of the machine that came first, as JSON |
| came, left, ended | how many machines have arrived, have left, and have ended badly |
| beat/N | counter that machine N (1 to `came`) increases every PERIOD_S seconds |
| stopped | exists once the user has stopped the run |
| said/N | machine N's report after a bad end, as JSON: reason, its ranks' exits, their event files |
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
from launch.machines.silence import Silence, awaited
from launch.terminate import end_children, settle
from vdpp_core.config.errors import ConfigError
from vdpp_core.runs import files, processes, runfolder
from vdpp_core.runs.event_types import Start, of
from vdpp_core.runs.events import now
from vdpp_core.runs.run import Run
from vdpp_core.runs.stalls import PERIOD_S

LAST_WORDS_S = 3.0  # for this machine's ranks to notice that another machine's ranks have ended
WORD_S = 3.0  # for one exchange with the other machines
AGENT_PATIENCE_S = 5.0  # for torchrun's agent, after this machine's last rank has ended


class Others(threading.Thread):
    """This machine's view of the other machines of a run.

    This thread sends and receives through the store; a second one acts on what was received, because calls to a store
    whose link is cut do not return.

    Args:
        nodes: the machines.
        folder: the run folder on this machine, shared or not.
    """

    def __init__(self, nodes: Nodes, folder: Path) -> None:
        super().__init__(daemon=True)
        self.nodes, self.folder, self.this_run = nodes, folder, Run(folder)
        self.is_host = nodes.address[1]  # whether the store is on this machine
        self.store: Store | None = None
        self.number = 0  # of this machine, in order of arrival
        self.starts: list[Start] = []
        self.beats: dict[int, tuple[int, float]] = {}  # machine -> its last beat and when that came
        self.stalled: dict[int, str] = {}  # rank -> why it is given up
        self.reason: str | None = None  # why the run ends
        self.ended_elsewhere: float | None = None  # when another machine's bad end was noticed
        self.over = threading.Event()

    def meet(self) -> None:
        """Join the other machines at the endpoint; waits up to MEETING_PATIENCE_S for the endpoint's machine.

        Raises:
            ConfigError: another machine was started with other arguments, or there are too many machines.
            TimeoutError: the endpoint does not answer.
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
        if self.number > self.nodes.nnodes:  # the others do not notice
            raise ConfigError("nnodes", self.nodes.nnodes, "that many machines have already joined")
        self.store = store
        self.compare(store)
        self.start()
        threading.Thread(target=self._act, daemon=True).start()

    def compare(self, store: Store) -> None:
        """Compare this machine's arguments with those of the machine that came first.

        Raises:
            ConfigError: they differ.
        """
        own = {"nnodes": self.nodes.nnodes, "nproc": self.nodes.nproc} | runfolder.facts(self.this_run.config)
        first = json.loads(store.compare_set("arguments", "", json.dumps(own)))
        for name, value in own.items():
            if value != first.get(name):
                raise ConfigError(name, value, f"must be as on the machine that came first, {first.get(name)}")

    def run(self) -> None:
        """Exchange beats until the run is over; `start` calls it."""
        assert self.store is not None
        try:
            while not self.over.wait(PERIOD_S):
                self._exchange_beats(self.store)
        except RuntimeError:  # the endpoint's machine is gone: no more beats arrive, and its ranks are lost
            return

    def _exchange_beats(self, store: Store) -> None:
        store.add(f"beat/{self.number}", 1)
        for number in range(1, self.nodes.nnodes + 1):
            beat = store.add(f"beat/{number}", 0)
            if beat and beat != self.beats.get(number, (0, 0.0))[0]:
                self.beats[number] = beat, now()
        if store.check(["stopped"]):
            self._end_supervisor("stopped")
        if store.add("ended", 0) and self.ended_elsewhere is None:
            self.ended_elsewhere = now()

    def _act(self) -> None:
        """End this machine's ranks when another machine is silent or has ended badly; end this process when torchrun's
        agent does not return after its ranks have ended."""
        silence = Silence(self.this_run.config.timeout_s)
        ranks_ended: float | None = None
        while not self.over.wait(PERIOD_S):
            silent_s = silence.fatal_s([heard for _, heard in list(self.beats.values())])
            if silent_s is not None and not self.stalled:
                self.stalled = awaited(self.this_run, silent_s, certain=True)
                self.end_here(f"nothing was heard of another machine for {silent_s:.0f} s (timeout_s)")
            if silence.has_waited(self.ended_elsewhere):
                self.end_here("another machine could not go on")
            ranks_ended = (ranks_ended or now()) if self._ranks_have_ended() else None
            if silence.has_waited(ranks_ended, AGENT_PATIENCE_S):
                settle(self.this_run, self.stalled, reason=self.reason)
                os._exit(1)

    def end_here(self, reason: str) -> None:
        """End this machine's ranks, whose events explain the end; before they start, this process with that reason."""
        if self._starts():
            end_children()
        else:
            self._end_supervisor(reason)

    def _end_supervisor(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
            os.kill(os.getpid(), signal.SIGTERM)

    def _starts(self) -> list[Start]:
        """The start events of this machine's ranks, kept once complete: the event files grow."""
        if len(self.starts) < self.nodes.nproc:
            starts = of(self.this_run.events(), Start)
            self.starts = [event for event in starts if event.host == socket.gethostname()]
        return self.starts

    def _ranks_have_ended(self) -> bool:
        starts = self._starts()
        return len(starts) == self.nodes.nproc and not any(map(processes.is_rank, starts))

    def say_stopped(self) -> None:
        """Stop the run on all machines."""
        store = self.store
        if store is not None and self.reason is None:
            self.reason = "stopped"
            _within(WORD_S, lambda: store.set("stopped", "1"))

    def settle(self, exits: Mapping[int, int | str] | None = None, reason: str | None = None) -> dict[str, Any]:
        """Write this machine's result.json and leave the other machines; returns the result.

        After a bad end, the reports of the machines that can be reached are included.

        Args:
            exits: rank -> exit code, or signal, of this machine's ranks.
            reason: why the run ended, if this machine knows.
        """
        result = self.this_run.result()
        if self.over.is_set() and result is not None:
            return result
        self.over.set()
        known = dict(exits or {})
        good = result is not None and result["outcome"] == "ok"
        if self.store is not None and not good and not self.stalled:
            _within(2 * WORD_S, partial(self._exchange_reports, self.store, known, reason))
        result = settle(self.this_run, self.stalled or dict(known), reason=self.reason or reason)
        if self.store is not None and not self.stalled:
            _within(2 * WORD_S, partial(self._leave, self.store))
        return result

    def give_up(self) -> None:
        """Leave the other machines, which then end; there is nothing to settle here."""
        self.over.set()
        if self.store is not None:
            _within(WORD_S, partial(self.store.add, "ended", 1))

    def _exchange_reports(self, store: Store, known: dict[int, int | str], reason: str | None) -> None:
        """Report what ended the run here, and add the other machines' exits to `known`; their event files are copied if
        the folder is not shared."""
        own = [self.folder / "events" / f"rank-{start.rank}.jsonl" for start in self._starts()]
        texts = {path.name: path.read_text(encoding="utf-8", errors="replace") for path in own}
        report = {"reason": None if self.reason else reason, "exits": known, "events": texts}
        store.set(f"said/{self.number}", json.dumps(report))
        store.add("ended", 1)
        self._wait_for_all(store, "ended")
        if store.check(["stopped"]):
            self.reason = "stopped"
        for number in range(1, self._came(store) + 1):
            if number != self.number and store.check([f"said/{number}"]):
                report = json.loads(store.get(f"said/{number}"))
                self.reason = report["reason"] or self.reason
                known |= {int(rank): how for rank, how in report["exits"].items()}
                for name, text in report["events"].items():
                    if not (self.folder / "events" / name).exists():
                        files.write_atomically(self.folder / "events" / name, text)

    def _leave(self, store: Store) -> None:
        """Leave; the endpoint's machine waits for the others, because the store ends with it."""
        store.add("left", 1)
        if self.is_host:
            self._wait_for_all(store, "left")

    def _wait_for_all(self, store: Store, counter: str) -> None:
        """Wait up to WORD_S until the counter has reached the number of machines that have come."""
        deadline = time.monotonic() + WORD_S
        while store.add(counter, 0) < self._came(store) and time.monotonic() < deadline:
            time.sleep(PERIOD_S / 5)

    def _came(self, store: Store) -> int:
        return min(store.add("came", 0), self.nodes.nnodes)


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=PERIOD_S):
            return True
    except OSError:
        return False


def _within(seconds: float, work: Callable[[], object]) -> None:
    """Do the work, but wait at most that long: over a cut link, calls to a store do not return."""

    def quietly() -> None:
        try:
            work()
        except RuntimeError:  # the endpoint's machine is gone
            return

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(seconds)
