"""Cutting models by layers, the bubbles of schedules, and their figures, without ranks."""

import copy
import itertools

import pytest
import torch

from vdpp_core.config.errors import ConfigError
from vdpp_core.lessons import bubbles, sizing
from vdpp_core.lessons.experiments import Experiment
from vdpp_core.lessons.layers import Stage, balanced, counted, cut, hop_bytes, layers_of
from vdpp_core.lessons.measure import Span
from vdpp_core.lessons.pipelines import labelled
from vdpp_core.lessons.problems import SVDProblem, TransformerProblem
from vdpp_core.plots.training_schedules import Panel, schedules

TRANSFORMER, UNET = TransformerProblem(hidden=32, layers=8, heads=2, sequence=8, vocabulary=32), SVDProblem(2, 2)
CASES = [(TRANSFORMER, 2), (TRANSFORMER, 4), (TRANSFORMER, 10), (UNET, 2), (UNET, 4), (UNET, 8)]


@pytest.mark.parametrize(("problem", "stages"), CASES)
def test_stages_have_the_models_parameters_and_its_prediction(problem, stages):
    model, inputs = problem.model(), problem.batch(2, 0).inputs
    layers = counted(model, inputs)
    cuts = cut(layers, stages)
    modules = [Stage(copy.deepcopy(model), layers_of(model), own) for own in cuts]
    names = [name for stage in modules for name, _ in stage.model.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    state, sent = (), []
    with torch.no_grad():
        for stage in modules:
            found = stage(*state, **inputs)
            state = found if isinstance(found, tuple) else (found,)
            sent.append(sum(tensor.nbytes for tensor in state))
        assert torch.equal(state[0], problem.predict(model, inputs))
    assert sent[:-1] == hop_bytes(layers, cuts)


def test_skip_connections_travel_until_they_are_used():
    layers = counted(UNET.model(), UNET.batch(1, 0).inputs)
    skips = [len(layer.state) - 2 for layer in layers]
    assert (max(skips), skips[0], skips[-2]) == (4, 1, 0)


@pytest.mark.parametrize("costs", [[1, 1, 1, 1], [0, 9, 1, 1, 8, 2, 3], [5, 1, 1, 1, 1, 1]])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_the_most_expensive_part_costs_as_little_as_possible(costs, parts):
    cuts = balanced(costs, parts)
    assert [layer for own in cuts for layer in own] == list(range(len(costs)))
    every = itertools.combinations(range(1, len(costs)), parts - 1)
    best = min(max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *ends, len(costs)))) for ends in every)
    assert max(sum(costs[own.start : own.stop]) for own in cuts) == best


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match="stages 5: must be 1 to 4, the number of layers"):
        balanced([1, 1, 1, 1], 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"micro_batches": 3}, "micro_batches 3: must divide the batch, 8"),
        ({"ranks": 1}, "ranks 1: must be at least 2"),
        ({"technique": "1F1B", "micro_batches": 2}, "micro_batches 2: must be at least 4"),
        ({"technique": "Interleaved 1F1B", "micro_batches": 4}, "chunks 1: must be at least 2"),
        ({"technique": "Interleaved 1F1B", "micro_batches": 2, "chunks": 2}, "micro_batches 2: must be a multiple"),
        ({"technique": "Interleaved 1F1B", "micro_batches": 4, "chunks": 3}, "chunks 3: must be at most 2: 10 layers"),
        ({"technique": "Zero bubble", "micro_batches": 4, "checkpointing": True}, "checkpointing True: must be off"),
    ],
)
def test_what_a_schedule_cannot_run_is_refused_before_ranks_start(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Experiment(**{"technique": "GPipe", "micro_batches": 4} | arguments)


def step(orders, seconds=(1, 2)):
    """The spans of ranks that compute in these orders, such as "F0 F1 B0 B1", for so many CPU seconds."""
    kinds = {"F": ("forward", seconds[0]), "B": ("backward", seconds[1])}
    return [[Span(kinds[at[0]][0], 0, 0, int(at[1:]), 0, kinds[at[0]][1]) for at in order.split()] for order in orders]


GPIPE = ["F0 F1 F2 F3 B0 B1 B2 B3"] * 2
ONE_FORWARD_ONE_BACKWARD = ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]


@pytest.mark.parametrize("orders", [GPIPE, ONE_FORWARD_ONE_BACKWARD])
def test_the_bubble_of_equal_stages_is_that_of_the_formula(orders):
    replayed = bubbles.on_own_cores(step(orders))
    assert bubbles.bubble(replayed) == pytest.approx(sizing.bubble(2, 4))
    assert bubbles.unequal_bubble(bubbles.seconds(replayed), 4) == pytest.approx(sizing.bubble(2, 4))


def test_the_slowest_stage_sets_the_pace():
    slow = [step([order], seconds)[0] for order, seconds in zip(GPIPE, [(1, 2), (2, 4)], strict=True)]
    assert bubbles.bubble(bubbles.on_own_cores(slow)) == pytest.approx(bubbles.unequal_bubble([3, 6], 4))


def test_micro_batches_are_kept_until_their_backward_pass():
    assert [bubbles.kept(spans) for spans in step(GPIPE)] == [4, 4]
    assert [bubbles.kept(spans) for spans in step(ONE_FORWARD_ONE_BACKWARD)] == [2, 1]


@pytest.mark.parametrize(("name", "chunks"), [("GPipe", 1), ("1F1B", 1), ("Interleaved 1F1B", 2)])
def test_the_first_rank_keeps_what_sizing_says(name, chunks):
    experiment = Experiment(name, ranks=4, batch=8, micro_batches=8, chunks=chunks)
    assert bubbles.expected_kept(experiment)[0] == sizing.micro_batches_kept(4, 8)[name]


def test_a_wait_belongs_to_the_work_after_it_and_a_message_to_that_before():
    spans = [
        Span("wait", 0, 1),
        Span("forward", 1, 2, 3, 1),
        Span("send", 2, 3),
        Span("wait", 3, 4),
        Span("backward", 4, 5, 2),
    ]
    assert [(span.micro_batch, span.chunk) for span in labelled(spans)] == [(3, 1), (3, 1), (3, 1), (2, 0), (2, 0)]


def test_a_panel_has_a_bar_for_each_computation_and_an_arrow_for_each_hop():
    panels = [Panel("GPipe", bubbles.on_own_cores(step(orders)), 0) for orders in (GPIPE, ONE_FORWARD_ONE_BACKWARD)]
    figure = schedules(panels, "title", "small print")
    for axes in figure.axes:
        assert len(axes.patches) == 16
        texts = [text.get_text() for text in axes.texts]
        assert sorted(filter(None, texts)) == sorted("0123" * 4)
        assert texts.count("") == 2  # one hop forward, one back
