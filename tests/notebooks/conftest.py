"""Notebooks executed with small parameters, in a browser where there is one: so they also show that every notebook
runs in JupyterLab, from its first cell to its last. Their tests lie in several files, which can run side by side."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import papermill
import pytest
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

from launch.report import done, pages
from tests.browser.lab import CHROMIUM, NEEDED, Lab
from tests.conftest import write_run
from vdpp_core import Parallel, RunConfig

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
SMALL: dict[str, dict[str, Any]] = {
    "00_setup": {"TOTAL_STEPS": 4, "NUM_SAMPLES": 2, "VIDEO_STEPS": 3},
    "01_pipeline_vs_data_parallel": {
        "LATENT_SHAPE": [1, 4, 3, 8, 8],
        "TOTAL_STEPS": 5,
        "NUM_SAMPLES": 3,
        "REPEATS": 1,
    },
    "02_fsdp_memory": {"LATENT_SHAPE": [1, 4, 2, 8, 8]},
    "03_latency": {
        "LATENT_SHAPE": [1, 4, 4, 8, 8],
        "TOTAL_STEPS": 2,
        "VIDEO_STEPS": 2,
        "RANKS": [2],
        "METHODS_MODEL": "tiny",
        "METHODS_SHAPE": [1, 4, 2, 8, 8],
    },
    "04_planner": {"MODEL": "tiny"},
    "05_quality": {"TOTAL_STEPS": 3, "IMAGES": 2, "FEWER_IMAGES": 2, "STEPS": [2, 3], "BUCKETS": [0, 255]},
    "06_lab": {"NUM_FRAMES": 3, "TOTAL_STEPS": 4, "NUM_SAMPLES": 3},
    "07_plots": {},
    "08_any_pipeline": {
        "TOTAL_STEPS": 4,
        "STAGES": ["animatediff PNDMScheduler", "hunyuan-video FlowMatchEulerDiscreteScheduler"],
        "AXES_OF": ["animatediff PNDMScheduler"],
        "PROMPTS": ["a red ball", "two boats"],
        "BUCKETS": [127, 255],
    },
    "09_experts": {
        "TOTAL_STEPS": 2,
        "NUM_SAMPLES": 2,
        "FOUR_STEPS": 4,
        "FOUR_SAMPLES": 4,
        "FOUR_BOUNDARY": 100.0,
        "VIDEO_STEPS": 4,
        "IMAGES": 2,
        "WAN_STEPS": [4],
        "WAN_SAMPLES": 4,
    },
    "10_training_parallelism": {"PROBLEM": "small", "STEPS": 3, "MICRO_BATCHES": [4], "DENOISING_STEPS": 2},
}
PREDICTING = ["02_fsdp_memory", "03_latency"]  # in test_predicting.py
PLANNING = ["04_planner", "06_lab", "10_training_parallelism"]  # in test_planning.py
OTHER_PIPELINES = ["08_any_pipeline", "09_experts"]  # in test_other_pipelines.py
IN_OTHER_FILES = [*PREDICTING, *PLANNING, *OTHER_PIPELINES]
FIGURES = {
    "00_setup": {"link"},
    "01_pipeline_vs_data_parallel": {"gantt", "gantt_predicted", "makespans"},
    "02_fsdp_memory": {"memory_published", "memory_remedies", "memory_slider", "memory_measured"},
    "03_latency": {"latency_published", "exchanged", "latency_slider", "latency_axes", "methods", "claims"},
    "04_planner": {
        "schedules_documented",
        "planner_latency",
        "planner_throughput",
        "planner_arrivals",
        "planner_measured",
    },
    "05_quality": {
        "seeds",
        "schedules",
        "scheduler_videos",
        "scheduler_quality",
        "bucket_255",
        "speed",
        "guidance",
        "steps_quality",
    },
    "06_lab": {"lab_compared", "lab_stopped"},
    "07_plots": {"throughput", "latency", "scaling_efficiency"},
    "08_any_pipeline": {"handed_on"},
    "09_experts": {"loading", "gantt_predicted", "memory", "gantt", "gantt_four_predicted", "gantt_four", "videos"},
    "10_training_parallelism": {"training_data", "training_schedules", "training_inference", "training_sizing"},
}
MOVED_TO_WHAT_IS_REFUSED = """
for name, value in (("height", 300), (FRAMES, 33)):
    next(one for one in controls if one.description == name).value = value
    print("refused ->", message.value.partition("<b>")[2].partition("</b>")[0], picture._dom_classes)
