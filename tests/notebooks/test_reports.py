"""Reports: settings and choices arrive, failures are named, and the folder is complete in itself."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pandas as pd
import pytest
from PIL import Image

from launch import terminate
from launch.__main__ import main
from launch.report import parameters
from launch.report.done import Done
from launch.report.execute import PROJECT, report
from tests import patience
from vdpp_core import Parallel, RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.runs import runfolder
from vdpp_core.runs.run import Run

FIGURE = """
import matplotlib.pyplot as plt
figure, axes = plt.subplots()
axes.set_title("one panel")
axes.set_xlabel("steps")
figure.suptitle(f"run {RUN}: {TOTAL_STEPS} < 15")
figure.supxlabel("on a machine")
plt.close(figure)
figure
"""
CONCLUSION = "print(f'{TOTAL_STEPS}\\nsteps <were> enough')"
TABLE = "import pandas as pd\npd.DataFrame({'third': [TOTAL_STEPS / 3] * 100}).rename_axis('row')"
STYLED = "pd.DataFrame({'x': [1 / 3]}).style.format('{:.1f}')"
MAKES_A_RUN = """
from tests import patience
from vdpp_core import Parallel, RunConfig
from vdpp_core.runs import runfolder
from vdpp_core.runs.run import Run
runfolder.create(RunConfig(parallel=Parallel(dp=2), total_steps=TOTAL_STEPS)).name
"""
STARTS_A_RUN = """
import launch
from vdpp_core import RunConfig
launch.start(RunConfig(total_steps=2, num_samples=100_000, device="cpu", output_dir="runs/endless")).wait()
"""
REPORT = """
import sys
from pathlib import Path
from launch import signals
from launch.report.execute import report
signals.all_as_ctrl_c()
report([], [], *map(Path, sys.argv[1:]))
"""


def write(folder: Path, name: str, *sources: str, parameters: str = "TOTAL_STEPS = 28", figure: str = "") -> None:
    """A notebook of a title, a cell of parameters, and cells; those that draw are tagged."""
    title = f"# {name} & co\n\n![the panel](../figures/panel.png)"
    cells = [nbformat.v4.new_markdown_cell(title), nbformat.v4.new_code_cell(parameters)]
    cells[1].metadata["tags"] = ["parameters"]
    for source in sources:
        cells.append(nbformat.v4.new_code_cell(source))
        if source == FIGURE:
            cells[-1].metadata["tags"] = [f"figure:{figure}"]
        if source == CONCLUSION:
            cells[-1].metadata["tags"] = ["conclusion"]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / f"{name}.ipynb")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """notebooks/ of three: one that draws, one that fails, one that ends its kernel; and a run that is there before."""
    place = tmp_path_factory.mktemp("report")
    notebooks = place / "notebooks"
    notebooks.mkdir()
    (place / "figures").mkdir()
    Image.new("L", (1, 1)).save(place / "figures" / "panel.png")
    config = RunConfig(parallel=Parallel(pp=2), total_steps=9, output_dir=notebooks / "runs" / "earlier-run")
    runfolder.create(config)
    runfolder.create(config.replace(output_dir=notebooks / "runs" / "another"))
    given = 'TOTAL_STEPS = 28\nRUN = "none"\nSHAPE = [1, 4]\nGIB = 2.0'
    sources = (FIGURE, TABLE, STYLED, MAKES_A_RUN, FIGURE, CONCLUSION)
    write(notebooks, "01_draws", *sources, parameters=given, figure="drawn")
    write(notebooks, "02_fails", "1 + 1", "raise ValueError('no <luck>')", "2 + 2")
    write(notebooks, "03_ends", "import os\nos._exit(1)")
    return place


@pytest.fixture(scope="module")
def made(place: Path) -> list[Done]:
    return report([], ["total_steps=14", "RUN=earlier-run", "shape=2,8,8"], place / "notebooks", place / "figures")


@pytest.fixture(scope="module")
def folder(place: Path, made: list[Done]) -> Path:
    (folder,) = (place / "figures" / "reports").glob("*/")
    assert re.fullmatch(r"\d{8}-\d{6}-\w+", folder.name)
    return folder


def test_parameters_arrive_where_they_are_known(made: list[Done], folder: Path):
    assert [book.settings for book in made] == [
        {"TOTAL_STEPS": 14, "RUN": "earlier-run", "SHAPE": [2, 8, 8]},
        {"TOTAL_STEPS": 14},
        {"TOTAL_STEPS": 14},
    ]
    assert "TOTAL_STEPS = 14" in unescape(re.sub("<.*?>", "", (folder / "01_draws.html").read_text()))
    assert "TOTAL_STEPS = 14, RUN = &#39;earlier-run&#39;" in (folder / "index.html").read_text()


def test_tables_are_files_of_all_their_rows_and_digits(folder: Path):
    files = sorted(path.name for path in (folder / "tables").iterdir())
    assert files == ["01_draws-cell-03.csv", "01_draws-cell-04.csv"]
    table = pd.read_csv(folder / "tables" / files[0])
    assert table["third"].tolist() == [14 / 3] * 100
    assert pd.read_csv(folder / "tables" / files[1])["x"].tolist() == [1 / 3]


def test_figures_are_files_and_the_page_has_each_once(folder: Path):
    assert (folder / "figures" / "drawn.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "figures" / "drawn.svg").read_text()
    page = (folder / "01_draws.html").read_text()
    assert page.count("data:image/png;base64,") == 2 + 1  # that of the text
    assert "<svg" not in page


def test_each_figure_has_its_words_and_a_picture_of_a_text_is_in_the_page(folder: Path):
    for file in ("01_draws.html", "index.html"):
        first, *_ = re.findall(r'<img[^>]*alt="(run[^"]*)"', (folder / file).read_text())
        assert first == "run earlier-run: 14 &lt; 15. It shows one panel: steps"
    page = (folder / "01_draws.html").read_text()
    captions = re.findall(r"<b>Figure (\d)\. run earlier-run: 14 &lt; 15</b>\s*<span[^>]*>on a machine</span>", page)
    assert captions == ["1", "2"]
    assert re.search(r'<img alt="the panel" src="data:image/png;base64,', page)


def test_the_index_has_the_conclusions_and_where_the_time_went(made: list[Done], folder: Path):
    index = (folder / "index.html").read_text()
    assert "<p>14 steps &lt;were&gt; enough</p>" in index
    assert index.count('class="thumbnail"') == 1  # a picture of each notebook that draws
    assert [len(book.cells) for book in made] == [7, 3, 1]  # those that ended, if only with an error
    drawn = made[0]
    assert 0 < sum(cell.seconds for cell in drawn.cells) < drawn.seconds
    rows = re.findall(r"<td>(\d+)</td>\n<td>(\d+)&nbsp;%</td>", index)
    assert [int(seconds) for seconds, _ in rows] == [round(book.seconds) for book in made]
    assert 98 <= sum(int(share) for _, share in rows) <= 102


def test_pages_lead_to_the_contents_and_to_their_neighbours_and_fold_code(folder: Path):
    page = (folder / "02_fails.html").read_text()
    for relation, address in (("contents", "index"), ("prev", "01_draws"), ("next", "03_ends")):
        assert len(re.findall(rf'href="{address}.html" rel="{relation}"', page)) == 2  # above and below
    assert page.count("<summary>Code of cell") == page.count("<details>") - 1 == 4  # and the parameters of this report
    assert "no &lt;luck&gt;" in re.sub("<details>.*?</details>", "", page, flags=re.DOTALL)


def test_what_fails_is_named_with_its_cell_and_the_others_are_made(made: list[Done], folder: Path):
    assert [book.error for book in made] == [
        None,
        "failed in cell 3: ValueError: no <luck>",
        "failed in cell 2: Kernel died",
    ]
    index = (folder / "index.html").read_text()
    target = re.search(r'href="02_fails.html#([^"]+)"><b>failed in cell 3: ValueError: no &lt;luck&gt;', index)
    assert target is not None
    assert f'id="{target[1]}"' in (folder / "02_fails.html").read_text()


def test_runs_that_were_made_and_used_are_listed(folder: Path):
    runs = pd.read_csv(folder / "runs.csv").set_index("run")
    assert sorted(runs["by this notebook"]) == ["made", "used"]
    assert runs["notebook"].tolist() == ["01_draws", "01_draws"]
    assert runs.loc["earlier-run", ["by this notebook", "layout", "total_steps"]].tolist() == ["used", "pp 2", 9]
    new = runs[runs["by this notebook"] == "made"].iloc[0]
    assert (new["layout"], new["total_steps"], new["outcome"]) == ("dp 2", 14, "no result")
    assert pd.read_json(io.StringIO(new["config"]), typ="series")["total_steps"] == 14


def test_every_reference_leads_to_a_file_of_the_report(place: Path, folder: Path):
    entry = place / "figures" / "reports" / "index.html"
    assert f"url={folder.name}/index.html" in entry.read_text()
    linked = set()
    for page in [entry, *folder.glob("*.html")]:
        text = page.read_text()
        assert "<script" not in text
        for reference in re.findall(r"""\b(?:src|href)=["']([^"']*)["']""", text):
            if not reference.startswith(("#", "data:")):
                linked.add((page.parent / unquote(unescape(reference).partition("#")[0])).resolve())
    files = {path for path in folder.rglob("*") if path.is_file()}
    assert files == {path for path in linked if path.is_relative_to(folder)}
    assert all(path.exists() for path in linked)


def test_a_report_leaves_a_clone_clean_and_replaces_its_pictures_only_if_asked(place: Path, tmp_path: Path):
    git = ["git", "-C", str(tmp_path / "clone")]
    subprocess.run(["git", "clone", "--quiet", str(PROJECT), git[-1]], check=True)
    figures = tmp_path / "clone" / "figures"
    write(tmp_path, "00_mine", FIGURE, parameters='TOTAL_STEPS = 28\nRUN = "none"', figure="gantt")
    for update, changed in ((False, ""), (True, " M figures/gantt.png\n")):
        (done,) = report([str(tmp_path / "00_mine.ipynb")], [], figures=figures, update_figures=update)
        assert done.error is None
        assert subprocess.run([*git, "status", "--short"], capture_output=True, text=True).stdout == changed


def test_ctrl_c_keeps_the_pages_and_leaves_nothing_running(tmp_path: Path):
    notebooks, figures = tmp_path / "notebooks", tmp_path / "figures"
    notebooks.mkdir()
    write(notebooks, "01_draws", CONCLUSION)
    write(notebooks, "02_runs", STARTS_A_RUN)
    write(notebooks, "03_never")
    process = subprocess.Popen(
        [sys.executable, "-c", REPORT, notebooks, figures], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    run = notebooks / "runs" / "endless"
    patience.wait_until(lambda: (run / "events").exists() and Run(run).events(), 120)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of the group
    said = process.communicate(timeout=60)[0]
    assert process.returncode == -signal.SIGINT  # an uncaught KeyboardInterrupt
    assert "stopped in cell 2" in said
    assert Run(run).result()["outcome"] == "stopped"
    assert not terminate.launchers(run)
    (folder,) = figures.glob("reports/*/")
    assert sorted(path.name for path in folder.glob("*.html")) == ["01_draws.html", "02_runs.html", "index.html"]
    assert 'rel="next"' in (folder / "01_draws.html").read_text()
    assert 'rel="next"' not in (folder / "02_runs.html").read_text()
    assert "stopped in cell 2" in (folder / "index.html").read_text()


def test_notebooks_are_chosen_by_name_beginning_and_path(place: Path, tmp_path: Path):
    write(tmp_path, "00_mine")
    mine, notebooks = tmp_path / "00_mine.ipynb", place / "notebooks"
    names = [path.stem for path in parameters.choose(["03_ends", "01", str(mine)], notebooks)]
    assert names == ["00_mine", "01_draws", "03_ends"]
    assert len(parameters.choose([], notebooks)) == len(parameters.choose(["0"], notebooks)) == 3


@pytest.mark.parametrize(
    ("names", "settings", "line"),
    [
        ([], ["total_steps"], "set total_steps: must be NAME=VALUE"),
        ([], ["=3"], "set =3: must be NAME=VALUE"),
        ([], ["nosuch=3"], "set NOSUCH=3: no notebook here has this parameter; they have GIB, RUN, SHAPE, TOTAL_STEPS"),
        (["02"], ["run=x"], "set RUN=x: no notebook here has this parameter; they have TOTAL_STEPS"),
        ([], ["total_steps=ten"], "set TOTAL_STEPS=ten: must be a whole number in 01_draws, like its default 28"),
        ([], ["total_steps=True"], "set TOTAL_STEPS=True: must be a whole number in 01_draws, like its default 28"),
        ([], ["shape=3"], "set SHAPE=3: must be a list in 01_draws, like its default [1, 4]"),
        ([], ["shape=[]"], "set SHAPE=[]: must be a list in 01_draws, like its default [1, 4]"),
        ([], ["shape=1,'a'"], "set SHAPE=(1, 'a'): must be a whole number in 01_draws, like its default [1, 4]"),
        ([], ["gib=much"], "set GIB=much: must be a number in 01_draws, like its default 2.0"),
        (["07"], [], "notebook 07: must be a path or the beginning of one of these names: 01_draws, 02_fails, 03_ends"),
    ],
)
def test_what_cannot_be_made_is_one_line_and_nothing_is_executed(
    place: Path, tmp_path: Path, names: list[str], settings: list[str], line: str
):
    with pytest.raises(ConfigError) as caught:
        report(names, settings, place / "notebooks", tmp_path)
    assert str(caught.value) == line
    assert not list(tmp_path.iterdir())


def test_a_number_may_be_whole_and_a_list_a_tuple(place: Path):
    book = parameters.read(place / "notebooks" / "01_draws.ipynb")
    settings = parameters.parse(["gib=3", "shape=(2, 3)", "RUN=20261128-101010-x"])
    assert parameters.assign(settings, {"a": book}) == {
        "a": {"GIB": 3.0, "SHAPE": [2, 3], "RUN": "20261128-101010-x"},
    }


def test_the_command_hands_on_its_words_and_ends_with_1_where_a_notebook_failed(
    made: list[Done], monkeypatch: pytest.MonkeyPatch
):
    def fake(names: list[str], settings: list[str], update_figures: bool) -> list[Done]:
        assert (names, settings, update_figures) == (["01", "04"], ["a=1", "b=2"], True)
        return made

    monkeypatch.setattr("launch.report.execute.report", fake)
    monkeypatch.setattr("warnings.showwarning", print)  # main sets it
    with pytest.raises(SystemExit, match="1"):
        main(["report", "--update-figures", "--set", "a=1", "--set", "b=2", "01", "04"])


def test_the_command_line_says_it_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setattr("warnings.showwarning", print)  # main sets it
    broken = tmp_path / "broken.ipynb"
    broken.write_text("{}")
    for words in (["nosuch"], ["00", "--set", "ranks=two"], [str(broken)]):
        with pytest.raises(SystemExit, match="2"):
            main(["report", *words])
        said = capsys.readouterr()
        assert said.out == ""
        assert re.fullmatch(r"error: (NOTEBOOK|--set) .*: (must be|no parameter) .*\n", said.err)
