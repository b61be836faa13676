"""Who has what of a forward pass that is shared out, and what is sent: seen without any communication."""

from __future__ import annotations

import pytest
import torch

from tests.doubles.threads import together
from vdpp_core import Parallel, RunConfig, models
from vdpp_core.parallel.group import Group
from vdpp_core.predict import trace


@pytest.mark.parametrize(("count", "size"), [(14, 3), (25, 7), (4, 4), (1, 4), (0, 2), (576, 5)])
def test_shares_are_even_and_in_order(count, size):
    shares = Group(size).shares(count)
    lengths = [share.stop - share.start for share in shares]
    assert len(shares) == size
    assert [index for share in shares for index in range(count)[share]] == list(range(count))
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


def test_what_is_sent_is_counted():
    group, four = Group(3, 1), torch.zeros(4)
    gathered = group.all_gather(four, "layer", "statistics")
    assert gathered.shape == (3, 4)
    assert group.sent["layer", "statistics"] == 2 * 16
    assert group.all_to_all(torch.zeros(6), [1, 2, 3], [2, 2, 2], "layer").shape == (6,)
    assert group.sent["layer", "positions"] == 4 * 4  # not what stays here
    assert group.exchanges == 2
    gathered, before, after = group.all_gather_with_edges(torch.zeros(2, 5), four, four, "layer")
    assert gathered.shape == (3, 2, 5)
    assert before.shape == after.shape == four.shape
    assert group.sent["layer", "halo"] == 2 * 16
    assert group.sent["layer", "statistics"] == 2 * 16 + 2 * 40
    assert group.exchanges == 3


@pytest.mark.parametrize(("rank", "missing"), [(0, 0), (2, 1)])
def test_the_ends_have_one_neighbour(rank, missing):
    group = Group(3, rank)
    _, *edges = group.all_gather_with_edges(torch.zeros(1), torch.zeros(4), torch.zeros(4), "layer")
    assert [edge is None for edge in edges].index(True) == missing
    assert group.sent["layer", "halo"] == 16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_one_exchange_brings_everybodys_numbers_and_the_neighbours_edges(size, dtype):
    """Of types of their own: statistics are wide, edges as narrow as the activations."""

    def edge(rank, side):
        return torch.full((2, 32, 3, 5), rank + side / 4, dtype=dtype).transpose(2, 3)  # not contiguous

    def work(group):
        own = torch.tensor([[group.rank, 1e-9 * group.rank]], dtype=torch.float64)
        return group.all_gather_with_edges(own, edge(group.rank, 0), edge(group.rank, 1), "layer")

    for rank, (gathered, before, after) in enumerate(together(size, work)):
        assert gathered.tolist() == [[[other, 1e-9 * other]] for other in range(size)]
        assert before is None if rank == 0 else torch.equal(before, edge(rank - 1, 1))
        assert after is None if rank == size - 1 else torch.equal(after, edge(rank + 1, 0))


def rehearsed(layout, member=0):
    """A UNet on the meta device that computes what a member of a lockstep group does, and that member's groups."""
    config = RunConfig(parallel=Parallel())
    unet = models.ready(config, models.on_meta(config, torch.float32))
    return unet, trace.rehearse(unet, layout, member)


def arguments(batch=2, frames=5, tokens=1):
    shapes = {"sample": (batch, frames, 8, 9, 16), "encoder_hidden_states": (batch, tokens, 32)}
    given = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return given | {"timestep": torch.tensor(1.0), "added_time_ids": torch.empty(batch, 3, device="meta")}


@pytest.mark.parametrize("layout", [Parallel(frames=4), Parallel(cfg=2), Parallel(cfg=2, frames=3)], ids=str)
def test_whole_latents_in_whole_prediction_out(layout):
    for member in range(layout.lockstep):
        unet, groups = rehearsed(layout, member)
        assert unet(**arguments()).sample.shape == (2, 5, 4, 9, 16)
        assert unet(**arguments(), return_dict=False)[0].shape == (2, 5, 4, 9, 16)
        assert all(group.sent.total() > 0 for group in groups.values())


def test_fewer_frames_than_ranks_are_refused():
    unet, _ = rehearsed(Parallel(frames=4))
    with pytest.raises(ValueError, match=r"^frames 4: must be at most num_frames, 3$"):
        unet(**arguments(frames=3))


def test_a_batch_of_one_pass_is_refused():
    unet, _ = rehearsed(Parallel(cfg=2))
    with pytest.raises(
        ValueError, match=r"^batch 1: cfg 2 splits the two passes of the guidance, which is off: use cfg 1$"
    ):
        unet(**arguments(batch=1))


def test_every_temporal_layer_has_its_account():
    unet, groups = rehearsed(Parallel(frames=2))
    sent = groups["frames"].sent
    unet(**arguments())
    resnets = [name for name, module in unet.named_modules() if type(module).__name__ == "TemporalResnetBlock"]
    blocks = [name for name, module in unet.named_modules() if type(module).__name__ == "TemporalBasicTransformerBlock"]
    assert {layer for layer, kind in sent if kind == "halo"} == set(resnets)
    assert {layer for layer, kind in sent if kind == "positions"} == set(blocks)
    assert {kind for _, kind in sent} == {"halo", "positions", "statistics", "prediction"}
