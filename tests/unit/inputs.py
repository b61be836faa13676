"""What people and programs pass in, well meant or not, for the fuzz tests: values, configurations, command lines."""

from __future__ import annotations

import json
import string
from typing import Any

from hypothesis import strategies as st

from vdpp_core.config import RunConfig
from vdpp_core.config.axes import AXIS_NAMES
from vdpp_core.config.fields import EXAMPLE_IMAGE
from vdpp_core.runs.event_types import Event, parse

FIELDS = list(RunConfig.model_fields)
NUMBERS = ["0", "1", "2", "3", "4", "16", "-1", "4096", "4097", "1.5", "-0", "+1", "1_0", "٣", "²", "0x10", "1e3"]
NUMBERS += ["nan", "inf", "-inf", "1e308", "1e400", "1e-320", str(2**31), str(2**63), str(10**30), "9" * 5000]
WORDS = ["", " ", "-", "--", "'", "a b", "one\ntwo", "\t", "é×–", "\ud800", "\udcff", "a\0b", "\x1b[31m", "%s", "{0}"]
WORDS += ["$(touch bad)", "; touch bad", "`touch bad`", "<script>alert(1)</script>", "null", "True", "None", "x" * 5000]
PATHS = [".", "..", "../..", "/", "//", "~", "file", "folder", "file/below", "nowhere", "nowhere/at/all", "/dev/null/x"]
PATHS += ["../" * 50 + "dev/null", "folder/" + "x" * 300, "damaged", "empty", "run", str(EXAMPLE_IMAGE), "sweep"]
NASTY = NUMBERS + WORDS + PATHS

GOOD: dict[str, list[Any]] = {
    "command": ["simulate", "benchmark", "generate"],
    "model": ["dummy", "tiny", "tiny", "medium", "svd"],
    "model_id": [None, "folder", "some/model", "nowhere"],
    "total_steps": [1, 2, 4, 28, 10_000],
    "num_samples": [1, 2, 7, 100_000],
    "warmup_samples": [0, 1, 1_000],
    "seed": [0, 2**62],
    "latent_shape": [(1, 4, 14, 8, 8), ("1", "4", "8", "32", "32")],
    "num_frames": [1, 2, 14],
    "height": [64],
    "width": [64],
    "image": [EXAMPLE_IMAGE, "file", "folder"],
    "guidance_scale": [0, 1, 3.5, 1e3],
    "min_guidance_scale": [0, 1, 3],
    "fps": [1, 7, 240],
    "motion_bucket_id": [0, 255],
    "noise_aug_strength": [0, 0.02],
    "decode_chunk_size": [1, 1_000],
    "stage_weights": [(1,), (1, 2), ("1", "1e-300")],
    "stage_ranks": [(1, 1), (1, 2), ("1", "3")],
    "split": ["boundary", "even", "weights"],
    "experts": [(("unet/high", 1), ("unet/low", 1))],
    "swap": ["host", "disk"],
    "swap_batch": [1, 2, 100_000],
    "swap_gb_per_s": [1e-6, 1.5],
    "device": ["auto", "cpu", "cuda", "mps", "cuda:0"],
    "dtype": ["auto", "fp32", "fp16", "bf16"],
    "backend": ["auto", "gloo", "nccl"],
    "threads": [1, 1_024],
    "guidance_mode": ["batched", "sequential"],
    "memory_limit_gib": [0.001, 1.5, 1e5],
    "timeout_s": [1, 86_400],
    "output_dir": ["new", "new/below", "folder", "file"],
    "parallel": [
        *(None, {}, {"dp": 2}, {"pp": 2}, {"stage_ranks": (1, 2)}, {"cfg": 2, "frames": 2}, {"dp": 2, "fsdp": True}),
    ],
    **{axis: [1, 2, 4] for axis in AXIS_NAMES},
    "world_size": [1, 2, 4],
}

_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**30, -(10**30), 10**4000]),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(NASTY),
)


def as_event(facts: dict[str, Any]) -> Event:
    """The event that a rank would write as this object."""
    event = parse(json.dumps(facts).encode())
    assert event is not None, facts
    return event


json_like = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)


def _either(good: list[Any], bad: Any) -> Any:
    """Three of four are what was meant, so that what comes after a first check is reached, too."""
    return st.sampled_from([True, True, True, False]).flatmap(lambda well: st.sampled_from(good) if well else bad)


layouts = st.dictionaries(st.sampled_from([*AXIS_NAMES, "fsdp", "stage_ranks", "ep", "self"]), json_like, max_size=3)


def _value(name: str) -> Any:
    bad = json_like | layouts if name == "parallel" else json_like
    return _either(GOOD.get(name, [True, False]), bad)


@st.composite
def configurations(draw: Any) -> dict[str, Any]:
    """The arguments of a RunConfig; some names are none of its fields."""
    names = draw(st.lists(st.sampled_from([*FIELDS, "self", "data", "", "batch_size"]), max_size=6, unique=True))
    return {name: draw(_value(name)) for name in names}


def _flags(names: list[str], extra: dict[str, list[Any]], switches: tuple[str, ...]) -> Any:
    """Up to five flags: as they are meant, with a nasty value, without one, glued with =, or something else."""
    texts = st.sampled_from(NASTY) | st.text(string.printable, max_size=8)

    @st.composite
    def one(draw: Any) -> list[str]:
        name = draw(st.sampled_from(names))
        flag = f"--{name.replace('_', '-')}"
        good = extra.get(name, GOOD.get(name, []))
        if not good and draw(st.integers(0, 9)):
            return [draw(st.sampled_from([flag, *([f"--no-{flag[2:]}"] * (name not in switches))]))]
        kind = draw(st.integers(0, 19))
        if kind == 0:
            return [flag]
        if kind == 1:
            return [draw(texts)]
        value = draw(_either([str(value) if not isinstance(value, tuple) else value for value in good] or [""], texts))
        if isinstance(value, tuple):
            return [flag, *map(str, value[: 4 if kind == 2 else None])]
        return [f"{flag}={value}"] if kind < 6 else [flag, value]

    return st.lists(one(), max_size=5).map(lambda parts: [word for part in parts for word in part])


