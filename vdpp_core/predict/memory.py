"""Peak memory of a rank before it runs, and whether it fits a device. Needs no GPU, no weights and no other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from vdpp_core import models
from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError, in_one_line
from vdpp_core.config.execution import Execution, resolve
from vdpp_core.config.layout import Parallel
from vdpp_core.parallel import devices, tensor
from vdpp_core.parallel.devices import GIB
from vdpp_core.predict import communicators, trace
from vdpp_core.predict.allocator import FullError
from vdpp_core.predict.replay import Peak, peak, play, room_needed

# Device memory outside PyTorch's allocator on one rank: CUDA's context, the libraries' own memory, and what is not
# modelled. NCCL's communicators come on top (vdpp_core/predict/communicators.py).
# Derived from the published run that ran out of memory (reference/a5000x7.json, row 4), which therefore cannot test it:
# of 23.68 GiB, 2.75 were free and 20.93 in use; the allocator modelled here holds 20.23 at that same request of
# 2.75 GiB. `make gpu-check` measures it on other cards.
CONTEXT_GIB = 0.71
# On a CPU: oneDNN's copies of tensors in the layouts it prefers, and what libraries allocate on first use.
# tests/benchmarks/memory.py measured 3 to 5 % above the prediction on one rank, 2 to 11 % with FSDP.
CPU_ALLOWANCE, CPU_CONSTANT = 1.1, 30e6
MOST_RANKS, POWERS = 8, (2, 4, 8)
LARGEST_GIB = 1e6
WIDEST_OF_SMALL = 96  # channels of the tiny model
CALL = ("prompt", "negative_prompt", "image", "call", "num_frames", "height", "width")  # of a pipeline


def predict(config: RunConfig) -> Peak:
    """Peak memory of a denoising step, on a rank of the stage that needs most. About a second for the published UNet,
    once for each shape and mode.

    With `--decode as-ready`, the last stage decodes between its steps, and always holds the VAE.

    Counts everything that PyTorch's operators allocate, but no workspaces inside kernels (cuDNN, oneDNN).

    Raises:
        ConfigError: the video is too large for the meta device.
    """
    return max(_peaks(config).values(), key=lambda peak: peak.total)


def per_stage(config: RunConfig) -> list[Peak]:
    """`predict` for a rank of each stage. Stages differ where they hold different experts, encoders or the VAE.

    Raises:
        ConfigError: the video is too large for the meta device.
    """
    found = _peaks(config)
    return [found[_kind(config, stage)] for stage in range((config.parallel or Parallel()).pp)]


def _peaks(config: RunConfig) -> dict[Kind, Peak]:
    offload = config.fsdp_cpu_offload
    return {
        kind: max((peak(trace, shards, offload) for trace, shards in held), key=lambda peak: peak.total)
        for kind, held in _traces(config).items()
    }


def predict_decoding(config: RunConfig) -> Peak | None:
    """Peak memory of decoding a sample in chunks of `decode_chunk_size` frames, after the UNet is freed or, with
    `--decode as-ready`, beside it; None without a VAE, and for other pipelines than Stable Video Diffusion, whose
    decoding is not predicted."""
    if not config.is_svd:
        return None
    if config.model in ("dummy", "medium") and config.model_id is None:
        return None
    if config.model_id is not None and Path(config.model_id).is_dir() and not (Path(config.model_id) / "vae").is_dir():
        return None
    return predict(config) if config.decode == "as-ready" else peak(_decoding(config))


@dataclass(frozen=True)
class Fit:
    """Whether a rank fits with all allowances; if not, on a GPU, the size of the request that fails, in bytes."""

    fits: bool
    request: int | None = None


def fit(config: RunConfig, capacity: float) -> Fit:
    """Whether a rank fits a device of `capacity` bytes: its steps and, where videos are made, their decoding.

    On a GPU, the caching allocator's decisions are replayed one by one, fragmentation included, in what `outside`
    leaves. On a CPU, the peak times CPU_ALLOWANCE plus CPU_CONSTANT must fit.
    """
    if resolve(config).device_type == "cpu":
        return Fit(needed(config) <= capacity)
    try:
        for phase in _phases(config):
            play(*phase, capacity - outside(config))
    except FullError as full:
        return Fit(False, full.request)
    return Fit(True)


def needed(config: RunConfig) -> int:
    """The smallest device that a rank fits, in bytes, as by `fit`."""
    if resolve(config).device_type == "cpu":
        return int(max(peak(*phase).total for phase in _phases(config)) * CPU_ALLOWANCE + CPU_CONSTANT)
    return max(room_needed(*phase) for phase in _phases(config)) + outside(config)


def outside(config: RunConfig) -> int:
    """Bytes that the rank with most communicators uses on a GPU outside PyTorch's allocator; 0 on a CPU."""
    if resolve(config).device_type == "cpu":
        return 0
    gib_each, _ = communicators.gib_each()
    return int((CONTEXT_GIB + communicators.most(config) * gib_each) * GIB)