"""
SAID_TWICE = "refused -> height 300: must be a multiple of 8 ('lab-old',)\n" * 2
ADDED = {  # cells that only the tests have: code that the next cell begins with, or None for the end; what they say
    "02_fsdp_memory": [
        (
            "predicted_bar(frames=25",
            "box, message, picture = _.children; controls = box.children; FRAMES = 'frames'" + MOVED_TO_WHAT_IS_REFUSED,
        )
    ],
    "04_planner": [
        (
            "def ends(control):",  # moves every control to its ends
            """
controls, message, picture = panel.children
controls = controls.children
drawn = {}


def draws(*_):
    drawn[tuple(control.value for control in controls)] = bytes(picture.value)


draws()
picture.observe(draws, "value")
""",
        ),
        (
            None,
            """
now = [control.value for control in controls]
for number, control in enumerate(controls):
    first, *_, last = [drawn.get((*now[:number], value, *now[number + 1 :]), b"") for value in ends(control)]
    same = first == last or not all(one.startswith(b"\\x89PNG") for one in (first, last))
    print(f"moved {control.description}: {'nothing changed' if same else 'redrawn'}")
for chosen in ({"dp": 4, "pp": 2}, {"pp": 6, "total_steps": 5}, {"frames": 3, "num_frames": 2}, {"fsdp": True}):
    print(chosen, "->", plan(gpus=6, goal="latency", **chosen).axes[0].texts[0].get_text())
print("one video ->", plan(gpus=6, goal="cadence", num_samples=1).axes[0].texts[0].get_text())
print("too large ->", plan(gpus=1, goal="latency", height=1280, width=2304, capacity_gib=1).get_suptitle())
FRAMES = "num frames"
"""
            + MOVED_TO_WHAT_IS_REFUSED,
        ),
    ],
}


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


@pytest.fixture(scope="session")
def executed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """executed(name): a notebook run with small parameters; its runs lie in a folder of their own."""
    lab: Lab | None = request.getfixturevalue("lab") if CHROMIUM or NEEDED else None
    work = lab.root if lab else tmp_path_factory.mktemp("notebooks")
    known: dict[str, Any] = {}

    def run(name: str) -> Any:
        if name not in known:
            out = work / f"{name}.ipynb"
            path = next(path for path in NOTEBOOKS if path.stem == name)
            book = parameterize_notebook(load_notebook_node(str(path)), SMALL[name])
            if name == "04_planner":
                _write_quiet_runs(work)
            for following, source in ADDED.get(name, []):
                starts = [number for number, cell in enumerate(book.cells) if cell.source.startswith(following or "\0")]
                (place,) = [len(book.cells)] if following is None else starts
                book.cells.insert(place, nbformat.v4.new_code_cell(source))
            nbformat.write(book, out)
            if lab:
                _in_browser(lab, out)
            else:
                papermill.execute_notebook(out, out, cwd=work, progress_bar=False, kernel_name="python3")
            known[name] = read(out)
        return known[name]

    return run


def _write_quiet_runs(root: Path) -> None:
    """Two runs that nothing disturbed: those of the notebooks may, by other tests' runs."""
    for samples in (2, 4):
        quiet = RunConfig(num_samples=samples, total_steps=3, device="cpu", parallel=Parallel())
        write_run(root, f"quiet-{samples}", quiet, step_s=0.1)


def _in_browser(lab: Lab, path: Path) -> None:
    """Run all cells of a notebook and save it; AssertionError with what a cell failed of."""
    lab.open(path.name)
    try:
        lab.run_all(seconds=540)
    finally:
        lab.close()
    code = [cell for cell in read(path).cells if cell.cell_type == "code"]
    failed = [out.traceback for cell in code for out in cell.outputs if out.output_type == "error"]
    assert not failed, "\n".join(failed[0])
    assert all(cell.execution_count for cell in code)


def texts(book: Any) -> str:
    outputs = [out for cell in book.cells if cell.cell_type == "code" for out in cell.outputs]
    return "\n".join(out.get("text", "") + out.get("data", {}).get("text/html", "") for out in outputs)


def page_of(book: Any, folder: Path) -> str:
    """The page of an executed notebook, its files in a folder."""
    pages.save_outputs(book, "notebook", folder)
    return pages.render(book, "notebook")


def assert_renders(book: Any, name: str, folder: Path) -> None:
    """To a page that needs no network, with all of its figures, each with its words, and a conclusion with a number."""
    figures = pages.save_outputs(book, name, folder)
    assert set(pages.tagged_figures(book)) == FIGURES[name]
    assert FIGURES[name] <= {figure.name for figure in figures}
    assert [figure.main for figure in figures].count(True) == 1
    assert re.search(r"\d", done.conclusion_of(book))
    page = pages.render(book, name)
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//[^"' >]+""", page)
    assert "VBox(" not in page
    assert page.count("data:image/png;base64,") >= len(FIGURES[name])
