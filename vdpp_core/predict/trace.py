"""Records what a step or a decoding allocates and frees, in order, by running it on the meta device."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from vdpp_core.config import RunConfig
from vdpp_core.config.layout import Parallel
from vdpp_core.models.architectures import PUBLISHED_VAE
from vdpp_core.models.stand_ins import moved, replaced
from vdpp_core.parallel import parallelize
from vdpp_core.parallel.group import Group

if TYPE_CHECKING:
    from vdpp_core.models.stage import Passes, Stage

META, HOST = torch.device("meta"), torch.device("cpu")
CLIP_SIZE = 224  # pixels a side, to which the pipeline brings an image for its encoder
MOST_REMEMBERED = 20_000  # a step of the published UNet adds some 700
MOST_CHUNKS = 256  # more chunks hardly raise the peak
STEPS = 3  # by then fragmentation has settled


class Event(NamedTuple):
    """An event of a trace.

    what: "alloc" (of `size` bytes, part "latents" or "activations", in a layer, or "parameters" of a decoder), "free",
    or "enter" and "leave" (a unit, whose number is the key).
    """

    what: str
    key: int
    size: int = 0
    part: str = "latents"
    layer: str = ""
    stream: int = 0


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP gathers together: rows and bytes per row of each."""

    name: str
    rows: tuple[tuple[int, int], ...]

    def shard(self, ranks: int) -> int:
        """Bytes that each of `ranks` ranks holds: ⌈rows / ranks⌉ rows of each parameter."""
        return sum(-(-rows // ranks) * size for rows, size in self.rows)


@dataclass(frozen=True)
class Trace:
    """What a rank allocates: parameters as they are loaded, then `events`.

    The first of `units` is the root: the parameters that belong to no other unit.
    """

    parameters: Unit
    units: tuple[Unit, ...]
    events: tuple[Event, ...]

    def beside(self, resident: Unit) -> Trace:
        """The same beside other parameters, which are there before and are never freed."""
        keys = itertools.count(1 + max(event.key for event in self.events))
        kept = [Event("alloc", next(keys), rows * size, "parameters") for rows, size in resident.rows]
        return replace(self, events=(*kept, *self.events))

    def then(self, decoding: Trace) -> Trace:
        """These steps, then a decoding, whose parameters are there all the time."""
        steps = self.beside(decoding.parameters)
        first = 1 + max(event.key for event in steps.events)
        own = [event._replace(key=first + event.key) for event in decoding.events]
        freed = {event.key for event in own if event.what == "free"}
        rest = [Event("free", event.key) for event in own if event.what == "alloc" and event.key not in freed]
        return replace(steps, events=(*steps.events, *own, *rest))


class Remembering(TorchDispatchMode):
    """Caches the outputs of operators on the meta device, which depend on the looks of their inputs alone, and counts
    floating-point operations, a multiplication and an addition as two.

    PyTorch computes those looks in Python, which takes most of a step's time there. Views are not cached.
    """

    known: ClassVar[dict[Any, tuple[bool, list[Any], int]]] = {}  # operator and inputs -> whether one, looks, flops

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and torch's guard against it takes as long as all the rest."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        tensors: list[Tensor] = []
        key = func, _looks(args, tensors), *((name, _looks(value, tensors)) for name, value in kwargs.items())
        if key in self.known:
            single, looks, flops = self.known[key]
            self.flops += flops
            made = [torch.empty_strided(shape, stride, dtype=dtype, device=META) for _, dtype, shape, stride in looks]
            return made[0] if single else tuple(made)
        out = func(*args, **kwargs)
        count = flop_registry.get(func.overloadpacket)
        self.flops += (flops := count(*args, **kwargs, out_val=out) if count else 0)
        found = _tensors(out) if tensors and all(tensor.is_meta for tensor in tensors) else []
        if found and all(_is_new(tensor, tensors) for tensor in found):
            if len(self.known) >= MOST_REMEMBERED:
                self.known.clear()
            self.known[key] = isinstance(out, Tensor), [_looks(tensor, []) for tensor in found], flops
        return out


def _looks(value: Any, tensors: list[Tensor]) -> Any:
    """What an operator on the meta device sees of an argument; collects its tensors."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.is_meta, value.dtype, value.shape, value.stride()
    if isinstance(value, list | tuple):
        return tuple(_looks(each, tensors) for each in value)
    return type(value), value


def _tensors(out: Any) -> list[Any]:
    """What an operator returned, if tensors."""
    return [out] if isinstance(out, Tensor) else [*out] if isinstance(out, list | tuple) else []


def _is_new(tensor: Any, inputs: list[Tensor]) -> bool:
    """Whether a tensor has a storage of its own, as `empty_strided` would allocate it."""
    if not isinstance(tensor, Tensor):
        return False
    storage = tensor.untyped_storage()
    if tensor.device != META or storage._cdata in {given.untyped_storage()._cdata for given in inputs}:
        return False
    plain = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
    return tensor.storage_offset() == 0 and storage.nbytes() == plain.untyped_storage().nbytes()


class _Recorder(Remembering):
    """Records when storages are allocated and freed, except those of parameters: on the meta device, and on that of
    the pipeline."""

    def __init__(self, parameters: list[Tensor], device: torch.device = META) -> None:
        super().__init__()
        self.device = device
        self.events: list[Event] = []
        self.layers: list[str] = []
        self.left_out = {tensor.untyped_storage()._cdata for tensor in parameters}
        self.alive: dict[int, int] = {}
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in _tensors(out):
            if isinstance(tensor, Tensor) and (tensor.is_meta or tensor.device == self.device):
                self._see(tensor.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address in self.left_out or address in self.alive:
            return
        self.count += 1
        self.alive[address] = self.count
        part = "activations" if self.layers else "latents"
        self.events.append(Event("alloc", self.count, storage.nbytes(), part, self.layers[-1] if self.layers else ""))
        weakref.finalize(storage, self._gone, address)

    def _gone(self, address: int) -> None:
        self.events.append(Event("free", self.alive.pop(address)))

    def leave_out(self, tensor: Tensor) -> None:
        """Do not count a tensor that stands for another one."""
        storage = tensor.untyped_storage()
        self.left_out.add(storage._cdata)
        weakref.finalize(storage, self.left_out.discard, storage._cdata)

    @contextmanager
    def watching(self, models: Iterable[nn.Module], units: list[nn.Module]) -> Iterator[None]:
        """Record which layer of the models is running, and when units begin and end."""
        numbers = {id(module): number for number, module in enumerate(units)}

        def enter(name: str, module: nn.Module) -> None:
            self.layers.append(name)
            if id(module) in numbers:
                self.events.append(Event("enter", numbers[id(module)]))

        def leave(module: nn.Module) -> None:
            self.layers.pop()
            if id(module) in numbers:
                self.events.append(Event("leave", numbers[id(module)]))

        hooks = []
        for name, module in (named for model in models for named in model.named_modules()):
            hooks.append(module.register_forward_pre_hook(lambda m, _, name=name: enter(name, m)))
            hooks.append(module.register_forward_hook(lambda m, *_: leave(m)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class _FusedAttention(TorchFunctionMode):
    """Fused attention: returns a tensor like the query and, unlike the meta device, allocates no matrix of scores."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return torch.empty_like(args[0] if args else kwargs["query"])
        return func(*args, **(kwargs or {}))


def _unit(name: str, parameters: list[Tensor]) -> Unit:
    shapes = ((tensor.shape[0], tensor[:1].numel() * tensor.element_size()) for tensor in parameters)
    return Unit(name, tuple(shapes))


def rehearse(denoiser: Any, layout: Parallel, member: int = 0, calls_per_step: int = 1) -> dict[str, Group]:
    """Make a denoiser on the meta device compute the share of one member of a lockstep group.

    Args:
        calls_per_step: see `vdpp_core.parallelize`.

    Returns:
        axis -> the group, which counts what it would send.
    """
    place = layout.coordinates(member)
    groups = {axis: Group(size, place[axis]) for axis, size in layout.lockstep_sizes.items() if size > 1}
    parallelize.split_forward(denoiser, groups, calls_per_step)
    return groups


def passes(config: RunConfig, dtype: torch.dtype) -> Passes:
    """How the run's pipeline guides, where a trace depends on it."""
    from vdpp_core.models.stage import Passes

    if config.is_svd:
        return Passes(1, config.guidance_passes)
    if (config.parallel or Parallel()).cfg == 1 and not config.sequential:
        return Passes(1, 1)
    return _passes(config.replace(parallel=None), dtype)


def calls_per_step(config: RunConfig, dtype: torch.dtype) -> int:
    """How often a rank of another pipeline than SVD calls a denoiser in a step: for each pass that is not stacked."""
    return _passes(config.replace(parallel=None), dtype).calls // (config.parallel or Parallel()).cfg or 1


@functools.lru_cache(maxsize=64)
def _passes(config: RunConfig, dtype: torch.dtype) -> Passes:
    from vdpp_core import models
    from vdpp_core.models.stage import Stage
    from vdpp_core.models.stand_ins import Inventor, Recorder

    stage = Stage.around(config, models.denoisers_on_meta(config, dtype), HOST, dtype, Marks([]))
    stage.encode([0], Recorder(Inventor(0)))
    return stage.loop(0).passes


class Marks:
    """Takes the place of a stage's stopwatch: where in the list of events its spans begin and end."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events
        self.begun: list[int] = []
        self.ended: list[int] = []

    def start(self) -> None:
        """Note a beginning."""
        self.begun.append(len(self.events))

    def stop(self) -> float:
        """Note an end; no seconds are known."""
        self.ended.append(len(self.events))
        return 0.0


def pipeline_device(config: RunConfig) -> torch.device:
    """Where the pipeline around the denoisers runs: most look at the values of their masks, and experts at timesteps,
    which meta has none of."""
    return META if config.is_svd and not config.svd_experts else HOST


def before_step(
    config: RunConfig,
    denoisers: dict[str, Any],
    dtype: torch.dtype,
    marks: Marks,
    arrives: Callable[[Tensor], None] = lambda _: None,
) -> Stage:
    """A stage around denoisers on the meta device, whose encoders are done.

    Args:
        arrives: called with each tensor on the meta device that stands for one which the pipeline has passed on.
    """
    from vdpp_core.models.stage import Stage
    from vdpp_core.models.stand_ins import Inventor, Recorder
    from vdpp_core.parallel import guidance

    one_by_one = config.sequential and passes(config, dtype).stacked == 2
    for denoiser in denoisers.values():
        if one_by_one:
            guidance.one_after_the_other(denoiser)
        if pipeline_device(config) == HOST:
            _enter_meta(denoiser, arrives)
    stage = Stage.around(config, denoisers, pipeline_device(config), dtype, marks)
    if pipeline_device(config) == META:
        _without_pixels(stage, config)
    stage.encode([0], Recorder(Inventor(0)))
    return stage


def encoders(config: RunConfig, like: RunConfig, dtype: torch.dtype) -> Unit:
    """The parameters of the encoders that a pipeline asks before its loop.

    Args:
        config: of a sample.
        like: as for `step`.
    """
    from vdpp_core import models
    from vdpp_core.models import pipelines

    asked = before_step(like, models.denoisers_on_meta(like, dtype), dtype, Marks([])).recording[0].answers
    shells = {name: shell for name, shell in pipelines.shells(config).items() if name in asked}
    for shell in shells.values():
        upcast = dtype == torch.float16 and getattr(shell.config, "force_upcast", False)
        nn.Module.to(shell, torch.float32 if upcast else dtype)
    return _unit("", [each for shell in shells.values() for each in shell.parameters()])


def _without_pixels(stage: Stage, config: RunConfig) -> None:
    """Have SVD's pipeline prepare an image on the meta device: the host may not have room for a large one."""
    width, height = config.image_size
    given = stage.arguments(0) | {"image": torch.empty(1, 3, height, width, device=META)}
    stage.arguments = lambda _: given
    seen = SimpleNamespace(pixel_values=torch.empty(1, 3, CLIP_SIZE, CLIP_SIZE, device=META))
    stage.official.replace("feature_extractor", lambda **_: seen)
    stage.pipeline.video_processor.register_to_config(do_normalize=False)  # it would look at the values


def _enter_meta(denoiser: nn.Module, arrives: Callable[[Tensor], None]) -> None:
    """Have a denoiser on the meta device take the host's tensors, and return zeros there."""

    def enter(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        with _disable_current_modes():
            given = moved((args, kwargs), META)
        for tensor in tree_leaves(given):
            if isinstance(tensor, Tensor):
                arrives(tensor)
        return given

    def leave(_: nn.Module, _args: tuple, made: Any) -> Any:
        return replaced(made, lambda tensor: torch.zeros_like(tensor, device=HOST))

    denoiser.register_forward_pre_hook(enter, with_kwargs=True)
    denoiser.register_forward_hook(leave)


@functools.lru_cache(maxsize=64)
def step(config: RunConfig, dtype: torch.dtype, only: tuple[str, ...] | None = None) -> Trace:
    """Trace denoising steps of a rank: what the pipeline makes before its loop, then STEPS turns of the loop; with
    several experts, those around the latest boundary between them.

    About a second for the published UNet. No weights are read; model svd needs no download.

    Args:
        only: the denoisers that the rank holds, if not all.
    """
    from vdpp_core import models
    from vdpp_core.parallel.fsdp_units import units

    denoisers = nn.ModuleDict(models.denoisers_on_meta(config, dtype, only))
    calls = passes(config, dtype).calls
    for denoiser in denoisers.values():
        rehearse(denoiser, config.layout, calls_per_step=calls)
    pieces = [piece for denoiser in denoisers.values() for piece in (denoiser, *units(denoiser))]
    recorder = _Recorder(list(denoisers.parameters()), pipeline_device(config))
    marks = Marks(recorder.events)
    stage = before_step(config, dict(denoisers), dtype, marks, recorder.leave_out)
    with _FusedAttention(), recorder, recorder.watching(denoisers.values(), pieces):
        stage.make_room(0)
        stage.denoise(0, _window(config, only), None)
    events = tuple(recorder.events[: marks.ended[-1]])
    return Trace(_unit("", list(denoisers.parameters())), _units(denoisers, pieces), events)


def _window(config: RunConfig, only: tuple[str, ...] | None) -> range:
    """The steps to be traced: among those of the given experts, with the largest of what the pipeline makes at once."""
    own = [steps for name, steps in config.segments(range(config.total_steps)) if name in (only or (name,))]
    first = own[0].start if len(own) == 1 else max(own[0].start, own[-1].start - STEPS + 1)
    return range(first, min(first + STEPS, own[-1].stop))


def _units(denoisers: nn.ModuleDict, pieces: list[nn.Module]) -> tuple[Unit, ...]:
    """The parameters that FSDP gathers with each piece: a denoiser gathers those that no piece within it has."""
    names = {id(module): name for denoiser in denoisers.values() for name, module in denoiser.named_modules()}
    within = [piece for piece in pieces if names[id(piece)]]
    own = {id(parameter) for piece in within for parameter in piece.parameters()}
    return tuple(
        _unit(name, [each for each in piece.parameters() if name or id(each) not in own])
        for piece in pieces
        for name in (names[id(piece)],)
    )


@functools.lru_cache(maxsize=64)
def decoding(config: RunConfig, dtype: torch.dtype) -> Trace:
    """Trace the decoding of one sample, chunk by chunk as in a run; of a very long video, only the beginning."""
    from vdpp_core.models.decoding import decode  # takes seconds to import

    pipeline: Any = SimpleNamespace(vae=_vae(config, dtype))  # all that decode_latents needs
    vae = pipeline.vae
    recorder = _Recorder(list(vae.parameters()))
    batch, channels, frames, rows, columns = config.shape
    frames = min(frames, MOST_CHUNKS * config.decode_chunk_size)
    with torch.no_grad(), _FusedAttention(), recorder:
        latents = torch.empty(batch, frames, channels, rows, columns, device=META, dtype=vae.dtype)
        with recorder.watching([vae], []):
            pixels = decode(pipeline, latents, frames, config.decode_chunk_size)
        events = tuple(recorder.events)
        del pixels
    whole = _unit("", list(vae.parameters()))
    return Trace(whole, (whole,), events)


def _vae(config: RunConfig, dtype: torch.dtype) -> Any:
    """Make the VAE without weights, in the type it decodes in: fp32 where an fp16 VAE asks for that."""
    from diffusers import AutoencoderKLTemporalDecoder

    architecture = PUBLISHED_VAE
    if config.source is not None:
        architecture = AutoencoderKLTemporalDecoder.load_config(config.source, subfolder="vae")
    with torch.device("meta"):
        vae: Any = AutoencoderKLTemporalDecoder.from_config(architecture)
    upcast = dtype == torch.float16 and vae.config.force_upcast
    return nn.Module.to(vae, "meta", torch.float32 if upcast else dtype)
