"""What a rank holds and sends in a training step, and what it does when."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Span:
    """Something that a rank did in a step.

    Attributes:
        kind: forward, backward, send, wait, optimizer.
        begin, end: seconds since the step began.
        cpu: seconds of them in which this rank's thread computed, on a CPU.
        micro_batch, chunk: of a pipeline; 0 elsewhere.
    """

    kind: str
    begin: float
    end: float
    micro_batch: int = 0
    chunk: int = 0
    cpu: float = 0.0


class Timeline:
    """The spans of one step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.at_start: Callable[[str], None] | None = None  # called with the kind of each span that begins
        self.restart()

    def restart(self) -> None:
        """Forget the spans, and let a step begin now."""
        self.spans: list[Span] = []
        self.began = time.perf_counter()

    def now(self) -> float:
        """Seconds since the step began, after the device's work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - self.began

    @contextmanager
    def span(self, kind: str, micro_batch: int = 0, chunk: int = 0) -> Iterator[None]:
        """Record what happens inside."""
        if self.at_start is not None:
            self.at_start(kind)
        begin, cpu = self.now(), time.thread_time()
        yield
        self.spans.append(Span(kind, begin, self.now(), micro_batch, chunk, time.thread_time() - cpu))


@dataclass(frozen=True)
class Sent:
    """What a rank sent by one kind of collective in one group.

    Attributes:
        collective: all_reduce, all_gather, reduce_scatter, broadcast or send.
        group: the mesh dimension of the group; "all" for all ranks.
    """

    collective: str
    group: str
    calls: int
    bytes: float


def _whole(size: float, ranks: int) -> float:
    return size


def _ring(size: float, ranks: int) -> float:
    """What each rank sends of a message of `size` bytes that ends up, or began, in N pieces."""
    return size * (ranks - 1) / ranks


def _twice(size: float, ranks: int) -> float:
    return 2 * _ring(size, ranks)


_A_NUMBER = 8  # bytes; such a message reports a loss, and is no part of the training
_COUNTED = {  # operator -> collective, the argument that is the whole message (-1: the result), bytes sent of it
    "c10d::allreduce_": ("all_reduce", 0, _twice),
    "c10d::_allgather_base_": ("all_gather", 0, _ring),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1, _ring),
    "c10d::send": ("send", 0, _whole),
    "_c10d_functional::all_reduce": ("all_reduce", 0, _twice),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", -1, _ring),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0, _ring),
}


class Traffic(TorchDispatchMode):
    """Counts the bytes that this rank sends, in the backward pass, too."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[str, str], list[float]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back with the local tensors
        result = func(*args, **(kwargs or {}))
        if (known := _COUNTED.get(func._schema.name)) is not None:
            collective, at, sent = known
            group, size = _group(args), _size(result if at < 0 else args[at])
            if size > _A_NUMBER:
                counted = self.found.setdefault((collective, _label(group)), [0, 0])
                counted[0] += 1
                counted[1] += sent(size, group.size())
        return result

    def sent(self) -> list[Sent]:
        """Everything so far."""
        return [Sent(*kind, int(calls), size) for kind, (calls, size) in sorted(self.found.items())]


def _group(args: Sequence[Any]) -> ProcessGroup:
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                return ProcessGroup.unbox(value)
            except RuntimeError:  # the kind of reduction
                continue
    return torch.distributed.distributed_c10d._resolve_process_group(args[-1])


def _label(group: ProcessGroup) -> str:
    return {"default_pg": "all", "undefined": "all"}.get(group.group_desc, group.group_desc)


def _size(value: Any) -> int:
    return value.nbytes if isinstance(value, Tensor) else sum(map(_size, value))


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; other tensors as they are."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def held(tensors: Sequence[Tensor]) -> int:
    """Bytes of this rank's memory that tensors use, each storage counted once."""
    storages = {storage._cdata: storage.nbytes() for storage in (local(one).untyped_storage() for one in tensors)}
    return sum(storages.values())


