"""A stage of the step pipeline: the official pipeline's own `__call__`, shown only the steps of the stage."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from vdpp_core.config import RunConfig
from vdpp_core.models import pipelines
from vdpp_core.models.message import Encoding, Message
from vdpp_core.models.patches import as_asked
from vdpp_core.models.pipelines import Official
from vdpp_core.models.solver import Solver
from vdpp_core.models.stand_ins import Player, Recorder, moved, replaced, sample_of

Recording = dict[int, Encoding]  # sample -> what the encoders returned
Report = Callable[[int, float], None]  # step, seconds


class Call(NamedTuple):
    """A call of a denoiser in the loop: at which of its timesteps, and the arguments on the meta device."""

    denoiser: str
    timestep: int
    args: tuple
    kwargs: dict[str, Any]


class Passes(NamedTuple):
    """How a pipeline guides: calls of a denoiser at each timestep, and passes that are stacked in one call."""

    calls: int
    stacked: int


@dataclass
class Loop:
    """What a pipeline's loop begins with, and what it asks of its denoisers.

    Attributes:
        latents: as the pipeline holds them.
        steps: name of the denoisers that each step calls.
    """

    latents: Tensor
    calls: list[Call]
    steps: list[set[str]]

    @property
    def experts(self) -> tuple[tuple[str, int], ...] | None:
        """The denoisers in the order in which they take turns, and the number of steps of each; None where a step calls
        several of them."""
        if any(len(names) != 1 for names in self.steps):
            return None
        return tuple((name, len(list(steps))) for (name,), steps in itertools.groupby(map(tuple, self.steps)))

    @property
    def passes(self) -> Passes:
        """How the pipeline guides. Where the timesteps differ, one pass counts."""
        calls = set(Counter(call.timestep for call in self.calls).values())
        stacked = {len(sample_of(call.args, call.kwargs)) // len(self.latents) for call in self.calls}
        return Passes(*(found.pop() if len(found) == 1 else 1 for found in (calls, stacked)))


class Clock(Protocol):
    """What a stage times its steps with."""

    def start(self) -> None:
        """Begin a span."""

    def stop(self) -> float:
        """End the span, and return its seconds."""


class NoClock:
    """Times nothing."""

    def start(self) -> None:
        """Do nothing."""

    def stop(self) -> float:
        """No seconds."""
        return 0.0


class Draws:
    """The random numbers of a sample: from its generator, and from torch's own, which some pipelines use instead."""

    def __init__(self, seed: int, device: torch.device) -> None:
        torch.manual_seed(seed)
        on_cuda = device.type == "cuda"
        own = torch.cuda.default_generators[device.index] if on_cuda else torch.default_generator
        self.sources = {"sample": torch.Generator().manual_seed(seed), "torch": own}
        self.at_noise = self.now()
        self.go_on({})

    def go_on(self, states: dict[str, Tensor]) -> None:
        """The loop begins, with these states of the stage before."""
        self.set(states)
        self.before, self.given = self.now(), set(states)

    def set(self, states: dict[str, Tensor]) -> None:
        """Set generators to these states."""
        for name, state in states.items():
            self.sources[name].set_state(state.cpu().clone())  # torch reads it from the start of its memory

    def now(self) -> dict[str, Tensor]:
        """The states of all generators."""
        return {name: source.get_state() for name, source in self.sources.items()}

    def states(self) -> dict[str, Tensor]:
        """The states of those that the loop, in this stage or an earlier one, has drawn from."""
        now = self.now()
        drawn = {name for name in now if not torch.equal(now[name], self.before[name])}
        return {name: now[name] for name in sorted(drawn | self.given)}


