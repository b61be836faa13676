"""Rooms import in one direction, and importing starts nothing."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("vdpp_core", "launch")
CORE = ("config", "models", "parallel", "runs", "engine")
ABOVE = {  # room -> the rooms that it may import from
    "config": set(),
    "models": {"config"},
    "parallel": {"config", "models"},
    "runs": {"config"},
    "engine": {"config", "models", "parallel", "runs"},
    "predict": {"config", "models", "parallel", "runs"},
    "plots": {"config", "models", "runs", "predict"},
    "tiny_svd": {"config", "models", "runs", "plots"},
    "compare": {*CORE, "predict", "plots"},
    "lessons": {*CORE, "predict", "compare", "plots", "tiny_svd", "launch"},
    "cli": {*CORE, "predict", "plots", "compare"},
    "launch": {*CORE, "predict", "plots", "compare", "cli"},
}
CORE_MAY_HAVE = 6_350  # lines of code, without blank lines, comments and docstrings


class Import(NamedTuple):
    module: str
    on_import: bool  # not in a function
    for_types: bool  # under TYPE_CHECKING


# Deferred, and the only ones upwards: `Parallel.mesh` and `vdpp_core.parallelize` are there for callers.
UPWARDS = {("vdpp_core.config.layout", "vdpp_core.parallel.process_groups")}


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


SOURCES = {name_of(path): path for package in PACKAGES for path in (ROOT / package).rglob("*.py")}


def imports_of(name):
    found = []

    def visit(node, on_import=True, for_types=False):
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, on_import, for_types) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                module = inner if inner in SOURCES or node.module == "torch" else node.module
                found.append(Import(module, on_import, for_types))
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                visit(child, on_import, True)
            for child in node.orelse:
                visit(child, on_import, for_types)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                visit(child, on_import and not inside, for_types)

    visit(ast.parse(SOURCES[name].read_text()))
    return found


IMPORTS = {name: imports_of(name) for name in SOURCES}


def room_of(module):
    """The room of a module of ours; None for others, and for the two files that stand above all rooms."""
    package, *rest = module.split(".")
    if package == "launch":
        return "launch"
    if package != "vdpp_core" or not rest or rest == ["__main__"]:
        return None
    return rest[0]


def lines_of_code(path):
    """Without blank lines, comments and docstrings."""
    text = path.read_text()
    tree, code = ast.parse(text), set()
    strings = [
        node.body[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None
    ]
    words = {line for node in strings for line in range(node.lineno, node.end_lineno + 1)}
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.strip().startswith("#") and number not in words:
            code.add(number)
    return len(code)


def test_the_reader_of_imports_reads_them():
    assert Import("vdpp_core.config.steps", True, False) in IMPORTS["vdpp_core.config.run_config"]
    assert Import("torch.distributed.device_mesh", True, True) in IMPORTS["vdpp_core.config.layout"]
    assert Import("vdpp_core.parallel.process_groups", False, False) in IMPORTS["vdpp_core.config.layout"]
    assert Import("torch.distributed", True, False) in IMPORTS["vdpp_core.parallel.world"]


def test_every_module_is_in_a_room():
    assert {room_of(name) for name in SOURCES} - {None} == set(ABOVE)


def test_rooms_import_in_one_direction():
    upwards = [
        f"{name} imports {used.module}"
        for name in SOURCES
        for used in IMPORTS[name]
        if (mine := room_of(name)) and (theirs := room_of(used.module)) and theirs != mine and theirs not in ABOVE[mine]
        if (name, used.module) not in UPWARDS and (mine, theirs) != ("cli", "lessons")  # see the test of the lessons
    ]
    assert upwards == []
    order = graphlib.TopologicalSorter(ABOVE)
    order.prepare()


def test_nothing_goes_round():
    graph = {
        name: {used.module for used in found if used.module in SOURCES and used.on_import and not used.for_types}
        for name, found in IMPORTS.items()
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_the_core_is_compact():
    lines = dict.fromkeys(CORE, 0)
    for name, path in SOURCES.items():
        if room_of(name) in CORE:
            lines[room_of(name)] += lines_of_code(path)
    assert sum(lines.values()) <= CORE_MAY_HAVE, lines


def test_only_commands_import_the_lessons_and_only_when_they_run():
    used = {
        (room_of(name), each.on_import)
        for name, found in IMPORTS.items()
        for each in found
        if room_of(each.module) == "lessons" != room_of(name) and not each.for_types
    }
    assert used == {("cli", False)}


def test_nobody_imports_tests_or_notebooks():
    for name, found in IMPORTS.items():
        assert not {used.module.partition(".")[0] for used in found} & {"notebooks", "tests"}, name


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_starts_nothing(package):
    program = f"""
import sys, {package}
print(*sorted(name for name in sys.modules if name.startswith("vdpp_core.")))
import torch.distributed
print(torch.distributed.is_initialized())
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    ours, initialised = process.stdout.splitlines()
    assert initialised == "False"
    assert "vdpp_core.config" in ours.split()
    assert not [
        name for name in ours.split() if name.startswith(("vdpp_core.engine.worker", "vdpp_core.compare.peers."))
    ]
