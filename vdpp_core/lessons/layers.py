"""Cutting a model by layers into the stages of torch.distributed.pipelining, balanced by operations.

A stage sends the next one a tuple of tensors. For the transformer it is the hidden state. For the UNet the time
embedding and the skip connections that later layers consume travel with it, through every stage in between.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from diffusers import UNetSpatioTemporalConditionModel
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from vdpp_core.config.errors import ConfigError
from vdpp_core.lessons.problems import Transformer

State = tuple[Tensor, ...]
Inputs = dict[str, Tensor]


class Layer(NamedTuple):
    """A piece of a model that is never cut.

    Attributes:
        owns: names of its modules and parameters in the model.
        run: (state, the model's inputs, what it owns) -> the next state; the first layer gets an empty state.
    """

    owns: tuple[str, ...]
    run: Callable[..., State]


def layers_of(model: nn.Module) -> list[Layer]:
    """The layers of a transformer or of SVD's UNet, in the order in which they run.

    Raises:
        ConfigError: another kind of model.
    """
    if isinstance(model, Transformer):
        blocks = [Layer((f"blocks.{index}",), _block) for index in range(len(model.blocks))]
        return [Layer(("embed", "position"), _embed), *blocks, Layer(("norm", "head"), _logits)]
    if isinstance(model, UNetSpatioTemporalConditionModel):
        return _layers_of_unet(model)
    raise ConfigError("model", type(model).__name__, "must be a Transformer or a UNetSpatioTemporalConditionModel")


def _embed(state: State, inputs: Inputs, embed: nn.Embedding, position: Tensor) -> State:
    return (embed(inputs["tokens"]) + position,)


def _block(state: State, inputs: Inputs, block: nn.Module) -> State:
    return (block(*state),)


def _logits(state: State, inputs: Inputs, norm: nn.Module, head: nn.Module) -> State:
    return (head(norm(*state)),)


def _layers_of_unet(unet: Any) -> list[Layer]:
    """A layer for each resnet, each transformer and each change of resolution."""
    layers = [Layer(("conv_in", "time_proj", "time_embedding", "add_time_proj", "add_embedding"), _begin)]
    for index, block in enumerate(unet.down_blocks):
        for pair in _pairs(f"down_blocks.{index}", block):
            layers += [*pair[:-1], Layer(pair[-1].owns, _kept(pair[-1].run))]
        layers += [Layer((f"down_blocks.{index}.downsamplers.0",), _kept(_downsample))] if block.downsamplers else []
    layers.append(Layer(("mid_block.resnets.0",), _resnet))
    for index in range(len(unet.mid_block.attentions)):
        layers.append(Layer((f"mid_block.attentions.{index}",), _attention))
        layers.append(Layer((f"mid_block.resnets.{index + 1}",), _resnet))
    for index, block in enumerate(unet.up_blocks):
        for resnet, *attention in _pairs(f"up_blocks.{index}", block):
            layers += [Layer(resnet.owns, _resnet_with_skip), *attention]
        layers += [Layer((f"up_blocks.{index}.upsamplers.0",), _upsample)] if block.upsamplers else []
    return [*layers, Layer(("conv_norm_out", "conv_out"), _predict)]


def _pairs(name: str, block: Any) -> list[list[Layer]]:
    """Each resnet of a block, with the transformer that follows it in blocks that have some."""
    kinds = {"resnets": _resnet} | ({"attentions": _attention} if hasattr(block, "attentions") else {})
    return [[Layer((f"{name}.{kind}.{at}",), run) for kind, run in kinds.items()] for at in range(len(block.resnets))]


# The state of the UNet is (hidden state, time embedding, *skip connections); the last one is consumed first.


def _begin(
    state: State, inputs: Inputs, conv_in: Any, time_proj: Any, time_embedding: Any, add_time_proj: Any, add: Any
) -> State:
    sample = inputs["sample"]
    timestep = inputs["timestep"].expand(len(sample))
    added = add_time_proj(inputs["added_time_ids"].flatten()).unflatten(0, (len(sample), -1)).flatten(1)
    embedding = time_embedding(time_proj(timestep).to(sample.dtype)) + add(added.to(sample.dtype))
    hidden = conv_in(sample.flatten(0, 1))
    return hidden, embedding, hidden


def _resnet(state: State, inputs: Inputs, resnet: nn.Module) -> State:
    hidden, embedding, *skips = state
    frames = inputs["sample"].shape[1]
    image_only = hidden.new_zeros(len(embedding), frames)
    return resnet(hidden, embedding.repeat_interleave(frames, 0), image_only_indicator=image_only), embedding, *skips


def _attention(state: State, inputs: Inputs, attention: nn.Module) -> State:
    hidden, embedding, *skips = state
    frames = inputs["sample"].shape[1]
    tokens = inputs["encoder_hidden_states"].repeat_interleave(frames, 0)
    image_only = hidden.new_zeros(len(embedding), frames)
    return attention(hidden, tokens, image_only_indicator=image_only, return_dict=False)[0], embedding, *skips


def _kept(run: Callable[..., State]) -> Callable[..., State]:
    """A layer whose hidden state is also a skip connection."""

    def and_keep(state: State, inputs: Inputs, module: nn.Module) -> State:
        state = run(state, inputs, module)
        return *state, state[0]

    return and_keep


def _resnet_with_skip(state: State, inputs: Inputs, resnet: nn.Module) -> State:
    hidden, embedding, *skips, skip = state
    return _resnet((torch.cat([hidden, skip], dim=1), embedding, *skips), inputs, resnet)


def _downsample(state: State, inputs: Inputs, downsampler: nn.Module) -> State:
    return downsampler(state[0]), *state[1:]


def _upsample(state: State, inputs: Inputs, upsampler: nn.Module) -> State:
    hidden, embedding, *skips = state
    return upsampler(hidden, skips[-1].shape[2:]), embedding, *skips


def _predict(state: State, inputs: Inputs, norm: nn.Module, conv_out: nn.Module) -> State:
    return (conv_out(functional.silu(norm(state[0]))).unflatten(0, inputs["sample"].shape[:2]),)


class Received(torch.autograd.Function):
    """What a stage received, whose gradient becomes contiguous: torch can send no other."""

    @staticmethod
    def forward(ctx: Any, received: Tensor) -> Tensor:
        """The tensor as it is."""
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """The gradient to send."""
        return gradients[0].contiguous()


class Stage(nn.Module):
    """Consecutive layers of a model, in `model`, where they keep their names. All other layers are removed from it.

    Args:
        model: taken apart.
        layers: of the whole model.
        own: the layers of this stage.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer], own: range) -> None:
        super().__init__()
        for name in itertools.chain.from_iterable(layer.owns for at, layer in enumerate(layers) if at not in own):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, None)
        self.model, self.layers = model, layers[own.start : own.stop]
        self.is_last = own.stop == len(layers)

    def pieces(self) -> list[nn.Module]:
        """The modules of the stage's layers."""
        own = (attrgetter(name)(self.model) for layer in self.layers for name in layer.owns)
        return [piece for piece in own if isinstance(piece, nn.Module)]

    def forward(self, *state: Tensor, **inputs: Tensor) -> State | Tensor:
        """The state after the stage's layers; the model's prediction after the last one.

        Args:
            state: what the previous stage sent, nothing for the first.
            inputs: of the model.
        """
        state = tuple(map(Received.apply, state))
        for layer in self.layers:
            state = layer.run(state, inputs, *(attrgetter(name)(self.model) for name in layer.owns))
        # copies: torch sends contiguous tensors only, and detaches what it sent, which it cannot with views
        return state[0] if self.is_last else tuple(each.clone(memory_format=torch.contiguous_format) for each in state)


