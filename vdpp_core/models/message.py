"""What stages hand on to one another, and how it becomes one buffer of bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from vdpp_core.models.stand_ins import Answers, moved, replaced


class Encoding(NamedTuple):
    """What the encoders returned for a sample, and how far they drew random numbers.

    Attributes:
        answers: component -> what it returned, in order.
        draws: states of the generators when the pipeline began to draw the noise.
    """

    answers: Answers
    draws: dict[str, Tensor]


@dataclass
class Message:
    """What one stage hands on to the next.

    Attributes:
        latents: as the pipeline's loop has them.
        memory: of the solver; see `Solver.memory`.
        draws: states of the sample's generator and of torch's own, of those that the loop draws from.
        encoding: of the sample, where the stages do not know it from before the clock.
    """

    latents: Tensor
    memory: dict[str, Any] = field(default_factory=dict)
    draws: dict[str, Tensor] = field(default_factory=dict)
    encoding: Encoding | None = None


class Packing:
    """How messages of one kind become one buffer of bytes and back.

    Tensors travel; numbers that the solver counts are the same for every sample, and are taken from the example.

    Args:
        example: a message of a rehearsal.
        solver: the solver's name, for errors.

    Raises:
        TypeError: the solver remembers something that is neither tensor nor number.
    """

    def __init__(self, example: Message, solver: str) -> None:
        self.solver = solver
        for leaf in tree_leaves(example.memory):
            if not isinstance(leaf, Tensor | int | float | str | None):
                raise TypeError(
                    f"{solver} remembers a {type(leaf).__name__}, which cannot be handed on to another rank"
                )
        tensors, self.numbers = _tensors(example), _numbers(example)
        self.devices = [tensor.device for tensor in tensors]
        self.example = Message(*moved(_parts(example), torch.device("meta")))
        self.like = _tensors(self.example)
        self.order = sorted(range(len(tensors)), key=lambda number: -tensors[number].element_size())  # all aligned
        self.size = sum(tensor.nbytes for tensor in tensors)

    def pack(self, message: Message) -> Tensor:
        """The bytes of all tensors, on the latents' device."""
        tensors, device = _tensors(message), message.latents.device
        if list(map(_looks, tensors)) != list(map(_looks, self.like)) or _numbers(message) != self.numbers:
            raise RuntimeError(f"{self.solver} remembers something else for one sample than for another")
        parts = [tensors[number].to(device).contiguous().reshape(-1).view(torch.uint8) for number in self.order]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def unpack(self, buffer: Tensor) -> Message:
        """The message, whose tensors share the buffer's memory where they are on its device."""
        tensors, begin = list(self.like), 0
        for number in self.order:
            like = self.like[number]
            part = buffer[begin : begin + like.nbytes].view(like.dtype).view(like.shape)
            tensors[number] = part.to(self.devices[number])
            begin += like.nbytes
        arrived = iter(tensors)
        return Message(*replaced(_parts(self.example), lambda _: next(arrived)))


def _parts(message: Message) -> list[Any]:
    return [message.latents, message.memory, message.draws, message.encoding]


def _tensors(message: Message) -> list[Tensor]:
    """All of them, in a fixed order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    replaced(_parts(message), note)
    return found


def _numbers(message: Message) -> list[Any]:
    """What the solver counts."""
    return [leaf for leaf in tree_leaves(message.memory) if not isinstance(leaf, Tensor)]


def _looks(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype
