"""What a stage is given by the one before and hands on to the next."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from torch import Tensor

from vdpp_core.config.layout import Parallel
from vdpp_core.models.message import Message, Packing
from vdpp_core.models.stage import Stage
from vdpp_core.parallel.handoff import Handoff
from vdpp_core.parallel.world import World


class Form(NamedTuple):
    """How the messages of some samples look: an example of those given, and how they and those handed on are packed."""

    given: Message
    incoming: Packing
    outgoing: Packing


class Exchange:
    """A stage's messages, packed for the hand-off. Their forms are learned before the clock, not negotiated.

    Args:
        form_of: sample -> whatever its messages' form depends on.
        with_encodings: a message also has its sample's encoding, for stages that do not know it.

    Raises:
        LostRankError: in any method, if the neighbour is gone.
    """

    def __init__(
        self,
        world: World,
        layout: Parallel,
        stage: Stage,
        steps: range,
        form_of: Callable[[int], Hashable],
        with_encodings: bool,
    ) -> None:
        self.stage, self.steps, self.form_of, self.with_encodings = stage, steps, form_of, with_encodings
        self.forms: dict[Hashable, Form] = {}
        self.handoff = Handoff(world, layout)

    def learn(self, prediction: Any) -> Tensor:
        """Rehearse a sample of each form, and get to know the neighbours.

        Args:
            prediction: what a denoiser returns, for its form.

        Returns:
            Finished latents of the last sample, on the meta device.
        """
        solver = self.stage.solver.name
        samples = {self.form_of(sample): sample for sample in self.stage.recording}
        for form, sample in samples.items():
            given, made, finished = (
                self.stage.rehearse(sample, range(stop), prediction)
                for stop in (self.steps.start, self.steps.stop, self.stage.total_steps)
            )
            packings = (Packing(self._whole(sample, message), solver) for message in (given, made))
            self.forms[form] = Form(given, *packings)
        self.handoff.connect()
        return finished.latents.to("meta")

    def example(self, sample: int) -> Message:
        """What the stage might be given for a sample."""
        return self.forms[self.form_of(sample)].given

    def expect(self, sample: int, turn: int) -> None:
        """Post the receive of a sample's message. `turn` as of `Handoff.expect`."""
        self.handoff.expect(self.forms[self.form_of(sample)].incoming.size, turn)

    def take(self, sample: int) -> tuple[Message, float]:
        """Wait for the expected message; return it, and the seconds waited."""
        buffer, waited = self.handoff.take()
        return self.forms[self.form_of(sample)].incoming.unpack(buffer), waited

    def pass_on(self, sample: int, turn: int, made: Message) -> tuple[int, float]:
        """Send a message without waiting, unless the next stage is too far behind; return bytes and seconds waited."""
        buffer = self.forms[self.form_of(sample)].outgoing.pack(self._whole(sample, made))
        return buffer.nbytes, self.handoff.pass_on(buffer, turn)

    def close(self) -> None:
        """Wait until everything that was sent has arrived."""
        self.handoff.close()

    def _whole(self, sample: int, message: Message) -> Message:
        if self.with_encodings:
            message.encoding = self.stage.recording[sample]
        return message