RUN_NAMES = [name for name in FIELDS if name not in ("command", "parallel", "experts")]
RUN_NAMES += [*AXIS_NAMES, "fsdp", "stage_ranks", "json"]
SWITCHES = ("fsdp", "json", "poisson")
PLAN = {
    "gpus": ["1", "2"],
    "capacity_gib": ["0.1", "24"],
    "goal": ["latency", "throughput", "cadence", "memory"],
    "calibrate": ["published", "run", "damaged", "empty", "folder"],
    "tflops": ["1", "1e9"],
    "link_gb_per_s": ["1", "1e-9"],
    "link_us": ["0", "10"],
    "every_s": ["0", "1"],
    "top": ["1"],
}
_run_flags = _flags([*RUN_NAMES, "world_size"], {}, SWITCHES)
_texts = st.sampled_from(NASTY) | st.text(max_size=12)
_runs = _either(["run"], st.sampled_from(["damaged", "empty", "sweep", "failed", "nowhere"]) | _texts)

FITTING = ["total_steps", "warmup_samples", "seed", "guidance_scale", "fps", "motion_bucket_id", "timeout_s", "threads"]

core_lines = st.one_of(
    st.tuples(st.sampled_from(["simulate", "benchmark", "generate"]), _run_flags),
    st.tuples(st.sampled_from(["simulate", "benchmark", "generate"]), _flags(FITTING, {}, ())),
    st.tuples(st.just("memory"), _flags([*RUN_NAMES, "world_size", "capacity_gib"], PLAN, SWITCHES)),
    st.tuples(st.just("plan"), _flags([*RUN_NAMES, *PLAN, "poisson"], PLAN, SWITCHES)).map(
        lambda line: (line[0], ["--gpus", "2", *line[1]])
    ),
    st.tuples(st.just("plan"), _flags([*PLAN, "poisson"], PLAN, SWITCHES)),
    st.tuples(st.just("plan"), _flags(["capacity_gib", "goal", "link_us", "top"], PLAN, SWITCHES)).map(
        lambda line: (line[0], ["--gpus", "2", "--model", "dummy", *line[1]])
    ),
    st.tuples(st.just("peers"), _flags([*RUN_NAMES, "world_size", "repeats"], {"repeats": ["1", "3"]}, SWITCHES)),
    st.tuples(st.just("run"), st.lists(_runs, max_size=3)),
    st.tuples(_texts, _run_flags),
).map(lambda line: [line[0], *line[1]])
START = {"nproc": ["1", "2"], "ranks": ["1", "1,2"], "layouts": ["pp", "dp,fsdp", "cfg"], "repeats": ["1", "2"]}
NODES = START | {"nnodes": ["2"], "rdzv_endpoint": ["localhost:29400", "10.0.0.1"], "rdzv_id": ["new-run"]}
TRACE = {"output": ["trace.json", "nowhere/trace.json"]}
REPORT = {"set": ["total_steps=4", "num_samples=2", "total_steps", "total_steps='4'", "nothing=1", "goal=x"]}
_books = st.lists(st.sampled_from(["01", "06_lab", "nothing"]) | _texts, max_size=2)
TAIL = {"rank": ["0", "1"], "lines": ["1", "20"]}


def _around(flags: Any) -> Any:
    """Flags of the action, a command, its flags."""
    return st.tuples(flags, st.sampled_from(["simulate", "benchmark", "generate", "", "dream"]), _run_flags).map(
        lambda parts: [*parts[0], parts[1], *parts[2]]
    )


_nodes = _flags(["nproc", "nnodes", "rdzv_endpoint", "rdzv_id"], NODES, SWITCHES)
launch_lines = st.one_of(
    st.tuples(st.just("start"), _around(_flags(["nproc"], START, SWITCHES))),
    st.tuples(st.just("start"), _around(_nodes)),
    st.tuples(st.just("resume"), st.tuples(_runs, _nodes).map(lambda p: [p[0], *p[1]])),
    st.tuples(st.just("sweep"), _around(_flags(["ranks", "layouts", "repeats"], START, SWITCHES))),
    st.tuples(st.just("sweep"), _around(_flags(["layouts", "repeats"], START, SWITCHES))).map(
        lambda line: (line[0], ["--ranks", "1,2", *line[1]])
    ),
    st.tuples(st.just("status"), _flags(["json"], {}, SWITCHES) | st.lists(_runs, max_size=2)),
    st.tuples(st.just("tail"), st.tuples(_runs, _flags(["rank", "lines"], TAIL, ())).map(lambda p: [p[0], *p[1]])),
    st.tuples(st.sampled_from(["stop", "resume", "trace"]), st.lists(_runs, max_size=2)),
    st.tuples(st.just("trace"), st.tuples(_runs, _flags(["output"], TRACE, ())).map(lambda p: [p[0], *p[1]])),
    st.tuples(st.just("report"), st.tuples(_books, _flags(["set"], REPORT, ())).map(lambda p: [*p[0], *p[1]])),
    st.tuples(_texts, st.lists(_runs, max_size=2)),
).map(lambda line: [line[0], *line[1]])
