"""Traces for Perfetto: what the format asks for, and the same numbers as in the result."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import launch
from launch.__main__ import main
from vdpp_core import Parallel, RunConfig
from vdpp_core.plots import perfetto
from vdpp_core.runs import runfolder

SHORT = RunConfig(model="dummy", total_steps=6, num_samples=4, latent_shape=(1, 4, 2, 8, 8), device="cpu")
NEEDED = {  # of each phase, by the Trace Event Format
    "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
    "i": {"name", "cat", "ts", "pid", "tid", "s"},
    "s": {"name", "cat", "ts", "pid", "tid", "id"},
    "f": {"name", "cat", "ts", "pid", "tid", "id", "bp"},
}
METADATA = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index"}
METADATA["thread_sort_index"] = "sort_index"

Entry = dict[str, Any]


def checked(path: Path) -> list[Entry]:
    """The entries of a trace file, if it keeps to the format."""
    trace = json.loads(path.read_text())
    entries = trace["traceEvents"]
    assert trace["displayTimeUnit"] in ("ms", "ns")
    named: set[tuple[str, int, int | None]] = set()
    for entry in entries:
        if entry["ph"] == "M":
            assert METADATA[entry["name"]] in entry["args"]
            named.add((entry["name"], entry["pid"], entry.get("tid")))
        else:
            assert NEEDED[entry["ph"]] <= set(entry), entry
            assert type(entry["ts"]) is int
            assert entry["ts"] >= 0
            assert ("process_name", entry["pid"], None) in named
            assert ("thread_name", entry["pid"], entry["tid"]) in named
    assert all(entry["s"] in ("g", "p", "t") for entry in entries if entry["ph"] == "i")
    slices = by_thread(entries)
    for own in slices.values():
        assert_nested(own)
    assert_arrows(entries, slices)
    return entries


def by_thread(entries: list[Entry]) -> dict[tuple[int, int], list[Entry]]:
    slices: dict[tuple[int, int], list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry["ph"] == "X":
            assert entry["dur"] > 0
            slices[entry["pid"], entry["tid"]].append(entry)
    return slices


def assert_nested(own: list[Entry]) -> None:
    """Each slice lies inside the one that is open, or begins when it has ended."""
    ends: list[int] = []
    for entry in sorted(own, key=lambda entry: (entry["ts"], -entry["dur"])):
        while ends and ends[-1] <= entry["ts"]:
            ends.pop()
        assert not ends or entry["ts"] + entry["dur"] <= ends[-1], entry
        ends.append(entry["ts"] + entry["dur"])


def assert_arrows(entries: list[Entry], slices: dict[tuple[int, int], list[Entry]]) -> None:
    """A start and a finish each, forward in time, from inside a send to inside a take of the same sample."""
    ends: dict[str, dict[int, Entry]] = {"s": {}, "f": {}}
    for entry in entries:
        if entry["ph"] in ends:
            assert entry["id"] not in ends[entry["ph"]]
            ends[entry["ph"]][entry["id"]] = entry
    assert ends["s"].keys() == ends["f"].keys()
    for number, start in ends["s"].items():
        finish = ends["f"][number]
        assert finish["bp"] == "e"
        assert start["ts"] <= finish["ts"]
        assert (start["name"], start["cat"]) == (finish["name"], finish["cat"])
        around = [
            next(e for e in slices[end["pid"], end["tid"]] if e["name"] == name and is_in(end["ts"], e))
            for end, name in ((start, "send"), (finish, "take"))
        ]
        assert around[0]["args"]["sample"] == around[1]["args"]["sample"]


def is_in(ts: int, entry: Entry) -> bool:
    return entry["ts"] <= ts < entry["ts"] + entry["dur"]


def names(entries: list[Entry], ph: str, **fields: Any) -> list[str]:
    return [e["name"] for e in entries if e["ph"] == ph and fields.items() <= e.items()]


def busy(entries: list[Entry]) -> list[float]:
    """Share of each rank's time in steps, from the start of the clock to the end of the last step."""
    steps = [entry for entry in entries if entry.get("cat") == "step"]
    zero = min(entry["ts"] for entry in entries if entry.get("name") == "clock starts")
    makespan = max(entry["ts"] + entry["dur"] for entry in steps) - zero
    ranks = sorted({entry["tid"] for entry in steps})
    return [sum(entry["dur"] for entry in steps if entry["tid"] == rank) / makespan for rank in ranks]


def test_runs_are_as_busy_in_their_traces_as_in_their_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("warnings.showwarning", lambda *_: None)  # main sets it
    monkeypatch.chdir(tmp_path)
    layouts = [Parallel(pp=2), Parallel(dp=2)]
    jobs = [launch.start(SHORT.replace(output_dir=f"runs/{layout}", parallel=layout)) for layout in layouts]
    for job, layout in zip(jobs, layouts, strict=True):
        result = job.wait(120)
        main(["trace", job.run_id])
        said = capsys.readouterr()
        assert said.out == f"{job.folder / 'trace.json'}\n"
        assert "https://ui.perfetto.dev" in said.err
        entries = checked(job.folder / "trace.json")
        assert busy(entries) == pytest.approx(result["utilisation_per_rank"], rel=0.01)
        assert len(names(entries, "X", cat="step")) == SHORT.num_samples * SHORT.total_steps
        assert len(names(entries, "s")) == (SHORT.num_samples + SHORT.warmup_samples) * (layout.pp - 1)
        assert len({entry["pid"] for entry in entries}) == layout.dp
        assert sorted(names(entries, "i", cat="sample")) == [f"sample {m} finished" for m in range(SHORT.num_samples)]