@dataclass
class Memory:
    """Bytes that a rank holds in a step.

    Attributes:
        parameters, gradients: of this rank's modules, the gradients as the optimizer finds them.
        optimizer: Adam's moments.
        activations: most that was kept at once for the backward pass.
        gathered: whole parameters, beside the rank's own, when the backward pass begins.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    gathered: int = 0


class _Held:
    """A tensor that is kept for the backward pass, counted as long as this object exists."""

    def __init__(self, tensor: Tensor, kept: Activations) -> None:
        self.tensor, self.kept = tensor, kept
        kept.add(tensor, 1)

    def __del__(self) -> None:
        self.kept.add(self.tensor, -1)


class Activations:
    """Counts what autograd keeps for the backward pass: each storage once, parameters not.

    Attributes:
        counting: the one that counts at present.
        now, most: bytes.
    """

    counting: Activations | None = None

    def __init__(self, parameters: dict[int, Any]) -> None:
        self.parameters, self.users = parameters, dict[int, int]()
        self.now = self.most = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is kept inside."""
        Activations.counting = self
        try:
            with saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            Activations.counting = None

    def add(self, tensor: Tensor, users: int) -> None:
        """Count a tensor as kept once more, or with -1 once less."""
        storage = local(tensor).untyped_storage()
        before = self.users.get(storage._cdata, 0)
        self.users[storage._cdata] = before + users
        if before == 0 or before + users == 0:
            self.now += users * storage.nbytes()
            self.most = max(self.most, self.now)

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps instead of a tensor."""
        is_parameter = local(tensor).untyped_storage()._cdata in self.parameters
        return tensor if is_parameter else _Held(tensor, self)

    @staticmethod
    def unpack(kept: Any) -> Tensor:
        """The tensor again."""
        return kept.tensor if isinstance(kept, _Held) else kept


def recomputation() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a checkpoint's forward pass and of its recomputation, in which activations are counted, too."""
    return nullcontext(), _recomputed()


@contextmanager
def _recomputed() -> Iterator[None]:
    """Count what a checkpoint keeps as it computes again, until it has computed all of it.

    That is kept by hooks of the checkpoint's own: they are called from ours.
    """
    counting, hooks = Activations.counting, torch._C._autograd._top_saved_tensors_default_hooks(True)
    if counting is None or hooks is None:
        yield
        return
    packed: list[Any] = []

    def pack(tensor: Tensor) -> Any:
        packed.append(counting.pack(tensor))
        return hooks[0](tensor)

    try:
        with saved_tensors_hooks(pack, hooks[1]):
            yield
    finally:
        packed.clear()  # the frame lives on in the traceback of the exception that ends a recomputation early


class Meter:
    """Measures one training step of a technique: `memory` and `sent`.

    Activations are counted where autograd keeps them, by hooks on saved tensors: the bytes that the formulas are about.
    torch's MemTracker counts every tensor that is alive, temporaries of the backward pass included.
    """

    def __init__(self, modules: Sequence[nn.Module], optimizer: Optimizer, timeline: Timeline) -> None:
        self.modules, self.optimizer, self.timeline = modules, optimizer, timeline
        self.memory, self.sent = Memory(), list[Sent]()
        self._seen: dict[int, Any] = {}  # storages of all parameters that were computed with
        self._own: set[int] = set()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the step inside."""
        own = list(self._parameters())
        self._own = {local(one).untyped_storage()._cdata for one in own}
        self.memory.parameters = held(own)
        activations, traffic = Activations(self._seen), Traffic()
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._called).remove)
            stack.callback(
                register_module_forward_hook(self._called).remove
            )  # FSDP has gathered what a unit has itself
            stack.callback(self.optimizer.register_step_pre_hook(self._before_step).remove)
            stack.callback(self.optimizer.register_step_post_hook(self._after_step).remove)
            self.timeline.at_start = self._at_start
            stack.callback(setattr, self.timeline, "at_start", None)
            stack.enter_context(activations.counted())
            stack.enter_context(traffic)
            yield
        self.memory.activations, self.sent = activations.most, traffic.sent()
        self._seen.clear()

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for module in self.modules for parameter in module.parameters())

    def _called(self, module: nn.Module, *_: Any) -> None:
        """Note what a module computes with: its own parameters, or gathered or cast ones."""
        for parameter in module._parameters.values():
            if parameter is not None:
                storage = local(parameter).untyped_storage()
                self._seen[storage._cdata] = storage

    def _at_start(self, kind: str) -> None:
        if kind == "backward":
            gathered = sum(storage.nbytes() for key, storage in self._seen.items() if key not in self._own)
            self.memory.gathered = max(self.memory.gathered, gathered)

    def _before_step(self, *_: Any) -> None:
        self.memory.gradients = held([one.grad for one in self._parameters() if one.grad is not None])

    def _after_step(self, *_: Any) -> None:
        states = self.optimizer.state.values()
        self.memory.optimizer = held(
            [value for state in states for value in state.values() if isinstance(value, Tensor)]
        )
