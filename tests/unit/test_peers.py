"""Peers, side by side: what is compared, the table and its ratios from made-up runs, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pandas as pd
import pytest
import torch
from matplotlib.colors import to_hex

from vdpp_core import ConfigError, Parallel, RunConfig, models
from vdpp_core.__main__ import main
from vdpp_core.compare import peers_report
from vdpp_core.compare.peers import Peers
from vdpp_core.compare.peers_report import OFFICIAL, PEERS, configuration, plan, table, variants
from vdpp_core.config.execution import resolve
from vdpp_core.config.fields import EXAMPLE_IMAGE
from vdpp_core.engine import worker
from vdpp_core.engine.measure import Stopwatch
from vdpp_core.models.stage import Stage
from vdpp_core.models.stand_ins import Inventor, Recorder
from vdpp_core.parallel.rendezvous import Ranks
from vdpp_core.plots import peer_comparison, style
from vdpp_core.runs.run import Run

SECONDS = {  # of each repeat; medians of ratios are not ratios of medians here
    "official pipeline": (10.0, 20.0, 12.0),
    "ours, 1 rank": (11.0, 18.0, 12.0),
    "accelerate": (5.0, 5.0, 4.0),
    "ours, dp 2": (5.0, 6.0, 5.0),
    "GPipe": (8.0, 4.0, 6.0),
    "ours, pp 2": (4.0, 4.0, 6.0),
    "ours, cfg 2": (7.0, 7.0, 7.0),
    "ours, frames 2": (6.0, 9.0, 9.0),
}


@pytest.fixture
def config() -> RunConfig:
    return configuration({"num_samples": 4, "threads": 1}, 2, 2)


@pytest.fixture
def measured(config: RunConfig) -> list[dict[str, Any]]:
    """As `peers.measure` has them, each with what its latents tell."""
    found = []
    for run in plan(variants(config, 2), 3):
        name, different = run.variant.name, run.variant.kind in ("guidance", "frames")
        latencies = [] if name == "GPipe" else [1.0 + run.repeat, 2.0 + run.repeat]
        latents = {"equal_latents": run.repeat if different else 4, "relative_error": 1e-7 * run.repeat * different}
        found.append(
            peers_report.entry(run) | {"makespan_s": SECONDS[name][run.repeat], "latency_s": latencies} | latents
        )
    return found


@pytest.fixture
def rows(measured: list[dict[str, Any]]) -> pd.DataFrame:
    return table(measured, 4).set_index("variant")


def test_each_peer_stands_beside_ours_of_its_kind(config: RunConfig) -> None:
    compared = variants(config, 2)
    assert [variant.name for variant in compared] == list(SECONDS)
    for peer, ours in zip(compared[0:6:2], compared[1:6:2], strict=True):
        assert (peer.ours, ours.ours) == (False, True)
        assert (peer.kind, peer.layout) == (ours.kind, ours.layout)
        assert peer.name == PEERS[ours.kind]


@pytest.mark.parametrize(
    ("ranks", "guidance_scale", "without_peer"),
    [
        (2, 3.0, [Parallel(cfg=2), Parallel(frames=2)]),
        (3, 3.0, [Parallel(cfg=2), Parallel(frames=3)]),
        (4, 3.0, [Parallel(cfg=2), Parallel(frames=4), Parallel(cfg=2, frames=2)]),
        (4, 1.0, [Parallel(frames=4)]),
    ],
)
def test_layouts_without_a_peer(ranks: int, guidance_scale: float, without_peer: list[Parallel]) -> None:
    compared = variants(RunConfig(guidance_scale=guidance_scale), ranks)
    assert [variant.layout for variant in compared[6:]] == without_peer


def test_the_order_is_reversed_every_other_repeat(config: RunConfig) -> None:
    compared = variants(config, 2)
    runs = plan(compared, 3)
    assert [run.variant for run in runs] == [*compared, *reversed(compared), *compared]
    assert [run.run_id for run in runs[:6:5]] == ["000-officialpipeline", "005-ours-pp2"]
    assert Counter(run.repeat for run in runs) == dict.fromkeys(range(3), len(compared))
    assert len({run.run_id for run in runs}) == len(runs)


def test_ratios_are_paired_and_their_medians_taken(rows: pd.DataFrame) -> None:
    pp = rows.loc["ours, pp 2"]
    assert (pp["makespan_s"], pp["makespan_s_least"], pp["makespan_s_greatest"]) == (4, 4, 6)
    assert pp["samples_per_s"] == 1
    assert pp[["of_peer", "of_peer_least", "of_peer_greatest"]].tolist() == [1, 0.5, 1]
    assert pp[["of_official", "of_official_least", "of_official_greatest"]].tolist() == [0.4, 0.2, 0.5]
    assert rows.loc["ours, 1 rank", ["of_peer", "of_official"]].tolist() == [1, 1]
    assert rows.loc["ours, dp 2", "of_peer"] == 1.2
    assert rows["of_peer"].notna().tolist() == [False, True, False, True, False, True, False, False]
    assert rows.loc[OFFICIAL, ["of_official_least", "of_official_greatest"]].tolist() == [1, 1]


def test_latencies_and_latents(rows: pd.DataFrame) -> None:
    assert rows["latency_s"].isna().tolist() == [name == "GPipe" for name in SECONDS]
    assert rows.loc["accelerate", "latency_s"] == 2.5
    assert rows["equal_latents"].tolist() == [4] * 6 + [0] * 2
    assert rows.loc["ours, frames 2", "max_relative_error"] == 2e-7
    assert rows["ranks"].tolist() == [1, 1, 2, 2, 2, 2, 2, 2]


def test_files_and_what_is_printed(config: RunConfig, measured: list[dict[str, Any]], tmp_path: Any) -> None:
    """The latents of all runs but one, which is off by a hundredth, are those of the official pipeline."""
    other = measured[-1]["run_id"]
    for run in measured:
        (tmp_path / run["run_id"] / "latents").mkdir(parents=True)
        for sample in range(4):
            latents = torch.full((1, 4, 2, 1, 1), 1.01 if run["run_id"] == other and sample == 3 else 1.0)
            Run(tmp_path / run["run_id"]).save_latents(sample, latents)
    told = peers_report.facts(config.replace(output_dir=tmp_path), 2, 3)
    peers_report.write(tmp_path, told, measured)
    result = json.loads((tmp_path / "peers.json").read_text())
    assert {"date", "hardware", "versions", "world_size", "config", "rows", "runs"} <= result.keys()
    assert [row["equal_latents"] for row in result["rows"]] == [4] * 7 + [3]
    assert result["rows"][-1]["max_relative_error"] == pytest.approx(0.01, rel=1e-5)
    assert result["rows"][0]["of_peer"] is None
    assert pd.read_csv(tmp_path / "peers.csv")["variant"].tolist() == list(SECONDS)
    assert (tmp_path / "peers.png").stat().st_size > 10_000
    printed = peers_report.shown(tmp_path, as_json=False)
    assert "1.200 (1.000 – 1.250)" in next(line for line in printed.splitlines() if "ours, dp 2" in line)
    assert json.loads(peers_report.shown(tmp_path, as_json=True)) == result


def test_the_figure(rows: pd.DataFrame) -> None:
    figure = peer_comparison.peers(rows.reset_index(), "source")
    assert figure.get_suptitle() == (
        "Our makespan over the peers' on 2 ranks: 1.000 (one rank), 1.200 (data parallel), 1.000 (step pipeline)"
    )
    assert figure.get_supxlabel() == "source"
    left, right = figure.axes
    assert [bar.get_width() for bar in left.patches] == rows["makespan_s"].tolist()
    assert [bool(bar.get_hatch()) for bar in left.patches] == [not ours for ours in rows["ours"]]
    axes = ["1 rank", "1 rank", "dp", "dp", "pp", "pp", "cfg", "frames"]
    assert [to_hex(bar.get_facecolor()).upper() for bar in left.patches] == [style.COLOURS[axis] for axis in axes]
    assert [label.get_text() for label in left.get_yticklabels()] == list(SECONDS)
    assert rows["makespan_s_greatest"].max() <= left.get_xlim()[1]
    low, high = right.get_xlim()
    assert low <= rows["of_peer_least"].min()
    assert rows["of_peer_greatest"].max() <= high


def test_what_all_variants_have_in_common() -> None:
    config = configuration({"total_steps": 5, "seed": None, "fsdp": False}, 3, 1)
    assert (config.total_steps, config.num_samples, config.image, config.save_latents) == (5, 6, EXAMPLE_IMAGE, True)
    assert config.threads is not None
    assert config.parallel is None
    assert configuration({"random_weights": True}, 2, 2).image is None


@pytest.mark.parametrize(
    ("flags", "ranks", "said"),
    [
        ({"pp": "2"}, 2, "--pp 2: not with peers: the layouts follow from the number of ranks"),
        ({"stage_ranks": ("1", "2")}, 3, "--stage-ranks 1 2: not with peers: the layouts follow from the number of"),
        ({"swap": "disk"}, 2, "--swap disk: not with peers: no peer has it"),
        ({"fsdp": True}, 2, "--fsdp True: not with peers: no peer has it"),
        ({"guidance_mode": "sequential"}, 2, "--guidance-mode sequential: not with peers: no peer has it"),
        ({"compare_official": True}, 2, "--compare-official True: not with peers: only denoising is compared"),
        ({"save_latents": False}, 2, "--save-latents False: not with peers: all latents are saved"),
        ({"model_id": "gone", "prompt": "a ball"}, 2, "--model-id gone: not with peers: they are compared on Stable"),
        ({"model": "dummy"}, 2, "--model dummy: the official pipeline needs a spatio-temporal UNet"),
        ({}, 1, "--world-size 1: must be at least 2"),
        ({"total_steps": 3}, 4, "--world-size 4: must be at most total_steps, 3"),
        ({"num_frames": 3}, 4, "--world-size 4: must be at most num_frames, 3"),
        ({"random_weights": True, "image": EXAMPLE_IMAGE}, 2, "--model tiny: has no image encoders"),
        ({"num_samples": 0}, 2, "--num-samples 0: must be greater"),
    ],
)
def test_what_cannot_be_compared(flags: dict[str, Any], ranks: int, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configuration(flags, ranks, ranks)
    assert caught.value.as_flag().startswith(said)
    assert "\n" not in caught.value.as_flag()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("peers --repeats 0", "--repeats 0: must be a whole number from 1"),
        ("peers --repeats few", "--repeats few: must be a whole number from 1"),
        ("peers --world-size 1", "--world-size 1: must be at least 2"),
        ("peers --dp 2", "--dp 2: not with peers"),
        ("peers --output-dir .", "exists already"),
    ],
)
def test_a_mistake_costs_one_line(line: str, said: str, tmp_path: Any, capsys: Any, monkeypatch: Any) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert said in printed.err
    assert printed.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_synthetic_conditioning_of_a_sample_is_the_same_in_every_replica() -> None:
    config, device = RunConfig(random_weights=True, num_samples=4, seed=3), torch.device("cpu")
    unet = models.load(config, device, torch.float32)

    def encoded(samples: range) -> dict[int, torch.Tensor]:
        stage = Stage.around(config, {"unet": unet}, device, torch.float32, Stopwatch(device))
        stage.encode(samples, Recorder(Inventor(config.seed)))
        return {sample: made.answers["vae"][0].latent_dist.mean for sample, made in stage.recording.items()}

    alone, second = encoded(range(4)), encoded(range(1, 4, 2))
    assert all(torch.equal(alone[sample], second[sample]) for sample in second)
    assert not torch.equal(alone[0], alone[1])


def test_the_official_pipeline_without_encoders(tmp_path: Any) -> None:
    """With random weights, too, one rank of the engine and diffusers' own loop give the same latents."""
    flags = {"random_weights": True, "total_steps": 3, "num_frames": 3, "num_samples": 2, "threads": 1, "seed": 4}
    config = configuration(flags, 2, 2)
    official, ours = plan(variants(config, 2), 1)[:2]
    folder = peers_report.prepare(config.replace(output_dir=tmp_path / "peers"), [official])
    alone, theirs = Ranks(0, 1, 0, 1, under_torchrun=False), Run(folder / official.run_id)
    found = Peers(config, resolve(config), torch.device("cpu")).run(theirs, official.variant, alone)
    assert len(found["latency_s"]) == 2
    assert found["makespan_s"] == pytest.approx(sum(found["latency_s"]))
    own = Run(worker.run(peers_report.of_trial(config, folder, ours)))
    assert peers_report.difference(own, theirs, 2) == {"equal_latents": 2, "relative_error": 0}
