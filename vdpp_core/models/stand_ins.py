"""What stands in a pipeline for modules that are not there: encoders, and a denoiser that is not needed any more.

Encoding happens once, before the denoising, on one rank. Every rank's pipeline still calls its encoders, and gets what
they returned then; so only that rank ever loads them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

Answer = Callable[["StandIn", str, tuple, dict[str, Any]], Any]  # who is asked, method, arguments -> what it returns
VALUE = "value"  # asked for instead of a method: an attribute's value
MOST_KNOWN = 256  # answers that a Recorder does not ask for again
METHODS = ("forward", "encode", "decode", "get_image_features", "get_text_features")


class StandIn(nn.Module):
    """Has a module's configuration, type, device and attributes, and asks `answer`, set later, for what it returns.

    Args:
        name: of the pipeline's component.
        shell: the module on the meta device.
    """

    answer: Answer

    def __init__(self, name: str, shell: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.name = name
        self.__dict__["shell"] = shell  # not a child: it stays on the meta device
        self.looks = nn.Parameter(torch.empty(0, device=device, dtype=dtype), requires_grad=False)

    @property
    def dtype(self) -> torch.dtype:
        """Element type that the module would have."""
        return self.looks.dtype

    @property
    def device(self) -> torch.device:
        """Device that the module would be on."""
        return self.looks.device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a call."""
        return self.answer(self, "forward", args, kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(self.__dict__["shell"], name)
        if name in METHODS:
            return lambda *args, **kwargs: self.answer(self, name, args, kwargs)
        if isinstance(found, Tensor):  # a buffer, whose values are stored with the weights
            return self.answer(self, VALUE, (name,), {})
        return found


Answers = dict[str, list[Any]]  # component -> what it returned for a sample, in order


class Recorder:
    """Has another answer, and keeps what it returned in host memory; equal questions are asked once."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.known: dict[str, Any] = {}
        self.start()

    def start(self) -> Answers:
        """Begin with the answers for another sample, and return the dictionary that is to hold them."""
        self.answers: Answers = {}
        return self.answers

    def __call__(self, asked: StandIn, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        key = digest(asked.name, method, asked.dtype, args, kwargs)
        if key not in self.known:
            if len(self.known) == MOST_KNOWN:
                self.known.clear()
            self.known[key] = moved(self.answer(asked, method, args, kwargs), torch.device("cpu"))
        self.answers.setdefault(asked.name, []).append(self.known[key])
        return moved(self.known[key], asked.device)


class Player:
    """Answers with what was recorded, in the same order."""

    def play(self, answers: Answers) -> None:
        """Start at the first of a sample's answers."""
        self.answers = {name: iter(recorded) for name, recorded in answers.items()}

    def __call__(self, asked: StandIn, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        return moved(next(self.answers[asked.name]), asked.device)


class Real:
    """The modules themselves answer; each is loaded when it is first asked."""

    def __init__(self, load: Callable[[str], nn.Module]) -> None:
        self.load = load
        self.modules: dict[str, nn.Module] = {}

    def __call__(self, asked: StandIn, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        if asked.name not in self.modules:
            self.modules[asked.name] = self.load(asked.name)
        module = self.modules[asked.name]
        if module.dtype != asked.dtype:  # the pipeline has cast what stands for it
            nn.Module.to(module, asked.dtype)
        return _called(module, method, args, kwargs)


class Inventor:
    """Answers with random numbers, from a seed and the question; their shapes come from the meta device, which is slow
    and asked once for questions of the same shapes."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.known: dict[str, Any] = {}

    def __call__(self, asked: StandIn, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        generator = torch.Generator().manual_seed(self.seed ^ int(digest(method, args, kwargs)[:15], 16))
        args, kwargs = moved((args, kwargs), torch.device("meta"))
        looks = digest(asked.name, method, asked.dtype, args, kwargs)

        def draw(like: Tensor) -> Tensor:
            if not like.is_floating_point():
                return torch.zeros(like.shape, dtype=like.dtype, device=asked.device)
            return torch.randn(like.shape, generator=generator).to(asked.device, like.dtype)

        if looks not in self.known:
            with _Agreeing():
                self.known[looks] = _called(nn.Module.to(asked.shell, asked.dtype), method, args, kwargs)
        return replaced(self.known[looks], draw)


class _Agreeing(TorchFunctionMode):
    """Says yes to whoever asks a tensor on the meta device, such as whether its mask lets everything through."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return True if func is Tensor.__bool__ and args[0].is_meta else func(*args, **(kwargs or {}))


def _called(module: nn.Module, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    if method == VALUE:
        return getattr(module, *args)
    return module(*args, **kwargs) if method == "forward" else getattr(module, method)(*args, **kwargs)


def moved(value: Any, device: torch.device) -> Any:
    """The same with all its tensors on a device. Those on the meta device can go nowhere."""
    return replaced(value, lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def replaced(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of what a module took or returned, with each tensor changed: containers, outputs, distributions."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):  # diffusers' and transformers' outputs are dictionaries
        changed = {name: replaced(item, change) for name, item in value.items()}
        return type(value)(**changed) if hasattr(value, "to_tuple") else changed
    if isinstance(value, list | tuple):
        items = [replaced(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value).__module__.startswith("diffusers"):  # a distribution of latents
        made = object.__new__(type(value))
        vars(made).update({name: replaced(item, change) for name, item in vars(value).items()})
        return made
    return value


def sample_of(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """The first tensor of a denoiser's arguments, which is the latents."""
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def digest(*values: Any) -> str:
    """Hexadecimal digest of tensors' values and other objects' text."""
    digest = hashlib.sha256()
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            digest.update(repr((leaf.dtype, leaf.shape)).encode())
            if not leaf.is_meta:
                digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()
