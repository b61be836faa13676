"""Nothing listens to other machines, no code comes with a model, no token is written down, no name leads elsewhere."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pandas as pd
import psutil
import pytest
import torch
from jupyter_server.serverapp import ServerApp

import launch
from launch.report import index, pages
from launch.report.done import CellTime, Done, Shown
from vdpp_core import ConfigError, Parallel, RunConfig
from vdpp_core.__main__ import main
from vdpp_core.config.errors import redacted
from vdpp_core.config.fields import MODELS
from vdpp_core.engine import preflight
from vdpp_core.models import pipelines
from vdpp_core.runs import results, runfolder
from vdpp_core.runs.events import EventLog
from vdpp_core.runs.run import Run

ROOT = Path(__file__).parents[2]
job = sys.modules["launch.job"]
SOURCES = [path for package in ("vdpp_core", "launch") for path in (ROOT / package).rglob("*.py")]
TOKEN = "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZaBcDeFgH"
SCRIPT = '<script>alert("1")</script>'
SHORT = RunConfig(command="simulate", total_steps=20, num_samples=50, latent_shape=(1, 4, 2, 8, 8), threads=1)


def calls():
    """(file, name, call) of every call in the product, as "torch.load"."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield path.name, ast.unparse(node.func), node


def listening(process):
    """(address, command) of each socket that a process and its descendants wait on."""
    found = set()
    try:
        for each in (process, *process.children(recursive=True)):
            for connection in each.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add((connection.laddr.ip, " ".join(each.cmdline()[1:3])))
    except psutil.Error:
        pass  # one of them has just ended
    return found


def heard_until_the_end(process):
    """All of them, until the process ends."""
    found = set()
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        found |= listening(process)
        time.sleep(0.02)
    return found


def assert_out_of_reach(found):
    assert len(found) >= 2  # the store and the ranks
    assert {address for address, _ in found} <= {"127.0.0.1", "::1"}


def test_a_job_is_out_of_reach_of_other_machines(tmp_path):
    run = launch.start(SHORT.replace(output_dir=tmp_path / "run", parallel=Parallel(pp=2)))
    assert_out_of_reach(heard_until_the_end(psutil.Process(Run(run.folder).launcher()["pid"])))
    assert run.wait(60)["outcome"] == "ok"


@pytest.mark.slow
def test_ranks_started_by_a_flag_are_out_of_reach_of_other_machines(tmp_path):
    command = [sys.executable, "-m", "vdpp_core", "simulate", "--world-size", "2", "--num-samples", "50"]
    with subprocess.Popen([*command, "--output-dir", str(tmp_path / "run")], stdout=subprocess.DEVNULL) as process:
        assert_out_of_reach(heard_until_the_end(psutil.Process(process.pid)))
    assert process.returncode == 0


def test_the_workbook_is_served_to_this_machine_alone():
    assert ServerApp.ip.default() in ("localhost", "127.0.0.1")
    assert "--ip" not in (ROOT / "Makefile").read_text()


def test_no_pickles_are_loaded():
    for file, name, call in calls():
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert name.partition(".")[0] not in ("pickle", "marshal", "dill", "joblib", "shelve"), file
        assert name not in ("eval", "exec", "__import__", "numpy.load", "np.load"), file
        assert "trust_remote_code" not in given, file
        if name == "torch.load":
            assert given["weights_only"] == "True", file
        has_weights = not any(word in name for word in ("Scheduler", "Processor", "Config", "config_class"))
        if name.endswith(".from_pretrained") and has_weights:
            assert given["use_safetensors"] == "True", file


def test_no_shell_is_asked():
    for file, name, call in calls():
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert given.get("shell", "False") == "False", file
        assert name not in ("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"), file