def outside_a_limit(config: RunConfig) -> int:
    """Bytes of the emulated device beyond a run's memory limit, which on CUDA limits PyTorch's allocator only."""
    limited = config.memory_limit_gib is not None
    return outside(config) if limited and resolve(config).device_type == "cuda" else 0


def device_gib(config: RunConfig, capacity_gib: float | None) -> float | None:
    """Memory of a rank's device in GiB: as given, or else as the run's memory limit implies; None without either."""
    if capacity_gib is None and config.memory_limit_gib is not None:
        return config.memory_limit_gib + outside_a_limit(config) / GIB
    return capacity_gib


def report(config: RunConfig, capacity_gib: float | None) -> dict[str, Any]:
    """What `python -m vdpp_core memory` prints: parts and peak in GB (1e9 bytes), what fits in GiB, and remedies.

    Raises:
        ConfigError: the capacity is not positive, or below the parameters of a rank.
    """
    if capacity_gib is not None:
        check_capacity(capacity_gib)
    expected, decoding = predict(config), predict_decoding(config)
    opened, (gib_each, known) = communicators.most(config), communicators.gib_each()
    facts: dict[str, Any] = {
        **expected.in_gb(),
        "peak_layer": expected.layer,
        "peak_gb_per_stage": [each.total / 1e9 for each in per_stage(config)],
        "largest_unit": expected.largest_unit.name,
        "largest_unit_gb": expected.largest_unit.shard(1) / 1e9,
        "decoding_peak_gb": decoding and decoding.total / 1e9,
        "other_stages_peak_gb": predict(config.replace(decode="at-end")).total / 1e9,
        "communicators": opened,
        "communicators_gb": opened * gib_each * GIB / 1e9,
        "communicator_gib": gib_each,
        "communicator_source": known,
    }
    if capacity_gib is None:
        return facts
    if expected.parameters > capacity_gib * GIB:
        allowed = f"must be above the parameters of a rank, {expected.parameters / GIB:.3f} GiB"
        raise ConfigError("capacity_gib", capacity_gib, allowed)
    capacity = capacity_gib * GIB
    found = fit(config, capacity)
    return facts | {
        "capacity_gib": capacity_gib,
        "needed_gib": needed(config) / GIB,
        "fits": found.fits,
        "failing_request_gib": found.request and found.request / GIB,
        "remedies": [] if found.fits else remedies(config, capacity),
        "decode_chunk_size_that_fits": decoding and _chunk_that_fits(config, capacity),
    }


def check_capacity(capacity_gib: float) -> None:
    """Check the memory of a device in GiB.

    Raises:
        ConfigError: it is not positive, or larger than any device.
    """
    if not isinstance(capacity_gib, Real) or not 0 < capacity_gib <= LARGEST_GIB:
        raise ConfigError("capacity_gib", capacity_gib, f"must be finite and above 0, at most {LARGEST_GIB:g}")


def _chunk_that_fits(config: RunConfig, capacity: float) -> int | None:
    """The largest decode_chunk_size that fits, found by halving; None if not even 1 does."""
    size, allowed = config.decode_chunk_size, _allowed_for_decoding(config, capacity)
    while size and (peak := predict_decoding(config.replace(decode_chunk_size=size))) and peak.total > allowed:
        size //= 2
    return size or None


def _allowed_for_decoding(config: RunConfig, capacity: float) -> float:
    if resolve(config).device_type == "cpu":
        return (capacity - CPU_CONSTANT) / CPU_ALLOWANCE
    return capacity - outside(config)


def remedies(config: RunConfig, capacity: float) -> list[str]:
    """Flags or sizes, each of which alone would make a run fit `capacity` bytes; with FSDP the fewest ranks."""
    if not config.is_svd:
        return _with_fsdp(config, capacity, "")
    modes: dict[str, dict[str, Any]] = {}
    if config.guidance_passes > config.calls_per_step:
        modes["--guidance-mode sequential"] = {"guidance_mode": "sequential"}
    if not config.chunked and config.model != "dummy":
        modes["--forward-chunking"] = {"forward_chunking": True}
    if len(modes) == 2:
        modes["--enable-memory-opt (both)"] = {"enable_memory_opt": True}
    found = [words for words, change in modes.items() if fit(config.replace(**change), capacity).fits]
    found += _with_lockstep(config, capacity)
    found += _with_fsdp(config, capacity, "")
    if not found and modes:
        words, change = list(modes.items())[-1]
        found += _with_fsdp(config.replace(**change), capacity, f"{words} ")
    if config.command == "generate" and fit(config.replace(decode_chunk_size=1), capacity).fits:
        found.append("--decode-chunk-size 1")
    if config.decode == "as-ready" and fit(config.replace(decode="at-end"), capacity).fits:
        found.append("--decode at-end")
    if frames := _frames_that_fit(config, capacity):
        found.append(f"{frames} frame{'s' * (frames > 1)} instead of {config.shape[2]}")
    return found


