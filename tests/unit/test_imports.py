"""Imports run one way, and importing starts nothing."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("vdpp_core", "launch")

# Each module imports only from its own line and those above. A new module gets its place here.
LAYERS = [
    {
        "vdpp_core.config",
        "vdpp_core.errors",
        "vdpp_core.files",
        "vdpp_core.importing",
        "vdpp_core.layout",
        "vdpp_core.metrics",
        "vdpp_core.parallel.groups",
        "vdpp_core.processes",
        "vdpp_core.sizing",
        "vdpp_core.steps",
    },
    {
        "vdpp_core.allocator",
        "vdpp_core.limits",
        "vdpp_core.loopback",
        "vdpp_core.machine",
        "vdpp_core.measure",
        "vdpp_core.media",
        "vdpp_core.mesh",
        "vdpp_core.network",
        "vdpp_core.unets",
        "vdpp_core.unets.attention",
        "vdpp_core.unets.dummy",
        "vdpp_core.unets.patches",
        "vdpp_core.unets.published",
        "vdpp_core.unets.shortcuts",
        "vdpp_core.unets.svd",
        "vdpp_core.unets.units",
        "vdpp_core.unets.weights",
        "vdpp_core.article",
        "vdpp_core.cli",
        "vdpp_core.events",
        "vdpp_core.origin",
        "vdpp_core.runfolder",
        "vdpp_core.schedule",
    },
    {
        "vdpp_core.chrome_trace",
        "vdpp_core.conditioning",
        "vdpp_core.denoise",
        "vdpp_core.disturbed",
        "vdpp_core.handoff",
        "vdpp_core.parallel.communicators",
        "vdpp_core.parallel.group",
        "vdpp_core.parallel.output",
        "vdpp_core.peers_plots",
        "vdpp_core.peers_report",
        "vdpp_core.probe",
        "vdpp_core.progress",
        "vdpp_core.results",
        "vdpp_core.resuming",
        "vdpp_core.tables",
        "vdpp_core.plots",
        "vdpp_core.decode",
        "vdpp_core.assets.clips",
        "vdpp_core.assets.model",
    },
    {
        "vdpp_core.assets.train",
        "vdpp_core.planner_plots",
        "vdpp_core.latency_plots",
        "vdpp_core.parallel",
        "vdpp_core.parallel.collectives",
        "vdpp_core.parallel.frames",
        "vdpp_core.parallel.fsdp",
        "vdpp_core.parallel.guidance",
        "vdpp_core.parallel.lockstep",
        "vdpp_core.parallel.parallelize",
        "vdpp_core.quality",
        "vdpp_core.quality_plots",
        "vdpp_core.trace",
        "vdpp_core.videos",
        "vdpp_core.waiting",
    },
    {"vdpp_core.assets.judge", "vdpp_core.replay"},
    {"vdpp_core.costs", "vdpp_core.gathering", "vdpp_core.guard", "vdpp_core.memory", "vdpp_core.memory_plots"},
    {"vdpp_core.rates"},
    {"vdpp_core.advice", "vdpp_core.checks"},
    {"vdpp_core.estimates", "vdpp_core.predicting"},
    {"vdpp_core.engine"},
    {"vdpp_core.peers"},
    {"vdpp_core.__main__"},
]
WITHOUT_RANKS = {
    *("cli", "config", "costs", "latency_plots", "layout", "machine", "memory", "memory_plots", "peers_plots"),
    *("disturbed", "events", "files", "origin", "processes", "progress", "resuming"),
    *("metrics", "peers_report", "plots", "rates", "replay", "results", "runfolder", "schedule", "sizing", "steps"),
    *("advice", "article", "checks", "chrome_trace", "estimates", "planner_plots", "predicting", "tables", "trace"),
    *("network", "waiting"),
    *(
        "parallel.communicators",
        "parallel.frames",
        "parallel.group",
        "parallel.guidance",
        "parallel.lockstep",
        "parallel.output",
    ),
}
OF_A_RANK = {f"vdpp_core.{name}" for name in ("engine", "gathering", "guard", "handoff", "mesh", "peers")} | {
    f"vdpp_core.parallel.{name}" for name in ("collectives", "fsdp", "groups", "parallelize")
}


class Import(NamedTuple):
    module: str
    on_import: bool  # not in a function
    for_types: bool  # under TYPE_CHECKING


MESH = Import("vdpp_core.parallel.groups", False, False)  # Parallel builds its mesh, when asked to


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
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}


def test_the_reader_of_imports_reads_them():
    assert Import("vdpp_core.steps", True, False) in IMPORTS["vdpp_core.config"]
    assert Import("torch.distributed.device_mesh", True, True) in IMPORTS["vdpp_core.layout"]
    assert MESH in IMPORTS["vdpp_core.layout"]
    assert Import("vdpp_core.machine", True, False) in IMPORTS["vdpp_core.engine"]
    assert Import("torch.distributed", True, False) in IMPORTS["vdpp_core.mesh"]


def test_every_module_of_the_core_has_its_place():
    packages = {"vdpp_core", "vdpp_core.assets"}  # their __init__ holds nothing or only names from below
    assert {name for name in SOURCES if name.startswith("vdpp_core")} == packages | set(LAYER)


def test_the_core_imports_downwards():
    upwards = [
        f"{name} imports {used.module}"
        for name in LAYER
        for used in IMPORTS[name]
        if LAYER.get(used.module, -1) > LAYER[name]
    ]
    assert upwards == []
    assert {used.module for used in IMPORTS["vdpp_core"] if used.on_import} <= LAYERS[0] | {"typing"}
    assert [used.module for used in IMPORTS["vdpp_core.assets"]] == []


def test_nothing_goes_round():
    graph = {
        name: {used.module for used in found if used.module in SOURCES and used.on_import and not used.for_types}
        for name, found in IMPORTS.items()
    }
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("name", sorted(WITHOUT_RANKS))
def test_what_reads_results_needs_no_ranks(name):
    found = IMPORTS[f"vdpp_core.{name}"]
    needed = [used for used in found if used.module in OF_A_RANK or used.module.startswith("torch.distributed")]
    assert [used for used in needed if not used.for_types] == ([MESH] if name == "layout" else [])


def test_plots_draw_what_they_are_given():
    ours = {used.module for used in IMPORTS["vdpp_core.plots"] if used.module.startswith(PACKAGES)}
    assert ours <= {f"vdpp_core.{name}" for name in ("config", "layout", "metrics", "results", "runfolder", "tables")}


def test_launch_starts_ranks_and_is_none():
    used = {used.module for name, found in IMPORTS.items() if name.startswith("launch") for used in found}
    assert not OF_A_RANK & used


def test_the_core_knows_nothing_of_those_who_use_it():
    for name, found in IMPORTS.items():
        above = {"notebooks", "tests"} | ({"launch"} if name.startswith("vdpp_core") else set())
        assert not {used.module.partition(".")[0] for used in found} & above, name


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
    assert not OF_A_RANK & set(ours.split())