class Stage:
    """Runs consecutive steps of samples through the official pipeline.

    A sample is encoded once, on any stage; `recording` holds what the encoders returned for those that a stage denoises
    or decodes.

    Args:
        arguments: sample -> arguments of the pipeline's call, with `num_inference_steps`.
        seed: sample -> seed of its generator, which is on the CPU, so that it is the same on every type of device.
    """

    def __init__(
        self,
        official: Official,
        arguments: Callable[[int], dict[str, Any]],
        seed: Callable[[int], int],
        stopwatch: Clock,
    ) -> None:
        self.official, self.pipeline = official, official.pipeline
        self.device = self.pipeline._execution_device
        self.arguments, self.seed, self.stopwatch = arguments, seed, stopwatch
        self.total_steps = arguments(0)["num_inference_steps"]
        self.encoding, self.player = False, Player()
        self.recording: Recording = {}
        official.answer(self.player)
        self.solver = Solver(self.pipeline.scheduler, self.total_steps)
        official.replace("scheduler", self.solver.scheduler)
        official.replace("progress_bar", self._loop_begins)
        official.replace("prepare_latents", self._prepare_latents)

    @classmethod
    def around(
        cls, config: RunConfig, denoisers: dict[str, Any], device: torch.device, dtype: torch.dtype, stopwatch: Clock
    ) -> Stage:
        """A stage of a run, around its denoisers."""
        official = pipelines.around(config, denoisers, device, dtype)

        def arguments(sample: int) -> dict[str, Any]:
            return pipelines.call_arguments(config.of_sample(sample))

        return cls(official, arguments, config.seed_of, stopwatch)

    def encode(self, samples: Sequence[int], encoders: Recorder) -> None:
        """Run all that comes before the first step, for each sample, and record what the encoders answer."""
        self.official.answer(encoders)
        self.encoding = True
        for sample in samples:
            answers = encoders.start()
            self._call(sample, range(0), None)
            self.recording[sample] = Encoding(answers, self.draws.at_noise)
        self.encoding = False
        self.official.answer(self.player)

    def denoise(self, sample: int, steps: range, given: Message | None, report: Report = lambda *_: None) -> Message:
        """Do these steps of a recorded sample.

        Args:
            given: from the stage before; None starts at step 0 with the sample's own noise.
            report: called after each step with the seconds since the one before, or since the loop began.
        """

        def done(step: int) -> None:
            report(step, self.stopwatch.stop())
            self.stopwatch.start()

        self.player.play(self.recording[sample].answers)
        latents, draws = self._call(sample, steps, given, done)
        return Message(latents, self.solver.memory(), draws)

    def decode(self, sample: int, latents: Tensor) -> Any:
        """What the pipeline makes of finished latents: frames as an array (B, F, height, width, 3) from 0 to 1."""
        self.player.play(self.recording[sample].answers)
        after = range(self.total_steps, self.total_steps)
        return self._call(sample, after, Message(latents), output_type="np")[0]

    def _call(
        self,
        sample: int,
        steps: range,
        given: Message | None,
        step_done: Callable[[int], None] = lambda _: None,
        output_type: str = "latent",
    ) -> tuple[Any, dict[str, Tensor]]:
        """What the pipeline returns, and the states of the generators that its loop has drawn from."""
        self.given, self.sample = given, sample
        self.solver.show(steps, given.memory if given else {}, step_done)
        on_cuda = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(on_cuda):
            self.draws = Draws(self.seed(sample), self.device)
            made = self.pipeline(
                **self.arguments(sample) | ({} if self.encoding else self.official.once_encoded),
                generator=None if self.device.type == "meta" else self.draws.sources["sample"],
                output_type=output_type,
                return_dict=False,
            )
            return made[0] if isinstance(made, tuple) else made, self.draws.states()

    def _prepare_latents(self, *args: Any, **kwargs: Any) -> Any:
        """The pipeline's method, which draws the noise; later stages draw it, too, but use what they are given."""
        if self.encoding:
            self.draws.at_noise = self.draws.now()
        else:
            self.draws.set(self.recording[self.sample].draws)
        made = type(self.pipeline).prepare_latents(self.pipeline, *args, **kwargs)
        if self.given is None:
            return made
        return (self.given.latents, *made[1:]) if isinstance(made, tuple) else self.given.latents

    def _loop_begins(self, *args: Any, **kwargs: Any) -> Any:
        """The pipeline's `progress_bar`, which it asks for right before its loop."""
        self.draws.go_on(self.given.draws if self.given else {})
        self.stopwatch.start()
        return type(self.pipeline).progress_bar(self.pipeline, *args, **kwargs)

    def rehearse(self, sample: int, steps: range, prediction: Any, report: Report = lambda *_: None) -> Message:
        """Do steps without the denoisers, which predict zeros: a message that looks like one of these steps.

        Args:
            prediction: what a denoiser returned, for its form; of another sample, it may be of another batch size.
            report: as of `denoise`.
        """

        def zeros(_name: str, *args: Any, **kwargs: Any) -> Any:
            batch = len(sample_of(args, kwargs))
            return replaced(prediction, lambda like: like.new_zeros(batch, *like.shape[1:]))

        with self._predicting(zeros):
            return self.denoise(sample, steps, None, report)

    def loop(self, sample: int) -> Loop:
        """Go through the whole loop of a recorded sample without the denoisers, which predict zeros."""
        steps: list[set[str]] = [set() for _ in range(self.total_steps)]
        loop = Loop(self.denoise(sample, range(0), None).latents, [], steps)

        def see(name: str, *args: Any, **kwargs: Any) -> Any:
            loop.calls.append(Call(name, self.solver.taken, *moved((args, kwargs), torch.device("meta"))))
            steps[self.solver.step].add(name)
            return _zeros(loop.latents, args, kwargs)

        with self._predicting(see):
            self.denoise(sample, range(self.total_steps), None)
        return loop

    def make_room(self, sample: int) -> None:
        """Do two steps of a recorded sample without the denoisers, before these are first called.

        PyTorch's caching allocator then has blocks of the right size for what the pipeline keeps from step to step.
        Otherwise some of it lies in blocks that a denoiser's largest layers have left, and these need new ones.
        """
        latents = self.denoise(sample, range(0), None).latents
        with self._predicting(lambda _, *args, **kwargs: _zeros(latents, args, kwargs)):
            self.denoise(sample, range(min(2, self.total_steps)), None)

    @contextmanager
    def _predicting(self, predict: Callable[..., Any]) -> Iterator[None]:
        """Have `predict`, which gets a denoiser's name and arguments, answer for all denoisers."""
        real = self.official.denoisers
        for name, module in real.items():
            self.official.replace(name, _Answering(module, partial(predict, name)))
        try:
            yield
        finally:
            for name, module in real.items():
                self.official.replace(name, module)

    @contextmanager
    def seeing(self, predictions: list[Any]) -> Iterator[None]:
        """Keep what the denoisers return."""
        hooks = [
            module.register_forward_hook(lambda _module, _args, made: predictions.append(made))
            for module in self.official.denoisers.values()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _zeros(latents: Tensor, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A prediction for these arguments of a denoiser."""
    given = sample_of(args, kwargs)
    return as_asked(given.new_zeros(len(given), *latents.shape[1:]), kwargs.get("return_dict", True))


class _Answering(nn.Module):
    """Looks like a denoiser, and has a function predict."""

    def __init__(self, denoiser: nn.Module, predict: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["denoiser"], self.predict = denoiser, predict

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.predict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["denoiser"], name)
