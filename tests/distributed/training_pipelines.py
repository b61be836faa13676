"""Small models trained by pipelines of forked ranks; rank 0 prints JSON.

python -m tests.distributed.forked N tests.distributed.training_pipelines CASE…
with each CASE the JSON of an Experiment's arguments, and "cut" for the last layer of each stage.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from vdpp_core.lessons import bubbles, inference, pipelines, problems, rank
from vdpp_core.lessons.experiments import Experiment
from vdpp_core.lessons.layers import counted, cut, hop_bytes
from vdpp_core.lessons.measure import Span
from vdpp_core.lessons.problems import SVDProblem, TransformerProblem
from vdpp_core.lessons.techniques import technique

SMALL = {
    "transformer": TransformerProblem(hidden=32, layers=8, heads=2, sequence=8, vocabulary=32),
    "svd": SVDProblem(frames=2, clips=2),
}


def of_pipeline(experiment: Experiment) -> dict[str, Any]:
    """What the ranks found, beside the formulas."""
    problem = SMALL[experiment.problem]
    made = technique(experiment.technique)(experiment, problem, torch.device("cpu"))
    found, weights = rank.train(made)
    everyone: list[Any] = [None] * experiment.ranks
    dist.all_gather_object(everyone, found)
    if dist.get_rank() != 0:
        return {}
    losses, expected = rank.of_one_rank(*rank.same_for(experiment))
    layers = counted(problem.model(), problem.batch(experiment.batch // experiment.micro_batches, 0).inputs)
    hops = hop_bytes(layers, pipelines.cut(layers, experiment.ranks * experiment.chunks))
    spans = [[Span(**event) for event in each["steps"][0]["events"]] for each in everyone]
    return {
        **rank.differences(found["losses"], losses, weights, expected),
        "kept": [bubbles.kept(own) for own in spans],
        "kept, formula": bubbles.expected_kept(experiment),
        "activations": [each["memory"]["activations"] for each in everyone],
        "sent": sum(one["bytes"] for each in everyone for one in each["sent"] if one["collective"] == "send"),
        "sent, formula": 2 * experiment.micro_batches * sum(hops) * (2 if experiment.precision == "fp64" else 1),
        "bubble": bubbles.bubble(bubbles.on_own_cores(spans)),
        "first": [[span.kind, span.micro_batch, span.chunk] for span in bubbles.computing(spans)[0]],
    }


def of_denoising(samples: int, steps: int) -> dict[str, Any]:
    """Whether the last rank's latents are bit-equal to those of one rank, and each hop's bytes."""
    pipeline = inference.LayerPipeline(SMALL["svd"], samples)
    latents, expected = (
        each.denoise(steps) for each in (pipeline, inference.LayerPipeline(SMALL["svd"], samples, True))
    )
    same = not pipeline.stage.is_last or all(map(torch.equal, latents, expected))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (same, len(pipeline.hops)))
    return {"same": all(each for each, _ in everyone), "hops": sum(count for _, count in everyone)}


def main() -> None:
    torch.set_num_threads(1)
    problems.PROBLEMS.update(SMALL)
    dist.init_process_group("gloo")
    found = {}
    for case in sys.argv[1:]:
        arguments = json.loads(case)
        if "samples" in arguments:
            found[case] = of_denoising(**arguments)
            continue
        ends = arguments.pop("cut", None)
        pipelines.cut = (
            cut if ends is None else lambda *_, ends=ends: [range(*own) for own in itertools.pairwise([0, *ends])]
        )
        found[case] = of_pipeline(Experiment(ranks=dist.get_world_size(), **arguments))
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()