class Pickle:
    """Leaves a file behind when it is loaded."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.fixture
def model(tmp_path):
    """A model with code of its own in each of its folders, which leaves a file behind when it is executed."""
    folder = Path(shutil.copytree(MODELS["tiny"], tmp_path / "model"))
    for part in (folder, *(path for path in folder.iterdir() if path.is_dir())):
        (part / "own.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'bad')!r}).touch()\nclass Own: ...")
    yield folder
    assert not (tmp_path / "bad").exists()


def refusal(model):
    with pytest.raises(ConfigError) as caught:
        preflight.check(preflight.complete(RunConfig(command="generate", model_id=str(model), device="cpu"), 1), 1)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("part", ["unet", "vae", "image_encoder"])
def test_a_pickle_is_refused(part, model, tmp_path):
    (weights,) = (model / part).glob("*.safetensors")
    name = "pytorch_model.bin" if part == "image_encoder" else "diffusion_pytorch_model.bin"
    torch.save({"weight": Pickle(tmp_path / "bad")}, model / part / name)
    weights.unlink()
    assert f"must be a pipeline's folder with {part}/*.safetensors" in refusal(model)


@pytest.mark.parametrize("part", ["_class_name", "vae", "image_encoder", "scheduler"])
def test_code_that_comes_with_a_model_is_refused(part, model):
    index = json.loads((model / "model_index.json").read_text())
    (model / "model_index.json").write_text(json.dumps(index | {part: ["own", "Own"]}))
    assert "own" in refusal(model)


def test_code_that_comes_with_a_model_is_not_executed(model):
    for settings in model.glob("*/*config.json"):
        named = {"auto_map": dict.fromkeys(("AutoConfig", "AutoModel", "AutoImageProcessor"), "own.Own")}
        settings.write_text(json.dumps(json.loads(settings.read_text()) | named))
    config = RunConfig(command="generate", model_id=str(model), device="cpu").for_ranks(1)
    preflight.check(config, 1)
    assert pipelines.load_official(config, torch.device("cpu"), torch.float32).image_encoder is not None


def written(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_token_is_not_written_down(model, tmp_path, monkeypatch):
    """By a run that ends well, and one whose weights vanish after they were checked: with a traceback."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.setenv(name, TOKEN)
    good = job.prepare(SHORT.replace(output_dir=tmp_path / "runs" / "good"), 1)
    wrong = job.prepare(RunConfig(model_id=str(model), device="cpu", output_dir=tmp_path / "runs" / "wrong"), 1)
    shutil.rmtree(model / "unet")
    job.launch([good, wrong], log=tmp_path / "runs" / "launcher.log")
    assert [launch.Job(folder).wait(120)["outcome"] for folder in (good, wrong)] == ["ok", "failed"]
    files = written(tmp_path / "runs")
    assert any(b"Traceback" in content for content in files.values())
    assert {"config.json", "job.json", "result.json", "launcher.log", "rank-0.jsonl"} <= {path.name for path in files}
    assert [path for path, content in files.items() if TOKEN.encode() in content] == []


@pytest.mark.parametrize(
    "line",
    [
        f"simulate --model tiny --model-id https://user:{TOKEN}@huggingface.co/some/model",
        f"memory --model-id {TOKEN}",
        f"generate --image https://user:{TOKEN}@huggingface.co/image.png",
        f"plan --gpus 1 --hf-token {TOKEN}",
        "benchmark --model-id https://user:secret-password@huggingface.co/some/model",
        "generate --image https://user:secret-password@host/x.png",
        "generate --image s3://user:secret-password@bucket/x.png?X-Amz-Signature=secret-password",
        f"benchmark --model-id {'x' * 490}https://user:secret-password@huggingface.co/some/model",
        f"benchmark --nothing-{'x' * 470} https://user:secret-password@huggingface.co/some/model",
    ],
)
def test_a_secret_is_not_repeated(line, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(line.split())
    assert end.value.code == 2
    said = capfd.readouterr()
    assert said.err.startswith("error: ")
    assert TOKEN not in said.err + said.out
    assert "secret-password" not in said.err + said.out
    assert written(tmp_path) == {}


@pytest.mark.parametrize("image", ["https://host/x.png", "https:/host/x.png", "s3://bucket/x.png", "file:///x.png"])
@pytest.mark.parametrize("made", [str, Path])
def test_an_address_is_no_image(image, made):
    with pytest.raises(ConfigError, match=r"^image .*: must be a file, not an address: download it first$"):
        RunConfig(image=made(image))
    assert RunConfig(image="C:/pictures/x.png").image == Path("C:/pictures/x.png")


@pytest.mark.parametrize(
    ("text", "without"),
    [
        ("https://user:pass@word@host/x", "https://…@host/x"),
        ("https:/user:password@host/x", "https:/…@host/x"),  # as a Path has it
        ("see //user:password@host", "see //…@host"),
        ("x?token=abcdef&y=1", "x?token=…&y=1"),
        ("x?y=1&X-Amz-Signature=abcdef", "x?y=1&X-Amz-Signature=…"),
        ("Authorization: Bearer abcdefgh12345678==", "Authorization: Bearer …"),
        (f"with {TOKEN} in it", "with … in it"),
        ("someone@example.com at https://host/x?y=1", "someone@example.com at https://host/x?y=1"),
        ("mail: a/b@c, and keys=5", "mail: a/b@c, and keys=5"),
    ],
)
def test_what_is_taken_out_of_texts(text, without):
    assert redacted(text) == without
    assert without in str(ConfigError("image", text, "no"))
    assert without in str(ConfigError("image", "x", text))


def test_what_a_rank_says_last_holds_no_secret(tmp_path):
    folder = runfolder.create(SHORT.replace(output_dir=tmp_path / "run", parallel=Parallel()))
    with EventLog(folder, 0) as log:
        log.write("start", pid=1, created=0.0, host="h", threads=1, device="cpu", dtype="float32", backend="gloo")
        log.last_word("error", error="OSError: https://user:secret-password@host/x?token=secret-password")
    assert results.settle(Run(folder))["failure"]["cause"] == "OSError: https://…@host/x?token=…"
    assert not [name for name, content in written(folder).items() if b"secret-password" in content]


@pytest.fixture
def runs(tmp_path):
    """A folder of runs beside a run that is none of them."""
    for folder in (tmp_path / "outside", tmp_path / "runs" / "inside"):
        runfolder.create(SHORT.replace(output_dir=folder, parallel=Parallel()))
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "outside")
    return tmp_path / "runs"


