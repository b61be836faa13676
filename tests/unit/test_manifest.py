"""Manifests: what is read, what each sample gets, and what is refused, in one line, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import launch
from tests.families import FAMILIES, folder
from vdpp_core import Parallel, RunConfig
from vdpp_core.__main__ import main
from vdpp_core.config import manifest
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.execution import resolve
from vdpp_core.engine import preflight
from vdpp_core.runs import origin, runfolder
from vdpp_core.runs.event_types import parse
from vdpp_core.runs.run import Work
from vdpp_core.runs.stalls import look

SMALL = {"command": "generate", "total_steps": 2, "num_frames": 3, "threads": 1, "device": "cpu"}


@pytest.fixture
def table(tmp_path):
    """table(text, name): a manifest, with two images beside it."""
    for name, colour in (("a.png", "red"), ("b.png", "blue")):
        Image.new("RGB", (64, 64), colour).save(tmp_path / name)

    def write(text: str | bytes, name: str = "jobs.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def prepared(path: Path, **changes: Any) -> RunConfig:
    config = preflight.complete(RunConfig(**SMALL | {"manifest": path} | changes), 1)
    preflight.check(config, local_ranks=1)
    return config


def test_a_row_of_a_csv_file_is_a_sample(table, tmp_path):
    path = table("\ufeffimage, seed,fps,guidance_scale\r\na.png,7,,2.5\r\n\r\n b.png,,12,\r\n")
    config = prepared(path, seed=40, guidance_scale=4.0)
    assert config.num_samples == 2
    first, second = config.of_sample(0), config.of_sample(1)
    assert (first.image, first.seed, first.fps, first.guidance_scale) == (tmp_path / "a.png", 7, 7, 2.5)
    assert (second.image, second.seed, second.fps, second.guidance_scale) == (tmp_path / "b.png", 41, 12, 4.0)
    assert [config.seed_of(sample) for sample in range(2)] == [7, 41]
    assert first.rows is None
    assert RunConfig(**json.loads(config.to_json())) == config
    assert hash(config) == hash(config.replace())
    assert config.replace(manifest=None).num_samples == 1
    assert RunConfig(seed=3).seed_of(2) == 5


def test_json_lines(table, tmp_path):
    path = table('{"image": "a.png", "seed": 3}\n\n{"seed": null, "fps": 9}\n{"prompt": "a\u2028b"}\n', "jobs.jsonl")
    assert manifest.read(path) == ({"image": str(tmp_path / "a.png"), "seed": 3}, {"fps": 9}, {"prompt": "a\u2028b"})


def test_arguments_of_the_pipelines_call(table):
    path = table('prompt,seed,eta,guidance_scale,decode_chunk_size\n"two boats, one harbour.",5,0.5,,\nnull,,,4,1\n')
    config = prepared(path, model_id=str(folder("animatediff")), call={"guidance_scale": 6.0, "eta": 0})
    first, second = config.of_sample(0), config.of_sample(1)
    assert (first.prompt, first.seed) == ("two boats, one harbour.", 5)
    assert first.call_values == {"guidance_scale": 6.0, "eta": 0.5}
    assert (second.prompt, second.call_values) == ("null", {"guidance_scale": 4, "eta": 0, "decode_chunk_size": 1})
    assert config.encodes


REFUSED = {
    "not there": (None, r"must be a readable file in UTF-8 \(No such file"),
    "empty": ("", "has no rows"),
    "only columns": ("image,seed\n", "has no rows"),
    "not text": (b"image\n\xff\xfe\n", "must be a readable file in UTF-8"),
    "unknown column": ("image,moton\na.png,3\n", r"row 1 \(sample 0\), column moton: must be one of image, seed"),
    "of another pipeline": ("prompt\nboats\n", r"row 1 \(sample 0\), column prompt: must be one of image, seed"),
    "steps": ("seed,total_steps\n1,2\n3,4\n", r"row 1 \(sample 0\), column total_steps: is the same in all rows"),
    "no column": ("image,\na.png,3\n", "column '' in the first line: must be a name"),
    "twice": ("seed,seed\n1,2\n", "column 'seed' in the first line: must be a name, and there only once"),
    "short row": ("image,seed\na.png,3\nb.png\n", r"row 2 \(sample 1\) has 1 cells: must have 2"),
    "quote": ('image,seed\n"a.png,3\n', "must be a readable file"),
    "no image": ("image\na.png\nc.png\n", r"row 2 \(sample 1\), column image, .*c\.png: No such file$"),
    "empty image": ("image,seed\na.png,3\n,4\n", r"row 2 \(sample 1\), column image, '': is missing in this row"),
    "address": ("image\nhttps://a.b/c.png\n", r"row 1 .*column image, https://a\.b/c\.png: must be a file, not an ad"),
    "bad number": ("seed\n1\n2\nthree\n", r"row 3 \(sample 2\), column seed, three: must be a valid integer"),
    "out of range": ("motion_bucket_id\n256\n", r"row 1 \(sample 0\), column motion_bucket_id, 256: must be less"),
    "guidance": ("guidance_scale\n3\n1\n", r"row 2 \(sample 1\), column guidance_scale, 1.0: must be above 1 in all"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name, table, tmp_path):
    text, words = REFUSED[name]
    path = tmp_path / "jobs.csv" if text is None else table(text)
    with pytest.raises(ConfigError, match=rf"^manifest {path}: {words}") as caught:
        launch.start(RunConfig(**SMALL, manifest=path, output_dir=tmp_path / "run"))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]\n", r"row 1 \(sample 0\) must be a JSON object"),
        ('{"seed": 1}\n{"seed": NaN}\n', r"row 2 \(sample 1\) is not JSON \(NaN"),
        ('{"a b": 1}\n', r"row 1 \(sample 0\), column 'a b': must be a name"),
        ('{"seed": true}\n', r"row 1 \(sample 0\), column seed, true: must be a number or a text"),
        ("{}\n{\n", r"row 2 \(sample 1\) is not JSON"),
        ('{"guidance_scale": 1e999}\n', r"row 1 \(sample 0\) is not JSON \(1e999 is too large a number"),
        (
            '{"image": "a.png"}\n{"guidance_scale": [1]}\n',
            r"row 2 \(sample 1\), column guidance_scale, \[1\]: must be a",
        ),
    ],
)
def test_what_is_refused_of_json_lines(text, words, table):
    path = table(text, "jobs.jsonl")
    with pytest.raises(ConfigError, match=rf"^manifest {path}: {words}"):
        prepared(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prompt,banana\nboats,3\n", r"row 1 \(sample 0\), column banana: must be one of .*guidance_scale"),
        ("prompt,image\nboats,a.png\n", r"row 1 .*column image, .*a\.png: AnimateDiffPipeline takes none"),
        (
            "prompt,guidance_scale\nboats,3\nships,high\n",
            r"row 2 .*column guidance_scale: must be a number.*not high",
        ),
        ("prompt,height\nboats,32\n", r"row 1 \(sample 0\), column height: is the same in all rows"),
        ("prompt,generator\nboats,32\n", r"row 1 \(sample 0\), column generator: must be one of"),
        ("prompt,self\nboats,32\n", r"row 1 \(sample 0\), column self: must be one of"),
        ("prompt,num_videos_per_prompt\na,1\nb,2\n", r"row 1 .*column num_videos_per_prompt: is the same in all rows"),
        ("prompt,guidance_scale\nboats,NaN\n", r"row 1 .*column guidance_scale: must be a number.*not NaN"),
        ("prompt,eta\nboats,[1]\n", r"row 1 \(sample 0\): AnimateDiffPipeline refuses the run: TypeError"),
    ],
)
def test_what_another_pipeline_refuses(text, words, table):
    path = table(text)
    with pytest.raises(ConfigError, match=rf"^manifest {path}: {words}"):
        prepared(path, model_id=str(folder("animatediff")), **{k: FAMILIES["animatediff"].call[k] for k in ("height",)})


def test_rows_with_other_columns_are_shown_to_the_pipeline(table):
    path = table("prompt,seed\nboats,3\nships,4\n,5\n")
    words = r"row 3 \(sample 2\): AnimateDiffPipeline refuses the run: ValueError: Provide either `prompt`"
    with pytest.raises(ConfigError, match=rf"^manifest {path}: {words}"):
        prepared(path, model_id=str(folder("animatediff")))


def test_other_arguments_that_do_not_fit(table, tmp_path, capsys, monkeypatch):
    path = table("seed\n1\n2\n")
    with pytest.raises(ConfigError, match=r"^manifest .*: only with generate, benchmark makes no videos$"):
        RunConfig(manifest=path)
    with pytest.raises(ConfigError, match=r"^num_samples 3: leave it out: the manifest's 2 rows are the samples$"):
        RunConfig(**SMALL, manifest=path, num_samples=3)
    with pytest.raises(ConfigError, match=r"^manifest .*jobs\.txt: must be a \.csv or \.jsonl file$"):
        RunConfig(**SMALL, manifest=tmp_path / "jobs.txt")
    with pytest.raises(ConfigError, match=r"^decode as-ready: only with generate"):
        RunConfig(decode="as-ready")
    monkeypatch.chdir(tmp_path)
    table("image,seed\na.png,1\nmissing.png,2\n")
    with pytest.raises(SystemExit) as end:
        main(["generate", "--manifest", "jobs.csv", "--output-dir", "run"])
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(
        f"error: --manifest {path}: row 2 (sample 1), column image, {tmp_path / 'missing.png'}"
    )
    assert printed.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_the_run_folder_and_its_origin(table, tmp_path):
    text = "image,seed\na.png,1\nb.png,2\n"
    path = table(text)
    config = prepared(path, output_dir=tmp_path / "run")
    place = runfolder.create(config)
    assert (place / "manifest.csv").read_text() == text
    read, execution = RunConfig.read(place), resolve(config)
    assert read.rows == config.rows
    before = origin.of(read, execution)
    assert origin.of(read.replace(decode="as-ready"), execution).digest == before.digest
    table("image,seed\na.png,1\nb.png,3\n")
    with pytest.raises(ConfigError, match=r"row 2 \(sample 1\) has changed since the run was made: restore it"):
        origin.of(read, execution)
    edited = RunConfig(**json.loads(read.to_json()) | {"rows": manifest.read(path)})
    with pytest.raises(ConfigError, match=r"row 2 \(sample 1\), column seed of the manifest is not what its sample"):
        origin.check(before, origin.of(edited, execution), "run")
    table(text + "b.png,4\n")
    with pytest.raises(ConfigError, match=r"row 3 \(sample 2\) has changed"):
        origin.of(read, execution)
    table(text)
    Image.new("RGB", (64, 64), "green").save(tmp_path / "b.png")
    with pytest.raises(ConfigError, match=r"row 2 \(sample 1\), column image of the manifest is not what its sample"):
        origin.check(before, origin.of(read, execution), "run")


def test_a_rank_that_decodes_between_two_samples_is_no_stall():
    config = RunConfig(**SMALL | {"device": "auto"}, num_samples=3, decode="as-ready", parallel=Parallel(pp=2))

    def event(t: float, rank: int, kind: str, **facts: Any) -> Any:
        return parse(json.dumps({"t": t, "rank": rank, "kind": kind, **facts}).encode())

    step = {"step": 0, "sample": 1, "seconds": 0.1}
    events = [event(0.0, rank, "clock") for rank in (0, 1)]
    events += [event(1.0, 0, "step", **step), event(1.0, 0, "send", sample=1, seconds=0.0)]
    events += [event(0.9, 1, "step", sample=0, step=1, seconds=0.1), event(0.9, 1, "sample", sample=0)]
    work = Work(attempt=1, latents=range(3))
    for kind in ("decode", "chunk"):
        events.append(event(1.0, 1, kind, sample=0))
        assert look(config, work, events, at=60.0) is None
    assert look(config, work, events, at=9000.0).rank == 1
    events.append(event(1.1, 1, "video", sample=0, seconds=0.1))
    assert look(config, work, events, at=60.0).rank == 0  # nobody else can go on
