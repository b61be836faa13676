"""Peak memory, predicted: against the published figures, and what has to hold for any model."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys

import pytest
import torch

from vdpp_core import ConfigError, Parallel, RunConfig
from vdpp_core.__main__ import main
from vdpp_core.config.execution import DTYPES, resolve
from vdpp_core.parallel.devices import GIB
from vdpp_core.predict import memory, published, replay, trace
from vdpp_core.predict.predictor import Predictor

PUBLISHED = published.figures()["memory_cfg3_28steps_1sample"]
CARD_GIB = 23.68


def medium(**more):
    defaults = {"device": "cpu", "latent_shape": (1, 4, 4, 16, 16), "parallel": Parallel()}
    return RunConfig(model="medium", random_weights=True, **defaults | more)


@pytest.mark.parametrize("row", [row for row in PUBLISHED if row["outcome"] == "ok"], ids=lambda row: row["id"])
def test_the_published_peaks(row):
    assert memory.predict(published.memory_config(row)).total / 1e9 == pytest.approx(row["peak_gb_per_gpu"], rel=0.01)


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row["id"])
def test_the_published_outcomes(row):
    found = memory.fit(published.memory_config(row), CARD_GIB * GIB)
    assert found.fits == (row["outcome"] == "ok")
    if "requested_gib" in row:
        assert found.request / GIB == pytest.approx(row["requested_gib"], abs=0.005)


def test_the_documents_tensor_that_could_not_be_decoded():
    """7.88 GiB for 14 frames at once; the peak is several of them."""
    video = RunConfig(model="svd", random_weights=True, device="cuda", latent_shape=(1, 4, 14, 72, 128))
    at_once = memory.predict_decoding(video.replace(decode_chunk_size=14))
    by_four = memory.predict_decoding(video.replace(decode_chunk_size=4))
    tensor = 256 * 14 * 576 * 1024 * 4
    assert tensor / GIB == pytest.approx(7.88, abs=0.01)
    assert at_once.total > 3 * tensor
    assert by_four.total == pytest.approx(at_once.total * 4 / 14, rel=0.05)
    assert memory.predict_decoding(medium()) is None


def test_the_parts():
    whole, sharded = memory.predict(medium()), memory.predict(medium(parallel=Parallel(dp=3, fsdp=True)))
    assert whole.total == whole.parameters + whole.activations + whole.gathered + whole.latents
    assert whole.parameters == pytest.approx(136.65e6 * 4, rel=1e-3)
    assert whole.gathered == 0
    assert sharded.parameters == pytest.approx(whole.parameters / 3, rel=0.01)
    assert sharded.largest_unit.shard(1) < sharded.gathered < 4 * sharded.largest_unit.shard(1)
    assert whole.layer.startswith("up_blocks.3")


@pytest.mark.parametrize(("change", "least", "most"), [
    # a little less than half: with a batch of one, diffusers' context for the temporal layers is a view
    ({"guidance_mode": "sequential"}, 0.45, 0.5),
    ({"guidance_scale": 1.0}, 0.45, 0.5),
    ({"forward_chunking": True}, 0.3, 0.7),
    ({"latent_shape": (1, 4, 8, 16, 16)}, 1.95, 2.05),
    ({"latent_shape": (2, 4, 4, 16, 16)}, 1.95, 2.05),
    ({"latent_shape": (1, 4, 4, 32, 16)}, 1.95, 2.05),
    ({"dtype": "bf16"}, 0.49, 0.52),
    ({"parallel": Parallel(pp=4)}, 1, 1),
    ({"parallel": Parallel(dp=4)}, 1, 1),
])  # fmt: skip
def test_what_activations_depend_on(change, least, most):
    ratio = memory.predict(medium(**change)).activations / memory.predict(medium()).activations
    assert least <= ratio <= most


def test_more_samples_need_no_more_memory():
    """What the encoders returned for them is in host memory."""
    assert memory.predict(medium(num_samples=101)) == memory.predict(medium(num_samples=1))


def test_a_chunk_that_can_be_decoded():
    config = RunConfig(device="cuda", latent_shape=(1, 4, 25, 32, 32), decode_chunk_size=25, parallel=Parallel())
    facts = memory.report(config, 1.4)
    assert facts["fits"]
    assert facts["decode_chunk_size_that_fits"] == 6
    assert memory.report(config, 30)["decode_chunk_size_that_fits"] == 25
    assert memory.report(medium(), 30)["decode_chunk_size_that_fits"] is None


def test_sharded_steps_leave_nothing_behind():
    steps = trace.step(memory.alike(medium(device="cuda")), torch.float16)
    end = replay.play(steps, 3, offload=False, capacity=math.inf)
    kept = steps.parameters.shard(3) + steps.units[0].shard(1)
    assert kept < end.allocated < 1.02 * kept


@pytest.mark.parametrize("change", [
    {}, {"parallel": Parallel(cfg=2, frames=2), "shortcuts": True}, {"dtype": "bf16", "latent_shape": (2, 4, 5, 9, 16)},
])  # fmt: skip
def test_what_is_remembered_of_operators_is_what_they_give(change, monkeypatch):
    config = memory.alike(RunConfig(device="cpu", latent_shape=(1, 4, 5, 8, 8), parallel=Parallel()).replace(**change))

    def traces():
        whole = DTYPES[change.get("dtype", "fp32")]
        return trace.step.__wrapped__(config, whole), trace.decoding.__wrapped__(config, whole)

    monkeypatch.setattr(trace.Remembering, "known", {})
    for_the_first_time = traces()
    assert len(trace.Remembering.known) > 100
    monkeypatch.setattr(trace, "MOST_REMEMBERED", 0)
    again = traces()
    assert len(trace.Remembering.known) > 100  # nothing that looks new
    monkeypatch.setattr(trace.Remembering, "known", {})
    forgetting = traces()
    assert len(trace.Remembering.known) == 1
    monkeypatch.setattr(
        trace.Remembering, "__torch_dispatch__", lambda _, func, types, args, kw: func(*args, **kw or {})
    )
    assert for_the_first_time == again == forgetting == traces()


def test_what_would_make_it_fit_does():
    config = RunConfig(device="cuda", latent_shape=(1, 4, 24, 32, 32), parallel=Parallel())
    both = config.replace(enable_memory_opt=True)
    capacity = memory.needed(both)
    found = memory.remedies(config, capacity)
    assert found[0] == "--enable-memory-opt (both)"
    for alone in ({"guidance_mode": "sequential"}, {"forward_chunking": True}):
        assert not memory.fit(config.replace(**alone), capacity).fits
    frames = int(found[-1].split()[0])
    assert 1 < frames < 24
    assert memory.fit(config.replace(latent_shape=(1, 4, frames, 32, 32)), capacity).fits
    assert not memory.fit(config.replace(latent_shape=(1, 4, frames + 2, 32, 32)), capacity).fits


def test_what_would_have_brought_the_documents_hardest_row_back():
    found = memory.remedies(published.memory_config(PUBLISHED[3]), CARD_GIB * GIB)
    assert found[0] == "--forward-chunking"
    assert "--frames 2 on 2 ranks" in found


@pytest.mark.parametrize("shape", [(1, 4, 5, 8, 8), (2, 4, 14, 40, 72), (1, 4, 50, 9, 16)])
@pytest.mark.parametrize("model", ["tiny", "dummy"])
def test_the_bound_for_the_small_models(model, shape):
    config = RunConfig(model=model, latent_shape=shape, parallel=Parallel(), num_samples=3)
    assert memory.predict(config).total < memory._at_most(config)
    if model == "tiny":
        for chunk in (1, 4, 100):
            video = RunConfig(command="generate", latent_shape=shape, parallel=Parallel(), decode_chunk_size=chunk)
            assert memory.predict_decoding(video).total < memory._at_most(video)


@pytest.mark.parametrize(
    ("capacity", "allowed"),
    [
        *((capacity, "must be finite and above 0, at most 1e+06") for capacity in (0, -1, math.nan, math.inf)),
        (0.4, "must be above the parameters of a rank, 0.509 GiB"),
    ],
)
def test_a_capacity_that_cannot_be(capacity, allowed):
    with pytest.raises(ConfigError) as caught:
        memory.report(medium(), capacity)
    assert str(caught.value) == f"capacity_gib {capacity}: {allowed}"


def test_videos_have_to_be_decoded_too():
    """The second phase of generate: more than the steps need, unless the chunks are small."""
    video = RunConfig(command="generate", device="cuda", latent_shape=(1, 4, 25, 32, 32))
    at_once, card = video.replace(decode_chunk_size=25), 1.4 * GIB
    assert memory.predict(video).total < memory.predict_decoding(at_once).total / 10
    assert memory.fit(video, card).fits
    assert not memory.fit(at_once, card).fits
    assert memory.needed(at_once) > memory.predict_decoding(at_once).total + memory.CONTEXT_GIB * GIB
    assert "--decode-chunk-size 1" in memory.remedies(at_once, card)


AS_READY = RunConfig(command="generate", decode="as-ready", device="cuda", latent_shape=(1, 4, 14, 32, 32))


@pytest.mark.parametrize("shards", [1, 4])
def test_a_last_stage_that_decodes_holds_both_models(shards):
    config = AS_READY.replace(parallel=Parallel(dp=shards, fsdp=True) if shards > 1 else Parallel(pp=2))
    apart = config.replace(decode="at-end")
    denoising, decoding, both = memory.predict(apart), memory.predict_decoding(apart), memory.predict(config)
    assert both.parameters == denoising.parameters + decoding.parameters
    assert both.activations == pytest.approx(max(denoising.activations, decoding.activations), rel=1e-3)
    rest = both.total - both.parameters - both.activations  # conditioning, latents, and the root of a shard group
    assert 0 < rest < 0.1 * both.total
    assert memory.predict_decoding(config) == both
    assert memory.needed(config) > memory.needed(apart) + min(denoising.parameters, decoding.parameters)


def test_chunks_decide_between_denoising_and_decoding():
    """The more frames at once, the more likely decoding is the peak."""
    one, many = (memory.predict(AS_READY.replace(decode_chunk_size=chunk)) for chunk in (1, 14))
    assert (one.layer.startswith("decoder."), many.layer.startswith("decoder.")) == (False, True)
    between = memory.needed(AS_READY.replace(decode_chunk_size=1)) + GIB / 10
    facts = memory.report(AS_READY.replace(decode_chunk_size=14, parallel=Parallel()), between / GIB)
    assert not facts["fits"]
    assert "--decode-chunk-size 1" in facts["remedies"]
    assert 1 <= facts["decode_chunk_size_that_fits"] < 14
    assert facts["other_stages_peak_gb"] < facts["peak_gb"]


def test_a_predictor_tells_decoding_apart():
    predictor = Predictor()
    found = {predictor.room(AS_READY.replace(decode=mode, parallel=Parallel())).peak for mode in ("as-ready", "at-end")}
    assert len(found) == 2


def test_the_command_with_decoding(capsys):
    main(["memory", "--decode", "as-ready", "--capacity-gib", "0.15", "--decode-chunk-size", "14", "--device", "cpu"])
    said = capsys.readouterr().out
    assert re.search(r"peak  .* GB on the last stage\n  peak in  .* decoder\.", said)
    assert all(len(line) <= 100 for line in said.splitlines())
    assert "decodes between its samples, 14 frames at a time, beside the UNet" in said
    assert "does not fit in 0.16 GB (0.15 GiB): the last stage needs" in said
    assert "the last stage would fit with --decode at-end" in said


def before_start(config, local_ranks):
    return memory.before_start(config, resolve(config, local_ranks))


def test_what_is_said_before_a_start():
    assert before_start(RunConfig(parallel=Parallel(pp=2), device="cpu"), 2) == []
    (alone,) = before_start(RunConfig(parallel=Parallel(fsdp=True), device="cpu"), 1)
    assert "saves no memory" in alone
    (narrow,) = before_start(medium(memory_limit_gib=0.52), 1)
    assert narrow.startswith("1 rank: will probably run out of memory: a rank needs 0.61 GiB and has 0.52 GiB")
    assert before_start(medium(memory_limit_gib=0.52, parallel=Parallel(dp=2, fsdp=True)), 2) == []
    with pytest.raises(ConfigError) as caught:
        before_start(medium(memory_limit_gib=0.5), 1)
    assert str(caught.value) == "memory_limit_gib 0.5: must be above the parameters of a rank, 0.509 GiB"


def test_a_limit_on_cuda_is_the_allocators():
    """The context comes on top of it."""
    row = published.memory_config(PUBLISHED[1])
    allocators = memory.needed(row) / GIB - memory.CONTEXT_GIB
    assert before_start(row.replace(memory_limit_gib=allocators + 0.02), 1) == []
    (line,) = before_start(row.replace(memory_limit_gib=allocators - 0.2), 1)
    assert f"a rank needs {allocators:.2f} GiB and has {allocators - 0.2:.2f} GiB" in line


def command(*arguments):
    line = [sys.executable, "-m", "vdpp_core", "memory", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=120)


def test_the_command(capsys):
    shape = ["--latent-shape", "1", "4", "25", "160", "288"]
    published = ["--model", "svd", *shape, "--dtype", "fp16", "--guidance-mode", "sequential"]
    main(["memory", *published, "--fsdp", "--world-size", "7", "--capacity-gib", "23.68"])
    said = capsys.readouterr().out
    for words in (
        "dp 7 × fsdp",
        "20.455 GB per rank",
        "down_blocks.2.attentions.0, 0.201 GB",
        "fits in 25.43 GB (23.68 GiB) with --decode-chunk-size",
    ):
        assert words in said


def test_the_verdict_counts_the_decoding(capsys):
    main(["memory", "--model", "svd", "--capacity-gib", "9", "--decode-chunk-size", "14"])
    said = capsys.readouterr().out
    (verdict,) = (line for line in said.splitlines() if "9.66 GB (9 GiB)" in line)
    assert verdict.startswith("  fits in 9.66 GB (9 GiB) with --decode-chunk-size ")
    assert "decoding 14 frames at a time needs more than there is" in " ".join(said.split())
    assert "does not fit" not in said


def test_the_command_for_programs(capsys):
    main(["memory", "--capacity-gib", "0.72", "--json"])
    facts = json.loads(capsys.readouterr().out)
    parts = {"parameters_gb", "activations_gb", "gathered_gb", "latents_gb"}
    assert facts["peak_gb"] == pytest.approx(sum(facts[part] for part in parts))
    assert facts["fits"] is False
    assert facts["needed_gib"] > 0.72


def test_the_command_takes_a_limit_as_the_device_that_it_plays(capsys):
    for device, outside in (("cuda", memory.CONTEXT_GIB), ("cpu", 0)):
        main(["memory", "--memory-limit-gib", "0.5", "--device", device, "--json"])
        assert json.loads(capsys.readouterr().out)["capacity_gib"] == pytest.approx(0.5 + outside)


def test_the_command_with_a_model_that_is_not_there(tmp_path):
    done = command("--model-id", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith(f"error: --model-id {tmp_path}: must be a pipeline's folder")


@pytest.mark.parametrize(("ranks", "most"), [(2, 0.58), (4, 0.33)])
def test_frames_share_out_the_activations(ranks, most):
    """Of the documents' hardest row, and of the model that is measured in tests/benchmarks/latency.py."""
    hardest = published.memory_config(PUBLISHED[3])
    for config in (hardest, medium(latent_shape=(1, 4, 12, 24, 24))):
        alone, split = (
            memory.predict(config.replace(parallel=Parallel(frames=number))).activations for number in (1, ranks)
        )
        assert split / alone <= most


def test_the_hardest_row_on_seven_cards_by_frames():
    hardest = published.memory_config(PUBLISHED[3])
    split = memory.predict(hardest.replace(parallel=Parallel(frames=7)))
    sharded = memory.predict(hardest.replace(parallel=Parallel(frames=7, fsdp=True)))
    assert split.total / GIB == pytest.approx(5.8, abs=0.1)
    assert sharded.total / GIB == pytest.approx(3.4, abs=0.1)
    assert memory.fit(hardest.replace(parallel=Parallel(frames=7)), CARD_GIB * GIB).fits


def test_each_rank_has_one_pass_with_cfg_2():
    alone, split = (memory.predict(medium(parallel=Parallel(cfg=size))).activations for size in (1, 2))
    assert split / alone == pytest.approx(0.5, abs=0.03)
    assert split == pytest.approx(memory.predict(medium(guidance_mode="sequential")).activations, rel=0.03)