@pytest.mark.parametrize("name", ["../outside", "inside/../../outside", "link", ".", "..", ""])
def test_a_run_is_one_of_the_runs(name, runs):
    for wrong in (name, str(runs.parent / "outside")):
        with pytest.raises(ConfigError, match=r"^No run '.*' in "):
            launch.attach(wrong, root=runs)
    assert [run.run_id for run in launch.jobs(runs)] == ["inside"]
    for typed in ("inside", "inside/", "runs/inside", str(runs / "inside")):  # as a shell completes it
        assert launch.attach(typed, root=runs).folder == runs / "inside"


@pytest.mark.parametrize("name", ["../outside", "/etc", "link"])
def test_a_sweep_has_runs_of_its_own(name, runs):
    (runs / "inside" / "link").symlink_to(runs.parent / "outside")
    (runs / "inside" / "sweep.json").write_text(json.dumps([{"run_id": name, "config": 0, "repeat": 0}]))
    sweep = launch.attach("inside", root=runs)
    with pytest.raises(ConfigError, match=r"must be a sweep's"):
        sweep.stop()


def test_a_model_does_not_name_a_run_as_it_likes():
    for name in ("a/$(touch bad)", "a/<script>", "a/..", "a/b c\n", "x" * 300):
        run_id = runfolder.new_run_id(RunConfig(model_id=name))
        assert Path(run_id).name == run_id
        assert len(run_id) < 100
        assert set(run_id) & set("$()<> \n/") == set()


def report_of(name: str, folder: Path) -> str:
    """The index of a report where everything is called so."""
    figures, cells = [Shown(name, [name], {"title": name}, main=True)], [CellTime(1, name, name, 9.0)]
    path = Path(f"{name.replace('/', '')}.ipynb")
    failed, ended = (Done(path, name, {name: name}, 9.0, error, name, name, figures, cells) for error in (name, None))
    failed.runs = [{"run": name, "layout": name, "outcome": name, "by this notebook": name, "config": name}]
    return index.write(folder, [failed, ended]).read_text()


def test_names_are_no_html(tmp_path):
    folder = runfolder.create(SHORT.replace(output_dir=tmp_path / "run", parallel=Parallel()))
    (folder / "events" / "rank-0.jsonl").write_text(json.dumps({"t": 1, "rank": 0, "kind": SCRIPT}) + "\n")
    picture = tmp_path / f'a.png"{SCRIPT.replace("/", "")}'
    picture.write_bytes(b"")
    shown = [
        sys.modules["launch.widgets.watch"]._run(SCRIPT, launch.Job(folder).progress()),
        report_of(SCRIPT, tmp_path),
        launch.gallery({SCRIPT: picture}).data,
        pd.DataFrame({"run": [SCRIPT]}).to_html(),  # how notebooks show tables
    ]
    for page in shown:
        assert "<script" not in page
        assert "&lt;script" in page


def test_a_title_is_no_html():
    assert SCRIPT not in pages.render(nbformat.v4.new_notebook(), SCRIPT)
