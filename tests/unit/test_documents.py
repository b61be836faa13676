"""The documents' figures, claims and experiments; and that what is finished is kept, whatever happens next."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from launch.__main__ import main
from launch.documents import claims, experiments, figures, output, repeat
from launch.documents.book import Book
from launch.documents.machine import Machine
from launch.documents.plan import duration
from launch.documents.rows import Row, number
from launch.job import Job
from tests.conftest import write_run
from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.layout import Parallel
from vdpp_core.parallel.devices import GIB
from vdpp_core.predict import memory, published

CPU, CARDS = Machine(0, 2, "CPU, 2 cores"), Machine(7, 16, "7 × NVIDIA RTX A5000", 23.68)
OF_CPU = {each.section: each for each in experiments.all_of(CPU)}
OF_CARDS = {each.section: each for each in experiments.all_of(CARDS)}


def test_figures_are_those_of_the_documents():
    known = json.loads((Path(published.__file__).parent / "reference" / "a5000x7.json").read_text())
    rows = known["throughput_cfg3_14x72x128"]["rows"]
    assert [figures.THROUGHPUT[row["world_size"]] for row in rows] == rows
    assert {row["gpus"]: row["total_s"] for row in known["single_sample_dummy_nccl"]} == figures.DUMMY_TOTAL_S
    assert figures.MEMORY[6]["peak_gb_per_gpu"] == 20.471
    assert figures.MEMORY[8]["outcome"] == "oom"
    assert (figures.DUMMY[7]["data_samples_per_s"], figures.SVD[4]["pipeline_samples_per_s"]) == (457.8, 0.49)
    assert figures.SIMULATOR_TOTAL_S == {1: 3.99, 2: 4.22, 4: 4.15, 7: 4.43}
    assert [row[3] for row in figures.FEW_FRAMES] == [4.8, 5.0, 6.5, 8.4]
    assert list(figures.MP4_KB.values()) == [216, 245, 531, 341]


CLAIMS = {  # section and claim -> what the documents say, what their own numbers give
    "5 GPUs that 14 frames need": (7, 1),
    "8 10 samples, 7 GPUs": (14, 8 + 9 * 4 * 0.15),
    "8 throughput, 7 GPUs": (0.71, 10 / 14),
    "8 7 GPUs against one": (3, 42 / 14),
    "8 one sample slower, 2 GPUs": (16, 100 * (4.55 / 3.93 - 1)),
    "8 one sample slower, 4 GPUs": (45, 100 * (5.68 / 3.93 - 1)),
    "8 one sample slower, 7 GPUs": (84, 100 * (7.23 / 3.93 - 1)),
    "9 10 samples, 1 GPU": (42, 42.0),
    "9 10 samples, 2 GPUs": (25, 4.2 + 9 * 2.1),
    "9 10 samples, 4 GPUs": (15, 4.2 + 9 * 1.05),
    "9 10 samples, 7 GPUs": (10, 4.2 + 9 * 0.6),
    "9 gain, 2 GPUs": (1.7, 42 / 25),
    "9 gain, 4 GPUs": (2.8, 42 / 15),
    "9 gain, 7 GPUs": (4.2, 42 / 10),
    "10 model on each GPU": (10, 5.331),
    "10 decoding 14 frames at once": (7.88, 7.875),
    "11 scaling, 7 GPUs": (7.27, 54.8414 / 7.561),
    "11 10 samples, 1 GPU": (548.4, 53.3527 + 9 * 54.8414),
    "11 10 samples, 2 GPUs": (275.0, 54.0967 + 9 * 27.5037),
    "11 10 samples, 4 GPUs": (136.1, 55.4476 + 9 * 13.6105),
    "11 10 samples, 7 GPUs": (75.6, 57.5472 + 9 * 7.561),
    "12 parameters of the UNet": (5.0, (7.091 - 4.476) * 7 / 6),
    "12 memory saved by FSDP": (37, 100 * (1 - 4.476 / 7.091)),
    "12 time of FSDP / one GPU": (1.83, 168.8768 / 92.4996),
    "13 latency, data parallel / pipeline, 7 GPUs": (7.3, 53.3527 / 57.5472),
    "13 pipeline / data parallel, 4 GPUs": (0.490 / 0.409, (14 / (8.49 + 13 * 2.04)) / (14 / (4 * 8.55))),
    "13 pipeline / data parallel, 7 GPUs": (0.855 / 0.817, (14 / (8.49 + 13 * 1.17)) / (14 / (2 * 8.57))),
    "13 scaling of data parallel, 4 GPUs": (3.5, 14 / 4),
    "README a sample, 1 GPU": ("40 – 60 s", 53.3527),
    "README first sample, 7 GPUs": (35, 57.5472),
    "README interval, 7 GPUs": ("8 – 12 s", 7.561),
    "guide throughput, 2 GPUs against one": (2, 54.8414 / 27.5037),
    "guide throughput, 4 GPUs against one": (4, 54.8414 / 13.6105),
    "guide throughput, 7 GPUs against one": (7, 54.8414 / 7.561),
}


def test_each_claim_follows_from_their_own_numbers():
    found = {f"{row.section} {row.what}": row for row in claims.all_of()}
    assert found.keys() == CLAIMS.keys()
    for name, (claimed, gives) in CLAIMS.items():
        assert found[name].published == (claimed if isinstance(claimed, str) else pytest.approx(claimed)), name
        assert found[name].here == pytest.approx(gives), name
        assert found[name].why, name
    words = found["11 scaling, 7 GPUs"].why
    assert all(figure in words for figure in ("53.4 to 54.9 s", "7.06"))
    assert "56 and 68" in found["5 GPUs that 14 frames need"].why
    assert "0.400" in found["13 pipeline / data parallel, 4 GPUs"].why


def test_on_seven_cards_the_runs_have_the_documents_settings():
    eleven = OF_CARDS["11"].runs["7 ranks"]
    assert (eleven.shape, eleven.total_steps, eleven.num_samples) == ((1, 4, 14, 72, 128), 28, 10)
    assert (eleven.warmup_samples, eleven.guidance_scale, str(eleven.layout)) == (2, 3.0, "pp 7")
    thirteen = OF_CARDS["13"].runs["SVD, DP, 4 ranks"]
    assert (thirteen.shape, thirteen.num_samples, thirteen.guidance_passes) == ((1, 4, 14, 40, 72), 14, 1)
    assert (str(thirteen.layout), thirteen.warmup_samples * 4) == ("dp 4", 8)
    twelve = list(OF_CARDS["12"].runs.values())
    known = [published.memory_config(row) for row in figures.MEMORY.values()]
    same = ("shape", "layout", "total_steps", "sequential", "fsdp_same_sample", "dtype", "memory_limit_gib")
    assert [[getattr(run, name) for name in same] for run in twelve] == [
        [getattr(run, name) for name in same] for run in known
    ]
    assert [run.total_steps for run in OF_CARDS["5"].runs.values()][:4] == [25, 24, 24, 21]
    video = OF_CARDS["10"].runs[experiments.VIDEO]
    assert (video.model, video.shape, video.total_steps, video.seed) == ("svd", (1, 4, 14, 72, 128), 25, 42)


def test_on_fewer_or_larger_cards():
    three = {each.section: each for each in experiments.all_of(Machine(3, 16, "3 × H200", 140.0))}
    layouts = [str(config.layout) for config in three["11"].runs.values()]
    assert layouts == ["1 rank", "pp 2", "pp 3", "pp 3"]
    assert {config.memory_limit_gib for config in three["12"].runs.values()} == {22.97}


def test_the_limit_on_a_cpu_lies_between_the_rows_that_fit_and_the_one_that_does_not():
    runs = {name[:5]: run for name, run in OF_CPU["12"].runs.items()}
    assert {run.memory_limit_gib for run in runs.values()} == {experiments.SMALL_LIMIT_GIB}
    fits, full, sharded = (memory.predict(runs[f"row {number}"]).total / GIB for number in (3, 4, 6))
    assert fits < experiments.SMALL_LIMIT_GIB - 0.05
    assert full > experiments.SMALL_LIMIT_GIB
    assert sharded * memory.CPU_ALLOWANCE + memory.CPU_CONSTANT / GIB < experiments.SMALL_LIMIT_GIB


class Interrupted:
    """A sweep of which some runs are there, and the next never ends: the user presses Ctrl-C."""

    def __init__(self, jobs: list[Any]) -> None:
        self.jobs, self.stopped = jobs, False

    def wait(self) -> None:
        pass

    def stop(self) -> None:
        self.stopped = True


class Endless:
    def wait(self) -> None:
        raise KeyboardInterrupt


def written(book: Book) -> list[dict[str, str]]:
    with (book.folder / output.TABLE).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def finished(tmp_path: Path, name: str) -> Job:
    config = RunConfig(model="dummy", total_steps=2, num_samples=3, parallel=Parallel(), device="cpu")
    return Job(write_run(tmp_path, name, config, 0.5))


def test_what_is_finished_survives_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sweep = Interrupted([finished(tmp_path, "a"), Endless()])
    monkeypatch.setattr(repeat, "sweep", lambda *_, **__: sweep)
    book = Book(CPU, tmp_path / "page", claims.all_of())
    with pytest.raises(KeyboardInterrupt):
        repeat.repeat(book, [OF_CPU["11"]])
    assert sweep.stopped
    rows = {row["what"]: row for row in written(book)}
    assert float(rows["average interval, 1 rank"]["here"]) == pytest.approx(1.0)
    assert float(rows["average interval, 1 rank"]["published"]) == 54.8414
    assert "average interval, 2 ranks" not in rows
    page = (book.folder / output.PAGE).read_text()
    assert "incomplete: 1 of 4 runs" in page
    assert "average interval, 1 rank" in page
    assert "<script" not in page


def test_a_section_or_run_that_fails_is_a_row_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Failed(Job):
        def wait(self, timeout: float | None = None) -> dict[str, Any]:
            return super().wait(timeout) | {"outcome": "failed", "failure": {"rank": 3, "cause": "killed"}}

    sweep = Interrupted([finished(tmp_path, "a"), *(Failed(finished(tmp_path, name).folder) for name in "bcd")])

    def started(configs: list[RunConfig], **_: Any) -> Interrupted:
        if configs[0].command == "generate":
            raise ConfigError("model", "svd", "cannot be downloaded")
        return sweep

    monkeypatch.setattr(repeat, "sweep", started)
    book = Book(CPU, tmp_path / "page", [])
    repeat.repeat(book, [OF_CPU["10"], OF_CPU["11"]])
    rows = {row["what"]: row for row in written(book)}
    assert rows["the section"]["here"] == "failed"
    assert "cannot be downloaded" in rows["the section"]["why it differs"]
    assert rows["2 ranks"]["why it differs"] == "failed, rank 3: killed"
    assert "first sample, 1 rank" in rows
    assert book.failed
    assert "complete" in book.state


def test_tables_fit_a_terminal_and_repeat_no_reason():
    row = Row("13", "DummyUNet, DP, 7 ranks: a long name", 1234.5678, 0.00031, "s", "a reason of many words " * 4)
    lines = output.table([row, row]).splitlines()
    assert max(map(len, lines)) <= 100
    assert sum(output.AS_ABOVE in line for line in lines) == 1
    assert (number(1234.5678), number(0.00031), number(54.84)) == ("1,235", "3.1e-04", "54.8")
    assert [duration(seconds) for seconds in (0.0031, 12, 250, 9000)] == ["3.1 ms", "12 s", "4.17 min", "2.5 h"]


def test_numbers_of_different_ranks_have_no_ratio():
    assert Row("11", "", 2.0, 1.0).ratio == 0.5
    assert Row("11", "", 2.0, 1.0, alike=False).ratio is None
    assert Row("11", "", "pass", 1.0).ratio is None


def test_a_dry_run_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    main(["documents", "--dry-run", "--gpus", "7", "--section", "3,11"])
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 100
    line = next(line for line in said.splitlines() if line.startswith("7 ranks") and "14 × 72 × 128" in line)
    assert line.split()[2:4] == ["pp", "7"]
    assert "5.29" in line  # GB, as published: 5.33
    assert "published: one A5000" in said
    main(["documents", "--dry-run", "--section", "2,12"])
    said = capsys.readouterr().out
    assert "12 runs, small sizes" in said
    assert [line[:5] for line in said.splitlines() if "out of memory" in line] == ["row 4", "row 8"]
    assert "assumed, as no run here tells: dummy model" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--section", "14"], "--section 14: must be one of 2, 3, 5, 8, 9, 10, 11, 12, 13, README, guide"),
        (["--section", "11,x"], "--section x: must be"),
        (["--gpus", "7"], "--gpus 7: only with --dry-run"),
        (["--dry-run", "--gpus", "0"], "--gpus 0: must be"),
    ],
)
def test_bad_input_is_one_line(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main(["documents", *flags])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert named in said
