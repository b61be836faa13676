"""Whatever is passed in is used or answered in one line: no traceback, no hang, and nothing starts."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import launch.__main__
import vdpp_core.__main__
from launch import Sweep, attach, start
from launch.report import parameters
from launch.report.execute import PROJECT
from tests.unit import inputs
from vdpp_core import ConfigError, Parallel, RunConfig
from vdpp_core.cli import peers, run, show
from vdpp_core.config.steps import split
from vdpp_core.lessons import sizing
from vdpp_core.predict import planner, published, rates, schedule
from vdpp_core.runs import machine, results
from vdpp_core.runs.run import Run

LONGEST = 700  # characters of a line
SAME_EVERY_TIME = settings(
    derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck), max_examples=1000
)
START, SWEEP = (sys.modules[f"launch.{name}"] for name in ("job", "sweep"))


def fails(*_: Any, **__: Any) -> None:
    raise AssertionError("this starts something")


def replaced(*_: Any, **__: Any) -> None:
    raise SystemExit(0)  # here this process would have become another one


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to stand in, with runs/ and files of all kinds; what would start a process or a rank does not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for does in (run._execute, peers._compare, show.run, peers._show):
        monkeypatch.setattr(f"{does.__module__}.{does.__name__}", lambda *_: None)
    monkeypatch.setattr(run.os, "execv", replaced)
    monkeypatch.setattr(run.os, "_exit", fails)
    monkeypatch.setattr(machine, "git_commit", lambda: None)
    monkeypatch.setattr("launch.report.execute.report", chosen_and_assigned)
    for module in (START, SWEEP):
        monkeypatch.setattr(module, "launch", ended_at_once)
    (tmp_path / "file").write_text("no image")
    (tmp_path / "folder").mkdir()
    yield tmp_path
    assert not (tmp_path / "bad").exists()


def chosen_and_assigned(names: list[str], assignments: list[str], update_figures: bool) -> list[Any]:
    """What a report does before it executes anything."""
    books = {path.stem: parameters.read(path) for path in parameters.choose(names, PROJECT / "notebooks")}
    parameters.assign(parameters.parse(assignments), books)
    return []


def ended_at_once(folders: list[Path], **_: Any) -> None:
    for folder in folders:
        results.settle(Run(folder), reason="stopped")


def fresh(place: Path) -> None:
    """The runs that the command lines name, as they were."""
    for name in ("runs", "new"):
        shutil.rmtree(place / name, ignore_errors=True)
    for name in ("run", "failed", "damaged", "empty", "sweep"):
        (place / "runs" / name / "events").mkdir(parents=True)
    for name in ("run", "failed"):
        config = RunConfig(command="simulate").for_ranks(1)
        (place / "runs" / name / "config.json").write_text(config.to_json())
    (place / "runs" / "failed" / "result.json").write_text('{"outcome": "failed"')
    (place / "runs" / "damaged" / "config.json").write_text("[" * 100_000)
    (place / "runs" / "sweep" / "sweep.json").write_text('[{"run_id": "../run"}]')


def assert_one_line(text: str) -> None:
    assert text.strip().isprintable()
    assert len(text) < LONGEST


def answer(main: Callable[[list[str]], None], words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and last line of stderr; the other lines are warnings and, of a run that started, what to type next."""
    code: Any = 0
    try:
        main(words)
    except SystemExit as end:
        code = end.code or 0
    *warnings, last = capsys.readouterr().err.splitlines() or [""]
    expected = ("warning: ",) if code else ("warning: ", f"  {launch.commands.PROG} ")
    assert all(line.startswith(expected) for line in warnings), warnings
    assert (code, last.startswith("error: ")) in ((0, False), (2, True))
    assert_one_line(last)
    return code, last


@pytest.mark.slow
@pytest.mark.parametrize(
    ("main", "lines"),
    [(vdpp_core.__main__.main, inputs.core_lines), (launch.__main__.main, inputs.launch_lines)],
    ids=["vdpp_core", "launch"],
)
def test_command_lines(main, lines, place, capsys):
    codes = []

    @settings(SAME_EVERY_TIME, max_examples=500)
    @given(lines)
    def each(words: list[str]) -> None:
        fresh(place)
        codes.append(answer(main, words, capsys)[0])

    each()
    assert codes.count(0) > 50  # not only what fails at once was tried
    assert codes.count(2) > 200


@SAME_EVERY_TIME
@given(inputs.configurations())
def test_configurations(arguments):
    try:
        config = RunConfig(**arguments)
    except ConfigError as error:
        assert_one_line(str(error))
        return
    assert RunConfig(**json.loads(config.to_json())) == config


@settings(SAME_EVERY_TIME, max_examples=300)
@given(inputs.layouts)
def test_layouts(axes):
    try:
        layout = Parallel(**axes)
    except ConfigError as error:
        assert_one_line(str(error))
        return
    assert layout.world_size <= 4096
    assert layout.rank(*layout.place(layout.world_size - 1)) == layout.world_size - 1


