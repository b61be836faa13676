"""What stages hand on to one another, and how it becomes one buffer of bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


@dataclass
class Message:
    """What one stage hands on to the next.

    Attributes:
        latents: as the pipeline's loop has them.
        memory: of the solver; see `Solver.memory`.
        draws: states of the sample's generator and of torch's own, of those that the loop draws from.
    """

    latents: Tensor
    memory: dict[str, Any] = field(default_factory=dict)
    draws: dict[str, Tensor] = field(default_factory=dict)


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
        leaves, self.spec = tree_flatten((example.latents, example.memory, example.draws))
        for leaf in leaves:
            if not isinstance(leaf, Tensor | int | float | str | None):
                raise TypeError(
                    f"{solver} remembers a {type(leaf).__name__}, which cannot be handed on to another rank"
                )
        self.example = [leaf.to("meta") if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.devices = [leaf.device if isinstance(leaf, Tensor) else None for leaf in leaves]
        tensors = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.order = sorted(tensors, key=lambda number: -leaves[number].element_size())  # so that each is aligned
        self.size = sum(self.example[number].nbytes for number in self.order)

    def pack(self, message: Message) -> Tensor:
        """The bytes of all tensors, on the latents' device."""
        leaves, spec = tree_flatten((message.latents, message.memory, message.draws))
        if spec != self.spec or any(map(self._differs, leaves, self.example)):
            raise RuntimeError(f"{self.solver} remembers something else for one sample than for another")
        device = message.latents.device
        parts = [leaves[number].to(device).contiguous().reshape(-1).view(torch.uint8) for number in self.order]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def unpack(self, buffer: Tensor) -> Message:
        """The message, whose tensors share the buffer's memory where they are on its device."""
        leaves, begin = list(self.example), 0
        for number in self.order:
            like = self.example[number]
            part = buffer[begin : begin + like.nbytes].view(like.dtype).view(like.shape)
            leaves[number] = part.to(self.devices[number])
            begin += like.nbytes
        return Message(*tree_unflatten(leaves, self.spec))

    @staticmethod
    def _differs(leaf: Any, example: Any) -> bool:
        if isinstance(example, Tensor):
            return not isinstance(leaf, Tensor) or (leaf.shape, leaf.dtype) != (example.shape, example.dtype)
        return isinstance(leaf, Tensor) or leaf != example
