"""What disturbed a run: events as ranks would write them, with and without standstills, whatever the layout."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from tests.unit.inputs import as_event
from vdpp_core import Parallel, RunConfig
from vdpp_core.cli import show
from vdpp_core.config.execution import resolve
from vdpp_core.config.layout import IN_FLIGHT
from vdpp_core.engine import worker
from vdpp_core.predict import rates
from vdpp_core.runs import disturbed, other_runs
from vdpp_core.runs.run import Run

CORES = 64
START = {"threads": 1, "device": "cpu", "dtype": "float32", "backend": "gloo", "pid": 1, "created": 0.0, "host": "here"}
LAYOUTS = [
    Parallel(),
    Parallel(dp=3),
    Parallel(pp=2),
    Parallel(pp=8),
    Parallel(dp=2, pp=2),
    Parallel(cfg=2, frames=2),
    Parallel(pp=2, frames=3),
    Parallel(dp=2, fsdp=True),
    Parallel(dp=2, pp=2, fsdp=True),
]


class Rehearsal:
    """A run without processes: ranks that take, step and send, wait for each other, and stand still when told to.

    stops: (ranks, from, seconds); the clock starts at 100 s.
    """

    def __init__(self, layout, samples=6, steps=16, step_s=0.1, stops=(), save_s=0.01, noise=lambda _: 1.0, first=0):
        self.config = RunConfig(total_steps=steps, num_samples=samples, parallel=layout)
        self.step_s, self.stops, self.save_s, self.noise = step_s, stops, save_s, noise
        self.logs = defaultdict(list)
        self.t = dict.fromkeys(range(layout.world_size), 90.0)
        self.sent, self.taken = {}, defaultdict(list)
        for rank in self.t:
            self.write(rank, "start", **START)
            self.write(rank, "warm", seconds=step_s)
            self.t[rank] = self.awake(rank, 100.0, 0.001)
            self.write(rank, "clock")
        longest = max(len(self.config.samples(replica)) for replica in range(layout.dp))
        for turn in range(longest):
            for stage, its_steps in enumerate(self.config.stages()):
                self.one_turn(turn, stage, its_steps, first)
        for rank in self.t:
            self.write(rank, "done", memory={})

    def write(self, rank, kind, **facts):
        self.logs[rank].append({"t": self.t[rank], "rank": rank, "kind": kind, **facts})

    def awake(self, rank, begin, seconds):
        """When a rank that has so much to do from `begin` on is done with it."""
        end = begin + seconds
        for ranks, at, length in sorted(self.stops, key=lambda stop: stop[1]):
            if rank in ranks and begin < at + length and end > at:
                end += at + length - max(begin, at)
        return end

    def one_turn(self, turn, stage, its_steps, first):
        layout = self.config.layout
        ranks = {}
        for replica in range(layout.dp):
            own = self.config.samples(replica)
            for member in range(layout.lockstep):
                if turn < len(own) or self.config.padding(layout.place(layout.rank(replica, stage, member))):
                    sample = own[turn] + first if turn < len(own) else None
                    ranks[layout.rank(replica, stage, member)] = sample
        for rank, sample in ranks.items():
            self.take(rank, sample, stage)
        for step in its_steps:
            self.step(ranks, step)
        for rank, sample in ranks.items():
            self.hand_on(rank, sample, stage)

    def take(self, rank, sample, stage):
        began = self.t[rank]
        sent = self.sent.pop(rank, [began])
        arrived = max(sent.pop(0), began)
        if sent:
            self.sent[rank] = sent
        self.t[rank] = self.awake(rank, arrived, 0.001)
        self.taken[rank].append(self.t[rank])
        if sample is not None:
            self.write(rank, "take", sample=sample, seconds=self.t[rank] - began if stage else 0.0)

    def step(self, ranks, step):
        layout, began = self.config.layout, dict(self.t)
        for rank, sample in ranks.items():
            replica = layout.place(rank).replica
            mates = [r for r in ranks if layout.fsdp or layout.place(r).replica == replica]
            together = max(began[mate] for mate in mates)
            self.t[rank] = max(self.awake(mate, together, self.step_s * self.noise(mate)) for mate in mates)
            facts = {"step": step, "seconds": self.t[rank] - began[rank]}
            self.write(
                rank,
                *(("pad",) if sample is None else ("step",)),
                **({} if sample is None else {"sample": sample}),
                **facts,
            )

    def hand_on(self, rank, sample, stage):
        layout = self.config.layout
        if stage + 1 == layout.pp:
            if sample is not None:
                self.t[rank] = self.awake(rank, self.t[rank], self.save_s)
                self.write(rank, "sample", sample=sample)
            return
        replica, _, member, _ = layout.place(rank)
        after = layout.rank(replica, stage + 1, member)
        began, turn = self.t[rank], len(self.taken[rank]) - 1
        room = self.taken[after][turn - IN_FLIGHT] if turn >= IN_FLIGHT else began
        self.t[rank] = self.awake(rank, max(began, room), 0.001)
        self.sent.setdefault(after, []).append(self.t[rank])
        if sample is not None:
            self.write(rank, "send", sample=sample, seconds=self.t[rank] - began)

    def events(self):
        return sorted((as_event(event) for log in self.logs.values() for event in log), key=lambda event: event.t)

    def reasons(self, cores=CORES):
        return disturbed.reasons(self.config, self.events(), cores)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("step_s", [0.002, 0.1, 30.0])
def test_a_run_that_was_left_in_peace(layout, step_s):
    """Stages wait for their first samples and for each other, for minutes where steps are long; that is no standstill.
    Steps vary, and each rank's first one takes several times as long."""
    chance, seen = random.Random(0), set()

    def noise(rank):
        first = rank not in seen
        seen.add(rank)
        return 8 if first and step_s < 1 else chance.lognormvariate(0, 0.2)

    assert Rehearsal(layout, samples=7, step_s=step_s, noise=noise).reasons() == []


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("step_s", [0.002, 0.1, 29.0])
def test_a_rank_that_stood_still(layout, step_s):
    last = layout.world_size - 1
    calm = Rehearsal(layout, step_s=step_s)
    middle = next(e for e in calm.logs[last][len(calm.logs[last]) // 2 :] if e["kind"] == "step")
    stopped = Rehearsal(layout, step_s=step_s, stops=[([last], middle["t"] - step_s / 2, 20.0)])
    (line,) = stopped.reasons()
    who, rest = line.split(" took ")
    assert str(last) in who.replace(",", "").split()
    assert rest.startswith(f"{20 + step_s:.1f} s at sample ")
    assert rest.endswith(f", step {middle['step']} (usually {step_s:.2g} s)")
    if not layout.fsdp:  # where mates, each with a sample of its own, have a step as long
        assert f" at sample {middle['sample']}, " in rest


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_machine_that_stood_still(layout):
    everyone = range(layout.world_size)
    stopped = Rehearsal(layout, stops=[(everyone, 101.23, 60.0)])
    (line,) = stopped.reasons()
    assert line.startswith("rank")
    assert " took 60." in line


@pytest.mark.parametrize(
    ("layout", "rank", "kind", "place"),
    [
        (Parallel(dp=2), 1, "sample", "after the last step of sample 1"),
        (Parallel(dp=2), 1, "take", "before sample 1"),
        (Parallel(dp=2), 1, "clock", "when the clock started"),
        (Parallel(pp=2), 0, "send", "after the last step of sample 0"),
        (Parallel(pp=2), 1, "take", "before sample 0"),
    ],
)
def test_a_rank_that_stood_still_between_its_steps(layout, rank, kind, place):
    calm = Rehearsal(layout)
    at = next(event["t"] for event in calm.logs[rank] if event["kind"] == kind) - 0.0005
    (line,) = Rehearsal(layout, stops=[([rank], at, 5.0)]).reasons()
    assert line.startswith(f"rank {rank} took 5.0 s {place} (usually ")


def test_a_stage_that_stood_still_while_it_had_nothing_to_do_disturbed_nothing():
    """The second stage waits 8 s for its first sample."""
    assert Rehearsal(Parallel(pp=2), step_s=1.0, stops=[([1], 101.0, 5.0)]).reasons() == []
    (line,) = Rehearsal(Parallel(pp=2), step_s=1.0, stops=[([1], 101.0, 12.0)]).reasons()
    assert line.startswith("rank 1 took 5.0 s before sample 0")


def test_ranks_that_are_more_than_the_cores_take_turns_by_design():
    """Eight on two cores: whoever is alone takes a second a step, in company four."""
    for layout in (Parallel(dp=8), Parallel(pp=8)):
        chance = random.Random(0)
        crowded = Rehearsal(layout, samples=16, step_s=1.0, noise=lambda _, chance=chance: chance.choice([1, 1, 4]))
        assert crowded.reasons(cores=2) == []
        assert crowded.reasons(cores=64) != []


def test_what_takes_long_every_time_is_no_disturbance():
    assert Rehearsal(Parallel(), samples=3, step_s=0.01, save_s=3.0).reasons() == []


def test_one_that_was_resumed_is_judged_by_what_it_did_then():
    assert Rehearsal(Parallel(pp=2), samples=2, first=4).reasons() == []
    assert len(Rehearsal(Parallel(pp=2), samples=2, first=4, stops=[([0], 100.5, 9.0)]).reasons()) == 1


def test_one_step_alone_is_judged_by_the_one_before_the_clock():
    (line,) = Rehearsal(Parallel(), samples=1, steps=1, stops=[([0], 100.05, 20.0)]).reasons()
    assert line == "rank 0 took 20.1 s at sample 0, step 0 (usually 0.1 s)"


def test_of_many_disturbances_the_longest_are_told():
    stops = [([0], 100.5 + 5 * number, 2.5 + number / 10) for number in range(6)]
    lines = Rehearsal(Parallel(), samples=40, steps=4, stops=stops).reasons()
    assert [line.split(" took ")[1].partition(" ")[0] for line in lines[:3]] == ["3.1", "3.0", "2.9"]
    assert lines[3:] == ["and 3 more like these, 8 s in total"]


def around(run, **facts):
    """The last facts of rank 0 at the clock and at the end."""
    for event in run.logs[0]:
        for name, (at_clock, at_end) in facts.items():
            if event["kind"] in ("clock", "done"):
                event[name] = at_clock if event["kind"] == "clock" else at_end
    return run


def test_a_machine_that_slept():
    """The clock of all events stands still while it does, so nothing else tells."""
    assert around(Rehearsal(Parallel(pp=2)), asleep_s=(5000.0, 5000.01)).reasons() == []
    assert around(Rehearsal(Parallel(pp=2)), asleep_s=(-3.2, 60.0)).reasons() == [
        "the machine slept for 63 s during the run"
    ]
    two = around(Rehearsal(Parallel(pp=2)), asleep_s=(0.0, 63.0))
    for event in two.logs[1]:
        event |= {"start": {"host": "there"}, "clock": {"asleep_s": 7.0}, "done": {"asleep_s": 7.0}}.get(
            event["kind"], {}
        )
    assert two.reasons() == ["here slept for 63 s during the run"]


@pytest.mark.parametrize(
    ("seen", "lines"),
    [
        ((0, 0), []),
        ((1, 1), ["1 rank of another run used the same cores"]),
        ((0, 3), ["3 ranks of other runs used the same cores"]),
    ],
)
def test_ranks_of_other_runs(seen, lines):
    run = around(Rehearsal(Parallel(dp=2)), other_ranks=seen)
    assert run.reasons() == lines
    assert disturbed.other_ranks(run.events()) == max(seen)
    result = {"disturbed": lines, "other_ranks_at_work": max(seen)}
    assert rates.unfit(result) is None  # such times stay as they are as long as the others are there
    slept = around(run, asleep_s=(0.0, 9.0))
    assert rates.unfit(result | {"disturbed": slept.reasons()}) == "the machine slept for 9 s during the run"


def test_an_old_folder_says_what_its_steps_say():
    assert disturbed.other_ranks(Rehearsal(Parallel()).events()) is None
    assert rates.unfit({}) is None


def test_a_rank_counts_those_of_others_at_both_ends_and_now_and_then(monkeypatch):
    t, seen = 1000.0, [1, 0, 4, 2]
    monkeypatch.setattr(disturbed.time, "monotonic", lambda: t)
    monkeypatch.setattr(other_runs, "in_the_way", lambda *_: seen.pop(0))
    shares = [0.1, 0.5, None, 0.7]
    around = disturbed.Surroundings(resolve(RunConfig(), local_ranks=2), True, lambda: shares.pop(0))
    around.look()  # the clock has not started
    assert around.begin() | {"asleep_s": 0} == {"asleep_s": 0, "other_ranks": 1, "device_use": None}
    around.look()
    assert len(seen) == 3
    for _ in range(2):
        t += disturbed.COUNT_EVERY_S + 1
        around.look()
    ended = around.so_far()
    assert (ended["other_ranks"], ended["device_use"]) == (4, pytest.approx(0.6))
    assert seen == []
    another = disturbed.Surroundings(resolve(RunConfig(), local_ranks=2), False, lambda: None)
    assert another.begin()["other_ranks"] is None


def test_a_run_says_who_was_at_work_beside_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(other_runs, "busy_ranks", lambda: 3)
    folder = worker.run(RunConfig(model="dummy", device="cpu", total_steps=2, output_dir=tmp_path / "run"))
    result = Run(folder).result()
    assert result["disturbed"][-1] == "3 ranks of other runs used the same cores"
    assert result["other_ranks_at_work"] == 3
    show.run(folder, as_json=False)
    assert capsys.readouterr().err.splitlines()[-1] == f"warning: disturbed: {result['disturbed'][-1]}"
    slept = [event.asleep_s for event in Run(folder).events() if event.kind in ("clock", "done")]
    assert slept[1] == pytest.approx(slept[0], abs=0.1)