@pytest.mark.parametrize("name", [*RunConfig.model_fields, "something_else"])
def test_a_number_of_more_digits_than_python_writes(name):
    for value in (10**5000, [1, 4, 10**5000, 8, 8], {"dp": 10**5000}):
        with pytest.raises(ConfigError) as caught:
            RunConfig(**{name: value})
        assert_one_line(str(caught.value))


@pytest.mark.parametrize("name", [word for word in inputs.NASTY if word != "run"], ids=lambda word: ascii(word[:20]))
def test_ids_that_are_none(name, place):
    fresh(place)
    if name == "sweep":
        assert isinstance(attach(name), Sweep)
    elif name == "damaged":
        name = "run/../run"
    with pytest.raises(ConfigError) as caught:
        attach(name).progress()
    assert_one_line(str(caught.value))


def test_starting(place):
    @settings(SAME_EVERY_TIME, max_examples=100)
    @given(inputs.configurations(), st.sampled_from([None, 1, 2, 0, -1, 5000, "2", 1.5, 10**30]))
    def each(arguments: dict[str, Any], nproc: Any) -> None:
        fresh(place)
        try:
            config = RunConfig(**{"model": "tiny", "device": "cpu"} | arguments)
            job = start(config, nproc)
        except ConfigError as error:
            assert_one_line(str(error))
            return
        assert job.result()["outcome"] == "stopped"

    each()


DAMAGED = [b"", b"{", b"null", b"[]", b"7", b'"text"', b"\xff\xfe", b"\0", b'{"self": 1}', b"[" * 100_000, b"NaN"]
DAMAGED += [b'{"total_steps": 1e400}', b'{"parallel": {"dp": 1e5}}', b'{"parallel": []}', b'{"latent_shape": {}}']


@pytest.mark.parametrize("name", ["config.json", "result.json", "job.json", "sweep.json"])
@pytest.mark.parametrize("content", DAMAGED, ids=lambda content: ascii(content[:30]))
def test_damaged_folders(name, content, place, capsys):
    fresh(place)
    folder = place / "runs" / ("sweep" if name == "sweep.json" else "run")
    (folder / name).write_bytes(content)
    if name == "config.json":
        with pytest.raises(ConfigError):
            RunConfig.read(folder)
    for words in (["status"], ["status", folder.name], ["tail", folder.name], ["stop", folder.name]):
        answer(launch.__main__.main, words, capsys)
    code, line = answer(vdpp_core.__main__.main, ["plan", "--gpus", "1", "--calibrate", folder.name], capsys)
    assert code == 2
    assert line.startswith("error: --calibrate ")


PLAN = "plan --gpus 2 --model tiny --tflops 1 "


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("memory --capacity-gib=", "--capacity-gib '': must be a finite number"),
        ("memory --capacity-gib 1e308", "--capacity-gib 1e+308: must be finite and above 0, at most 1e+06"),
        ("memory --image nowhere.png", "--image nowhere.png: not in a prediction"),
        ("memory --model-id=", "--model-id '': "),
        ("memory --latent-shape 99999 4 99999 99999 99999", "--latent-shape 99999 4 99999 99999 99999: is too large"),
        ("memory --dp 4096 --pp 4096", "--dp 4096: "),
        (PLAN + "--image nowhere.png", "--image nowhere.png: not in a prediction"),
        (PLAN + "--model-id=", "--model-id '': "),
        (PLAN + "--link-gb-per-s 1e400", "--link-gb-per-s 1e400: must be a finite number"),
        (PLAN + "--num-samples 100000", "--num-samples 100000: must be at most 10000 in a plan"),
        (PLAN + "--latent-shape 99999 4 99999 99999 99999", "--latent-shape 99999 4 99999 99999 99999: is too large"),
        ("plan --gpus " + "9" * 5000, "--gpus 999"),
        ("peers --dp=", "--dp '': not with peers"),
        ("simulate --device=", "--device '': "),
        ("simulate --seed \x1b[31m", r"--seed \x1b[31m: "),
    ],
)
def test_right_answers(line, said, place, capsys):
    code, last = answer(vdpp_core.__main__.main, line.split(" "), capsys)
    assert code == 2
    assert last.startswith(f"error: {said}")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("tail run --rank 99", "--rank 99: must be a whole number from 0 to 0"),
        ("start --nproc=-- simulate", "--nproc --: must be a whole number from 1 to 4096"),
        ("tail run --lines 0", "--lines 0: must be a whole number from 1"),
        ("start --nproc 1000000 simulate", "--nproc 1000000: must be a whole number from 1 to 4096"),
        ("sweep --ranks 1,9999999999 simulate", "--ranks 1,9999999999: must be whole numbers, each from 1 to 4096"),
        ("sweep --ranks 1 --repeats 1000000 simulate", "--repeats 1000000: must be a whole number from 1 to 4096"),
    ],
)
def test_right_answers_of_the_launcher(line, said, place, capsys):
    fresh(place)
    code, last = answer(launch.__main__.main, line.split(), capsys)
    assert code == 2
    assert last.startswith(f"error: {said}")


RATES = rates.Rates(1e12, rates.Link(1e9))
MADE = {"layout": Parallel(dp=2), "sizes": [4], "num_samples": 2, "seconds": schedule.Seconds(0.1)}
WRONG = [None, "", "1", "nan", b"1", [], {}, (1, 2), -1, float("nan"), 10**400, True, object()]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: ascii(wrong)[:10])
@pytest.mark.parametrize(
    "call",
    [
        lambda wrong: rates.Link(wrong),
        lambda wrong: rates.Link(1e9, wrong),
        lambda wrong: rates.Rates(wrong, RATES.link),
        lambda wrong: rates.Rates(1e12, wrong),
        lambda wrong: rates.Rates(1e12, RATES.link, cores=wrong),
        lambda wrong: rates.Rates(1e12, RATES.link, slowdown=wrong),
        lambda wrong: rates.from_run(wrong),
        lambda wrong: published.rates(wrong),
        lambda wrong: planner.advise(RunConfig(), wrong, "latency", RATES),
        lambda wrong: planner.advise(RunConfig(), 1, wrong, RATES),
        lambda wrong: planner.advise(RunConfig(), 1, "latency", wrong),
        lambda wrong: planner.advise(RunConfig(), 1, "latency", RATES, capacity_gib=wrong),
        lambda wrong: planner.advise(RunConfig(), 1, "latency", RATES, modes=wrong),
        lambda wrong: schedule.Seconds(wrong),
        lambda wrong: schedule.Seconds(1, hop=wrong),
        lambda wrong: schedule.make(**MADE | {"sizes": wrong}),
        lambda wrong: schedule.make(**MADE | {"num_samples": wrong}),
        lambda wrong: schedule.make(**MADE | {"arrivals": wrong}),
        lambda wrong: schedule.make(**MADE | {"replicas": wrong}),
        lambda wrong: schedule.periodic(wrong, 1),
        lambda wrong: schedule.periodic(2, wrong),
        lambda wrong: schedule.poisson(2, wrong, 0),
        lambda wrong: RunConfig().for_ranks(wrong),
        lambda wrong: sizing.training_state(wrong),
        lambda wrong: sizing.degree(1, wrong),
    ],
)
def test_arguments_of_another_kind(call, wrong):
    try:
        call(wrong)
    except ConfigError as error:
        assert_one_line(str(error))


def test_no_more_replicas_than_the_layout_has():
    with pytest.raises(ConfigError, match=r"^replicas 3: must be at most 2"):
        schedule.make(**MADE, replicas=3)
    assert schedule.make(**MADE, replicas=1).numbers()["makespan_s"] == pytest.approx(0.8)


def test_no_modes_are_no_plan():
    with pytest.raises(ConfigError, match=r"^modes '': must be one or several of batched, sequential"):
        planner.advise(RunConfig(), 1, "latency", RATES, modes=())


@pytest.mark.parametrize(
    "number",
    [
        lambda: sizing.activations(10**12, 10**12, 10**12, 10**12, 1e100),
        lambda: sizing.pipeline_traffic(1e100, 10**12, 10**12),
        lambda: sizing.tensor_traffic(1e100, 10**12, 10**12),
        lambda: sizing.training_state(1e100, (1e100, 1e100, 1e100)).parameters,
        lambda: sizing.gbit_per_s(1e100, 1e-100),
        lambda: sizing.least_gpus(1e100, 1e-100, 0),
        lambda: sizing.degree(2, 999_999_999_989),
    ],
)
def test_what_is_accepted_has_a_finite_answer(number):
    assert 0 < number() < math.inf


def test_what_is_larger_is_refused():
    for size in (1e101, 1e308, 1e-308):
        with pytest.raises(ConfigError, match=r"^parameters .*: must be (less|greater) than or equal to 1e"):
            sizing.training_state(size)


def test_the_longest_run_is_split_at_once():
    sizes = [len(steps) for steps in split(10_000, 4096, [1.0 + rank % 7 for rank in range(4096)])]
    assert sum(sizes) == 10_000
    assert min(sizes) == 1


PLAIN = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}  # no × and no –


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "code", "environment"),
    [
        ("vdpp_core memory --model dummy --world-size 4 --dp 2", 0, PLAIN),
        ("vdpp_core plan --model dummy --gpus 2 --tflops 1 --link-gb-per-s 1", 0, PLAIN),
        ("vdpp_core memory --world-size 4 --dp 3", 2, PLAIN),
        ("vdpp_core simulate --output-dir \udcff\udcfe/é --total-steps nan", 2, {}),
        ("vdpp_core run \udcff", 2, {}),
        ("launch tail ../../etc --rank 0", 2, {}),
        ("launch status", 0, PLAIN),
        ("launch start --nproc 99999 simulate", 2, {}),
    ],
)
def test_real_commands(line, code, environment, tmp_path):
    command = [sys.executable, "-m", *line.split()]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | environment, capture_output=True, timeout=120)
    said = done.stderr.decode()
    assert done.returncode == code, said
    assert "Traceback" not in said
    assert said.startswith("error: ") == (code == 2)
    assert said.count("\n") == (code == 2)
    assert list(tmp_path.iterdir()) == []
