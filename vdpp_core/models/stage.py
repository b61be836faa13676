"""A stage of the step pipeline: the official pipeline's own `__call__`, shown only the steps of the stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from vdpp_core.config import RunConfig
from vdpp_core.models import pipelines, svd
from vdpp_core.models.pipelines import Official
from vdpp_core.models.solver import Solver
from vdpp_core.models.stand_ins import Answer, Player, Recorder

Report = Callable[[int, float], None]  # step, seconds


@dataclass
class Message:
    """What one stage hands on to the next.

    Attributes:
        latents: as the pipeline's `latents` argument takes them.
        memory: of the solver; see `Solver.memory`.
        draws: state of the sample's generator, if the loop draws from it.
    """

    latents: Tensor
    memory: dict[str, Any] = field(default_factory=dict)
    draws: Tensor | None = None


@dataclass
class Recording:
    """What the encoders returned: `outputs`, and for each sample the numbers of those it got, in order of the calls."""

    outputs: list[Any]
    answers: dict[int, list[int]]


class Clock(Protocol):
    """What a stage times its steps with."""

    def start(self) -> None:
        """Begin a span."""

    def stop(self) -> float:
        """End the span, and return its seconds."""


class Stage:
    """Runs consecutive steps of samples through the official pipeline.

    Args:
        arguments: sample -> arguments of the pipeline's call, with `num_inference_steps`.
        seed: sample m draws from a CPU generator seeded with seed + m, so that it is the same on every type of device.
    """

    def __init__(
        self, official: Official, arguments: Callable[[int], dict[str, Any]], seed: int, stopwatch: Clock
    ) -> None:
        self.official, self.pipeline = official, official.pipeline
        self.arguments, self.seed, self.stopwatch = arguments, seed, stopwatch
        self.total_steps = arguments(0)["num_inference_steps"]
        self.solver = Solver(self.pipeline.scheduler, self.total_steps)
        official.replace("scheduler", self.solver.scheduler)
        official.replace("progress_bar", self._loop_begins)
        self._progress_bar = type(self.pipeline).progress_bar
        self.begun: Callable[[], None] = lambda: None

    @classmethod
    def around(cls, config: RunConfig, unet: Any, device: torch.device, dtype: torch.dtype, stopwatch: Clock) -> Stage:
        """A stage of a run, around its UNet."""
        arguments = svd.call_arguments(config)
        official = pipelines.around(config, unet, device, dtype, Player([]))
        return cls(official, lambda _: arguments, config.seed, stopwatch)

    def encode(self, samples: Sequence[int], answer: Answer) -> Recording:
        """Run all that comes before the first step, for each sample, and record what the encoders answer."""
        recorder = Recorder(answer)
        self.official.answer(recorder)
        answers: dict[int, list[int]] = {}
        for sample in samples:
            recorder.answers = answers[sample] = []
            self._call(sample, range(0), None)
        return Recording(recorder.outputs, answers)

    def use(self, recording: Recording) -> None:
        """Answer for the encoders with what was recorded, from now on."""
        self.recording, self.player = recording, Player(recording.outputs)
        self.official.answer(self.player)

    def denoise(self, sample: int, steps: range, given: Message | None, report: Report = lambda *_: None) -> Message:
        """Do these steps of a recorded sample.

        Args:
            given: from the stage before; None starts at step 0 with the sample's own noise.
            report: called after each step with the seconds since the one before, or since the loop began.
        """
        drawn: list[Tensor] = []
        generator = self._generator(sample)

        def begin() -> None:
            if given is not None and given.draws is not None:
                generator.set_state(given.draws.cpu())
            drawn.append(generator.get_state())
            self.stopwatch.start()

        def done(step: int) -> None:
            report(step, self.stopwatch.stop())
            self.stopwatch.start()

        self.begun = begin
        self.player.play(self.recording.answers[sample])
        latents = self._call(sample, steps, given, generator, done)
        state = generator.get_state()
        draws = state if given is not None and given.draws is not None else None
        if not torch.equal(state, drawn[0]):
            draws = state
        return Message(latents, self.solver.memory(), draws)

    def _generator(self, sample: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed + sample)

    def _call(
        self,
        sample: int,
        steps: range,
        given: Message | None,
        generator: torch.Generator | None = None,
        step_done: Callable[[int], None] = lambda _: None,
    ) -> Tensor:
        self.solver.show(steps, given.memory if given else {}, step_done)
        arguments = self.arguments(sample) | ({"latents": given.latents} if given else {})
        made = self.pipeline(
            **arguments,
            generator=generator or self._generator(sample),
            output_type="latent",
            return_dict=False,
        )
        return made[0] if isinstance(made, tuple) else made

    def _loop_begins(self, *args: Any, **kwargs: Any) -> Any:
        """The pipeline's `progress_bar`, which it asks for right before its loop."""
        self.begun()
        return self._progress_bar(self.pipeline, *args, **kwargs)

    def rehearse(self, sample: int, steps: range, prediction: Tensor) -> Message:
        """Do steps without the denoisers, which predict zeros: a message that looks like one of these steps.

        Args:
            prediction: what a denoiser returned, for its shape and type.
        """
        with self._predicting(torch.zeros_like(prediction)):
            return self.denoise(sample, steps, None)

    @contextmanager
    def _predicting(self, prediction: Tensor) -> Iterator[None]:
        real = self.official.denoisers
        for name, module in real.items():
            self.official.replace(name, _Constant(module, prediction))
        try:
            yield
        finally:
            for name, module in real.items():
                self.official.replace(name, module)

    @contextmanager
    def seeing(self, predictions: list[Tensor]) -> Iterator[None]:
        """Keep what the denoisers return."""
        hooks = [
            module.register_forward_hook(lambda _module, _args, made: predictions.append(tree_leaves(made)[0]))
            for module in self.official.denoisers.values()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class _Constant(nn.Module):
    """Looks like a denoiser, and always predicts the same."""

    def __init__(self, denoiser: nn.Module, prediction: Tensor) -> None:
        super().__init__()
        self.__dict__["denoiser"], self.prediction = denoiser, prediction

    def forward(self, *_: Any, **__: Any) -> tuple[Tensor]:
        return (self.prediction,)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["denoiser"], name)


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
