"""Predictions for pipelines other than Stable Video Diffusion: memory, operations and hand-offs."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers.models.unets.unet_motion_model import UNetMotionOutput

from tests.families import FAMILIES, WIDTH, folder
from vdpp_core import Parallel, RunConfig, models
from vdpp_core.config.errors import ConfigError
from vdpp_core.engine import preflight
from vdpp_core.models import pipelines
from vdpp_core.models.message import Packing
from vdpp_core.models.stage import NoClock, Stage
from vdpp_core.models.stand_ins import Inventor, Recorder
from vdpp_core.predict import costs, memory, messages, planner, rates, trace
from vdpp_core.predict.rates import Link, Rates

STEPS = 5


def config_of(name, solver=None, **changes):
    of_run = ("prompt", "negative_prompt", "num_frames", "height", "width")
    given = {key: value for key, value in FAMILIES[name].call.items() if key in of_run}
    call = {key: value for key, value in FAMILIES[name].call.items() if key not in of_run} | changes.pop("call", {})
    config = RunConfig(model_id=str(folder(name, solver)), device="cpu", total_steps=STEPS, call=call, **given)
    config = config.replace(**changes)
    return preflight.complete(config, (config.parallel or Parallel()).world_size)


def parameters_of(config):
    found = models.denoisers_on_meta(config, torch.float32).values()
    return sum(parameter.nbytes for denoiser in found for parameter in denoiser.parameters())


@pytest.mark.parametrize("name", ["wan", "wan-2.2", "animatediff", "cogvideox", "ltx", "hunyuan-video"])
def test_a_step_is_traced(name):
    config = config_of(name)
    predicted = memory.predict(config)
    assert predicted.parameters == costs.parameters(config) == parameters_of(config)
    assert predicted.activations > 0
    assert memory.needed(config) > predicted.total
    assert memory.fit(config, memory.needed(config)).fits
    assert memory.predict_decoding(config) is None
    whole = trace.step(memory.alike(config), torch.float32)
    assert sum(unit.shard(1) for unit in whole.units) == predicted.parameters
    freed = {event.key for event in whole.events if event.what == "free"}
    assert freed < {event.key for event in whole.events if event.what == "alloc"}


def test_both_denoisers_are_resident_but_one_computes():
    one, both = config_of("wan"), config_of("wan-2.2")
    assert memory.predict(both).parameters == 2 * memory.predict(one).parameters
    assert costs.cost(both).flops == costs.cost(one).flops
    # at the boundary, the rotary tables of both are there
    assert memory.predict(both).activations == pytest.approx(memory.predict(one).activations, rel=0.02)


@pytest.mark.parametrize("name", ["wan", "ltx", "animatediff"])
def test_a_rank_computes_one_pass_of_the_guidance(name):
    guided = costs.cost(config_of(name, parallel=Parallel(cfg=2)))
    assert (guided.flops, guided.exchanges) == (costs.cost(config_of(name)).flops / 2, 1)


def test_a_denoiser_that_is_called_twice_counts_twice():
    guided, unguided = (config_of("wan", call={"guidance_scale": scale}) for scale in (6.0, 1.0))
    assert costs.cost(guided).flops == 2 * costs.cost(unguided).flops
    kept = memory.predict(guided).latents - memory.predict(unguided).latents
    text = 512 * WIDTH * 4  # of the other pass, which the pipeline and its call each hold
    assert kept == messages.of(guided).latents + 2 * text  # and an earlier call's prediction


@pytest.mark.parametrize(("name", "share"), [("animatediff", 0.5), ("wan", 1)])  # Wan's are calls of their own
def test_passes_one_after_the_other_need_less(name, share):
    config = config_of(name)
    found = memory.predict(config.replace(guidance_mode="sequential")).activations
    assert found == pytest.approx(share * memory.predict(config).activations, rel=0.1)


def test_prompts_of_a_manifest_are_predicted_as_one_beside_the_text_encoder(tmp_path):
    table = tmp_path / "jobs.csv"
    table.write_text('prompt\n"a red ball rolls."\ntwo boats\n')
    config = config_of("wan", command="generate", prompt=None, manifest=table, parallel=Parallel(pp=2))
    many, one = memory.predict(config), memory.predict(config_of("wan", parallel=Parallel(pp=2)))
    encoder = pipelines.shells(config.of_sample(0))["text_encoder"]
    assert many.parameters - one.parameters == 4 * sum(each.numel() for each in encoder.parameters())
    assert many.total - many.parameters == one.total - one.parameters
    assert messages.largest(config) == messages.largest(config_of("wan", parallel=Parallel(pp=2)))


def test_more_frames_need_more():
    few, many = (config_of("animatediff", num_frames=frames) for frames in (4, 8))
    assert costs.cost(many).flops > 1.9 * costs.cost(few).flops
    assert memory.predict(many).total > memory.predict(few).total


@pytest.mark.parametrize("name", ["animatediff", "text-to-video", "wan", "ltx"])
def test_split_frames_or_tokens_share_out_operations_and_memory(name):
    alone, split = (config_of(name, parallel=Parallel(frames=ranks)) for ranks in (1, 2))
    assert costs.cost(alone).flops / 2 < costs.cost(split).flops < costs.cost(alone).flops
    assert memory.predict(split).activations < memory.predict(alone).activations
    assert memory.predict(split).parameters == memory.predict(alone).parameters


@pytest.mark.parametrize("name", ["animatediff", "text-to-video"])
def test_a_rank_between_two_others_sends_most(name):
    config = config_of(name, parallel=Parallel(frames=3))
    most, members = costs.cost(config).sent, [costs.cost(config, member).sent for member in range(3)]
    assert sum(most.values()) == max(sum(sent.values()) for sent in members)


@pytest.mark.parametrize("name", ["wan", "ltx"])
def test_bytes_of_split_tokens_are_those_of_the_formula(name):
    """All-to-alls of queries, keys, values and results in each self-attention, and an all-gather of the prediction."""
    config = config_of(name, parallel=Parallel(frames=2))
    model = models.denoisers_on_meta(config, torch.float32)["transformer"]
    tokens = config.shape[1] if name == "ltx" else math.prod(config.shape[2:]) // math.prod(model.config.patch_size)
    value = 2 * tokens * 4  # bytes of one channel of all tokens, in both passes of the guidance
    width = model.config.num_attention_heads * model.config.attention_head_dim
    assert costs.sent_by_all(config) == {
        "positions": 4 * value * width * model.config.num_layers // 2,
        "prediction": value * model.proj_out.out_features,
    }


@pytest.mark.parametrize(
    ("name", "solver"),
    [("animatediff", solver) for solver in FAMILIES["animatediff"].solvers]
    + [("cogvideox", "CogVideoXDPMScheduler"), ("ltx", None), ("wan", None)],
)
def test_the_bytes_of_a_hand_off(name, solver):
    config = config_of(name, solver, parallel=Parallel(pp=3))
    stage = Stage.around(
        config, models.denoisers_on_meta(config, torch.float32), torch.device("cpu"), torch.float32, NoClock()
    )
    stage.encode([0], Recorder(Inventor(0)))
    like = torch.zeros(2 if name != "wan" else 1, *config.shape[1:])
    form = UNetMotionOutput(sample=like) if name == "animatediff" else (like,)
    rehearsed = [stage.rehearse(0, range(steps.stop), form) for steps in config.stages()[:-1]]
    expected = [Packing(message, stage.solver.name).size for message in rehearsed]
    found = messages.of(config)
    assert messages.per_stage(config) == expected
    assert messages.largest(config) == max(expected)
    assert found.solver == type(stage.pipeline.scheduler).__name__
    assert found.latents == like[:1].nbytes <= min(found.after)
    assert rates.hop_s(config, Rates(1e9, Link(1e6))) == pytest.approx(max(expected) / 1e6)


def test_a_plan_of_a_family():
    config = config_of("wan").replace(num_samples=2)
    table = planner.advise(config, 2, "throughput", Rates(1e9, Link(1e9)))
    assert set(table["layout"][table["place"].notna()]) >= {"1 rank", "pp 2", "dp 2", "cfg 2", "frames 2"}
    assert "each rank computes 1/2 of the frames or tokens" in " ".join(table["reason"])


def test_what_a_pipeline_does_not_support_is_one_line():
    config = config_of("wan", call={"guidance_scale": 1.0}).replace(parallel=Parallel(cfg=2))  # there is one pass
    with pytest.raises(ConfigError, match="cannot be predicted on cfg 2") as raised:
        memory.predict(config)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"guidance_scale": 7.0}, "only for Stable Video Diffusion, not WanPipeline: use --call guidance_scale=7.0"),
        ({"motion_bucket_id": 9}, "only for Stable Video Diffusion, not WanPipeline"),
        ({"forward_chunking": True}, "only for Stable Video Diffusion, not WanPipeline"),
    ],
)
def test_arguments_without_effect_are_refused(given, words):
    with pytest.raises(ConfigError, match=f"{words}$"):
        config_of("wan", **given)


def test_tensors_that_stand_for_others_are_not_counted():
    recorder = trace._Recorder([], torch.device("cpu"))
    with recorder:
        host = torch.ones(4)
        meta = torch.empty(4, device="meta")
    assert [event.size for event in recorder.events] == [16, 16]
    other = torch.empty(8, device="meta")
    recorder.leave_out(other)
    with recorder:
        view = other[:2]
    assert len(recorder.events) == 2
    del host, meta, other, view
    assert [event.what for event in recorder.events] == ["alloc", "alloc", "free", "free"]