@pytest.mark.parametrize("arguments", [["nosuch"], ["run", "--output", "nowhere/trace.json"]], ids=" ".join)
def test_what_cannot_be_traced_is_one_line(
    tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    runfolder.create(SHORT.replace(output_dir=tmp_path / "runs" / "run", parallel=Parallel()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("warnings.showwarning", print)  # main sets it
    with pytest.raises(SystemExit, match="2"):
        main(["trace", *arguments])
    said = capsys.readouterr().err
    assert said.startswith(("error: No run 'nosuch' in runs/", "error: --output"))
    assert said.count("\n") == 1


START = {"host": "a", "pid": 1, "created": 0.0, "threads": 1, "device": "cpu", "dtype": "float32", "backend": "gloo"}


@pytest.fixture
def folder(tmp_path: Path, write_events: Callable[..., None]) -> Path:
    """Two stages of a step each in mid-run: rank 1 decodes the first sample, rank 0 waits to send the second."""
    config = SHORT.replace(total_steps=2, num_samples=2, parallel=Parallel(pp=2), output_dir=tmp_path / "run")
    folder = runfolder.create(config)
    first = {"sample": 0, "seconds": 0.0}
    write_events(
        *(folder, 0, (90.0, "start", START), (94.0, "loaded", {}), (96.0, "warm", {"seconds": 0.5})),
        *((100.0, "clock", {}), (100.0, "take", first), (101.0, "step", {"sample": 0, "step": 0, "seconds": 1.0})),
        *((101.5, "send", {"sample": 0, "seconds": 0.5}), (101.5, "take", {"sample": 1, "seconds": 0.0})),
        (102.5, "step", {"sample": 1, "step": 0, "seconds": 1.0}),
    )
    write_events(
        *(folder, 1, (91.0, "start", START), (95.0, "loaded", {}), (100.0, "clock", {})),
        *((101.25, "take", {"sample": 0, "seconds": 1.25}), (102.25, "step", {"sample": 0, "step": 1, "seconds": 1.0})),
        *((102.25, "sample", {"sample": 0}), (103.0, "decode", {"sample": 0}), (104.0, "chunk", {"sample": 0})),
        (105.0, "chunk", {"sample": 0}),
    )
    return folder


def test_a_run_that_goes_on_is_drawn_up_to_its_last_event(folder: Path):
    entries = checked(perfetto.write(folder))
    of_1 = {"tid": 1, "cat": "phase"}
    assert names(entries, "X", **of_1) == ["loading", "warming up", "running", "decoding"]
    ends = {e["name"]: e["ts"] + e["dur"] for e in entries if e["ph"] == "X" and e["tid"] == 1}
    assert ends["decoding"] == ends["video of sample 0"] == ends["chunk of frames"] == 15_000_000
    take = next(e for e in entries if e["name"] == "take")
    assert (take["ts"], take["dur"]) == (10_000_000, 1_250_000)
    assert names(entries, "s") == ["hand-off"]  # the first sample's; the second was not taken up


def test_a_bad_end_is_drawn_and_damaged_lines_are_left_out(folder: Path, write_events: Callable[..., None]):
    before = len(checked(perfetto.write(folder)))
    lines = ['{"t": 103.5, "rank": 0, "kind": "st', "7", "null", '{"t": "x", "rank": 0, "kind": "step"}', "\0\0"]
    lines += [
        '{"t": 103.5, "rank": 0, "kind": "step", "sample": 1, "step": 0}',
        '{"t": NaN, "rank": 0, "kind": "take"}',
    ]
    lines += ['{"t": 103.5, "rank": 9, "kind": "clock"}', '{"rank": 0}']
    lines += ['{"t": 104.0, "rank": 0, "kind": "error", "error": "ValueError: no luck", "lost_rank": 1}']
    with (folder / "events" / "rank-0.jsonl").open("a") as file:
        file.write("\n".join(lines) + "\n")
    failure = {"rank": 1, "sample": 0, "step": None, "cause": "killed by SIGKILL"}
    (folder / "result.json").write_text(json.dumps({"outcome": "failed", "failure": failure}))
    entries = checked(perfetto.write(folder))
    assert names(entries, "i", cat="failure", tid=0) == ["ValueError: no luck"]
    assert names(entries, "i", cat="failure", tid=1) == ["killed by SIGKILL"]
    assert len(entries) == before + 2


def test_a_run_without_events_has_its_ranks_and_nothing_else(tmp_path: Path):
    folder = runfolder.create(SHORT.replace(output_dir=tmp_path / "run", parallel=Parallel(dp=2, pp=2)))
    entries = checked(perfetto.write(folder))
    assert names(entries, "M")[:4:2] == ["process_name", "process_name"]
    assert len(entries) == 2 * 2 + 2 * 4
