"""A pipeline's scheduler that shows the pipeline a part of the timesteps, and whose memory of earlier ones can travel.

A pipeline asks its scheduler for the timesteps and loops over them. A scheduler that shows fewer makes the pipeline's
own loop a stage of the step pipeline, while the solver still knows the whole schedule.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_OWN = ("timesteps", "config")
_PREVIOUS = "old_pred_original_sample"  # CogVideoX's pipeline keeps it in a variable, and passes it to `step`


class Solver:
    """A copy of a scheduler for use in a pipeline, `scheduler`, which shows the steps that `show` names.

    Args:
        scheduler: any scheduler of diffusers with `set_timesteps` and `step`.
        total_steps: the `num_inference_steps` of the pipeline's call. A step is one timestep, or for schedulers with
            more of them (PNDM, Heun) its share of them.
    """

    def __init__(self, scheduler: Any, total_steps: int) -> None:
        self.kind, self.total_steps = type(scheduler), total_steps
        self.scheduler = copy.deepcopy(scheduler)
        self.name = self.kind.__name__
        methods: dict[str, Any] = {
            name: _as_method(getattr(self, f"_{name}"), getattr(self.kind, name))
            for name in ("set_timesteps", "step", "set_begin_index")
            if hasattr(self.kind, name)
        }
        self.scheduler.__class__ = type(self.name, (self.kind,), methods)
        self.untouched = _copied(vars(self.scheduler))
        self.takes_previous = _PREVIOUS in inspect.signature(self.kind.step).parameters
        self.show(range(total_steps), {})

    def show(self, steps: range, memory: dict[str, Any], step_done: Callable[[int], None] = lambda _: None) -> None:
        """Make the next loop of the pipeline these steps.

        Args:
            memory: what `memory` returned after the steps before; empty before step 0.
            step_done: called with each step's number when it is done.
        """
        self.steps, self.given, self.step_done = steps, memory, step_done
        self.taken = 0

    @property
    def step(self) -> int:
        """The step that the loop is in: that of the next timestep."""
        return ((self.first + self.taken + 1) * self.total_steps - 1) // len(self.whole)

    def memory(self) -> dict[str, Any]:
        """What the solver has changed since the pipeline set the timesteps: history, counters. Attribute -> value."""
        changed = {
            name: value
            for name, value in sorted(vars(self.scheduler).items())
            if name not in _OWN and not (name in self.fresh and _is_same(value, self.fresh[name]))
        }
        return _copied(changed)

    def _set_timesteps(self, *args: Any, **kwargs: Any) -> None:
        own = self.scheduler
        vars(own).clear()
        vars(own).update(_copied(self.untouched))  # some solvers leave things behind for the next sample
        given = inspect.signature(self.kind.set_timesteps).bind(own, *args, **kwargs)
        device = torch.device(given.arguments.get("device") or "cpu")
        if device.type == "meta":  # no solver can work out its timesteps there
            given.arguments["device"] = "cpu"
        self.kind.set_timesteps(*given.args, **given.kwargs)
        own.timesteps = self.whole = own.timesteps.to(device)
        number = len(self.whole)
        self.first, stop = (edge * number // self.total_steps for edge in (self.steps.start, self.steps.stop))
        if hasattr(self.kind, "set_begin_index"):
            self.kind.set_begin_index(own, self.first)
        self.fresh = _copied(vars(own))
        vars(own).update(_copied(self.given))
        own.timesteps = self.whole[self.first : stop]

    def _set_begin_index(self, begin_index: int = 0) -> None:
        self.kind.set_begin_index(self.scheduler, self.first)

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        own, index = self.scheduler, self.first + self.taken
        if self.takes_previous:
            args, kwargs = self._with_previous(index, args, kwargs)
        shown, own.timesteps = own.timesteps, self.whole  # some solvers count them
        try:
            made = self.kind.step(own, *args, **kwargs)
        finally:
            own.timesteps = shown
        if self.takes_previous:
            setattr(own, _PREVIOUS, made[1])
        step = self.step
        self.taken += 1
        if self.step > step:
            self.step_done(step)
        return made

    def _with_previous(self, index: int, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The arguments of `step`, with what the loop would know from the step before."""
        if self.taken or index == 0:
            return args, kwargs
        given = inspect.signature(self.kind.step).bind(self.scheduler, *args, **kwargs)
        given.arguments |= {_PREVIOUS: getattr(self.scheduler, _PREVIOUS, None), "timestep_back": self.whole[index - 1]}
        return given.args[1:], given.kwargs


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """The same attributes; lists are copied, because solvers change them in place."""
    return {name: copy.copy(value) if isinstance(value, list) else value for name, value in attributes.items()}


def _as_method(function: Callable[..., Any], replaced: Callable[..., Any]) -> Callable[..., Any]:
    """A function in the place of a method, whose signature pipelines look at; it ignores the object."""

    @functools.wraps(replaced)
    def method(_: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return method


def _is_same(value: Any, before: Any) -> bool:
    """Whether an attribute is what it was; tensors by identity, lists item by item."""
    if isinstance(value, list | tuple) and isinstance(before, list | tuple):
        return len(value) == len(before) and all(map(_is_same, value, before))
    if isinstance(value, Tensor) or isinstance(before, Tensor):
        return value is before
    return value is before or (type(value) is type(before) and bool(value == before))