def _with_lockstep(config: RunConfig, capacity: float) -> list[str]:
    """CFG parallel, or the fewest ranks that the frames, or the layers (tp), must be split over."""
    layout, frames = config.parallel or Parallel(), config.shape[2]
    if config.model == "dummy" or layout.lockstep > 1:
        return []
    found, sizes = [], dict[str, Sequence[int]]()
    if config.guidance_passes > config.calls_per_step:
        sizes["cfg"] = (2,)
    peak, most = predict(config), needed(config)
    enough = (
        ranks
        for ranks in range(2, min(MOST_RANKS, frames) + 1)
        if most - (peak.total - peak.parameters) * (1 - -(-frames // ranks) / frames) < capacity
    )
    if (fewest := next(enough, None)) is not None:
        sizes["frames"] = range(fewest, min(fewest + 2, MOST_RANKS, frames) + 1)
    sizes["tp"] = [ranks for ranks in POWERS if most / ranks < capacity]
    run = config.replace(fsdp_same_sample=False)
    for axis, ranks in sizes.items():
        layouts = [Parallel(**(layout.model_dump() | {axis: size})) for size in ranks]
        fitting = (each for each in layouts if fit(run.replace(parallel=each), capacity).fits)
        if (more := next(fitting, None)) is not None:
            found.append(f"--{axis} {more.sizes[axis]} on {more.world_size} ranks")
    return found


def _with_fsdp(config: RunConfig, capacity: float, words: str) -> list[str]:
    own = config.parallel or Parallel()
    fewest = own.dp + 1 if own.fsdp else 1 if own.lockstep > 1 else 2
    with suppress(ConfigError):  # a pipeline that cannot be sharded
        for replicas in range(fewest, MOST_RANKS // own.lockstep + 1):
            layout = Parallel(**(own.model_dump() | {"dp": replicas, "fsdp": True}))
            if fit(config.replace(parallel=layout), capacity).fits:
                return [f"{words}--fsdp on {layout.world_size} ranks"]
    return []


def _frames_that_fit(config: RunConfig, capacity: float) -> int | None:
    """Activations grow linearly with the frames: interpolate between two counts, then check."""
    batch, channels, frames, rows, columns = config.shape

    def of(count: int) -> RunConfig:
        return config.replace(latent_shape=(batch, channels, count, rows, columns))

    few = max(1, frames // 2)
    least, most = needed(of(few)), needed(config)
    if few == frames or most <= least:
        return None
    guess = min(frames - 1, few + int((capacity - least) / ((most - least) / (frames - few))))
    return next((count for count in (guess, guess - 1) if count >= 1 and fit(of(count), capacity).fits), None)


def _phases(config: RunConfig) -> list[tuple[trace.Trace, int, bool]]:
    """The phases of all ranks: trace, shards, whether the shards are offloaded."""
    phases = [(*held, config.fsdp_cpu_offload) for kind in _traces(config).values() for held in kind]
    if config.command == "generate" and config.is_svd and config.decode == "at-end":
        phases.append((_decoding(config), 1, False))
    return phases


def _decoding(config: RunConfig) -> trace.Trace:
    with countable(config):
        return trace.decoding(alike(config).replace(decode_chunk_size=config.decode_chunk_size), resolve(config).dtype)


class Kind(NamedTuple):
    """What the memory of a stage's ranks depends on."""

    shards: int
    encodes: bool
    decodes: bool
    experts: tuple[str, ...] | None


def _kind(config: RunConfig, stage: int) -> Kind:
    layout = config.parallel or Parallel()
    encodes = config.rows is not None and stage == 0
    decodes = config.decode == "as-ready" and config.is_svd and stage == layout.pp - 1
    names = None if config.experts is None else config.replace(parallel=layout).experts_of(stage)
    return Kind(layout.shards_of(stage), encodes, decodes, names)


def kinds(config: RunConfig) -> list[Kind]:
    """What a run's stages need memory for, each kind once."""
    pp = (config.parallel or Parallel()).pp
    stages = range(pp) if config.experts else sorted({0, pp - 1})
    return list(dict.fromkeys(_kind(config, stage) for stage in stages))


def _traces(config: RunConfig) -> dict[Kind, list[tuple[trace.Trace, int]]]:
    """Kind of stage -> the allocations of its ranks in a step, and their shards; several where experts are swapped.

    The first stage of a manifest's run keeps the encoders; with `--decode as-ready`, the last one decodes a sample
    after its steps.

    Raises:
        ConfigError: the video is too large for the meta device.
    """
    dtype, found = resolve(config).dtype, dict[Kind, list[tuple[trace.Trace, int]]]()
    for kind in kinds(config):
        with countable(config):
            at_once = [kind.experts] if config.swap is None else [(name,) for name in kind.experts or ()]
            steps = [trace.step(alike(config), dtype, each) for each in at_once]
            if kind.encodes:
                resident = trace.encoders(config.of_sample(0), alike(config), dtype)
                steps = [step.beside(resident) for step in steps]
        found[kind] = [(step.then(_decoding(config)) if kind.decodes else step, kind.shards) for step in steps]
    return found


@contextmanager
def countable(config: RunConfig) -> Iterator[None]:
    """Turn what the meta device refuses into a ConfigError: with Stable Video Diffusion, a video of more bytes than
    PyTorch can number; with other pipelines, anything that they do not support."""
    try:
        yield
    except ConfigError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if not config.is_svd:
            words = f"cannot be predicted on {config.layout}: {in_one_line(str(error))[:200]}"
            raise ConfigError(*config.model_argument, words) from None
        if not isinstance(error, RuntimeError):
            raise
        raise ConfigError("latent_shape", config.shape, f"is too large to be counted ({error})") from None


def alike(config: RunConfig) -> RunConfig:
    """A configuration that is equal for all runs that allocate the same on a rank. Of a manifest, the first sample."""
    fields = ["model", "model_id", "guidance_scale", "min_guidance_scale", "shortcuts"]
    if not config.is_svd:
        config, fields = config.of_sample(0), [*fields, *CALL]
    mode = {"guidance_mode": "sequential" if config.sequential else "batched", "forward_chunking": config.chunked}
    lockstep = Parallel(**(config.parallel or Parallel()).lockstep_sizes)
    if config.experts is not None:  # which steps are whose depends on their number
        fields = [*fields, "total_steps", "experts"]
    kept = {name: getattr(config, name) for name in fields}
    return RunConfig(
        parallel=lockstep,
        random_weights=config.is_svd or config.model_id is None,
        latent_shape=config.shape,
        **mode,
        **kept,
    )


def left_whole(config: RunConfig) -> list[str]:
    """Which layers tensor parallelism leaves whole, a line for each kind of denoiser.

    Raises:
        ConfigError: it leaves all of them whole.
    """
    tp, frames = (config.parallel or Parallel()).tp, (config.parallel or Parallel()).frames
    if tp == 1:
        return []
    denoisers = models.denoisers_on_meta(config, resolve(config).dtype)
    tensor.check(denoisers, tp, frames)
    whole = dict.fromkeys(tensor.left_whole(denoiser, tp) for denoiser in denoisers.values())
    return [f"tp {tp}: {line}" for line in whole if line]


def before_start(config: RunConfig, execution: Execution) -> list[str]:
    """Warnings about memory before a run starts on this machine.

    Raises:
        ConfigError: its memory limit is below the parameters of a rank.
    """
    found, layout = [], config.layout
    if layout.fsdp and layout.shards == 1:
        found.append("fsdp with one rank per stage saves no memory: no other rank shares the parameters")
    found += left_whole(config)
    capacity, limited = devices.capacity(config, execution), config.memory_limit_gib is not None
    if not limited and _at_most(config) + outside(config) < capacity:
        return found
    if limited and (parameters := predict(config).parameters) > capacity:
        allowed = f"must be above the parameters of a rank, {parameters / GIB:.3f} GiB"
        raise ConfigError("memory_limit_gib", config.memory_limit_gib, allowed)
    beside = outside_a_limit(config)
    if not fit(config, capacity + beside).fits:
        found.append(
            f"{layout}: will probably run out of memory: a rank needs {(needed(config) - beside) / GIB:.2f} GiB "
            f"and has {capacity / GIB:.2f} GiB; `python -m vdpp_core memory` with the same flags shows what would fit"
        )
    return found


def _at_most(config: RunConfig) -> float:
    """Upper bound in bytes for the package's small models, without a trace; infinite for others.

    0.1 GB, 40 fp32 values per channel and latent position for the steps, 160 kB per position decoded at once.
    """
    if config.model_id is not None or config.model not in ("dummy", "tiny"):
        return float("inf")
    batch, _, frames, rows, columns = config.shape
    steps = 40 * 4 * WIDEST_OF_SMALL * 2 * batch * frames * rows * columns
    at_once = min(config.decode_chunk_size, frames) if config.command == "generate" else 0
    return 1e8 + steps + 160e3 * at_once * rows * columns