class Counted(NamedTuple):
    """A layer on the meta device: floating-point operations of its forward pass, and the state behind it."""

    operations: int
    state: State


def counted(model: nn.Module, inputs: Inputs) -> list[Counted]:
    """Each layer's operations and the shapes that would be sent behind it, without computing anything."""
    model, inputs = copy.deepcopy(model).to("meta"), {name: value.to("meta") for name, value in inputs.items()}
    state: State = ()
    found = []
    for layer in layers_of(model):
        with FlopCounterMode(display=False) as counter:
            state = layer.run(state, inputs, *(attrgetter(name)(model) for name in layer.owns))
        found.append(Counted(counter.get_total_flops(), state))
    return found


def cut(layers: Sequence[Counted], stages: int) -> list[range]:
    """`balanced` by operations."""
    return balanced([layer.operations for layer in layers], stages)


def hop_bytes(layers: Sequence[Counted], cuts: Sequence[range]) -> list[int]:
    """Bytes that each stage but the last sends forward; gradients that come back have the same size."""
    return [sum(tensor.nbytes for tensor in layers[stage.stop - 1].state) for stage in cuts[:-1]]


def balanced(costs: Sequence[float], parts: int) -> list[range]:
    """Cut layers into consecutive parts, none empty, so that the most expensive part costs as little as possible.

    Raises:
        ConfigError: more parts than layers.
    """
    if not 1 <= parts <= len(costs):
        raise ConfigError("stages", parts, f"must be 1 to {len(costs)}, the number of layers")

    @functools.cache
    def cheapest(first: int, parts: int) -> tuple[float, tuple[int, ...]]:
        """The highest cost of a part, and where parts begin, of the layers from `first` on."""
        if parts == 1:
            return sum(costs[first:]), (first,)
        cuts = range(first + 1, len(costs) - parts + 2)
        found = ((cheapest(cut, parts - 1), sum(costs[first:cut])) for cut in cuts)
        return min((max(rest[0], own), (first, *rest[1])) for rest, own in found)

    return [range(*ends) for ends in itertools.pairwise((*cheapest(0, parts)[1], len(costs)))]
