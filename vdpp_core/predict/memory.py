"""Peak memory of a rank before anything runs, and whether a device has it. Needs no GPU, no weights, no ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.execution import Execution, resolve
from vdpp_core.config.layout import Parallel
from vdpp_core.models import checkpoint
from vdpp_core.parallel import devices
from vdpp_core.parallel.devices import GIB
from vdpp_core.predict import communicators, trace
from vdpp_core.predict.allocator import FullError
from vdpp_core.predict.replay import Peak, peak, play, room_needed
from vdpp_core.runs import runfolder

# What a card holds beyond PyTorch's allocator on one rank: CUDA's context, the libraries' own memory, and what is not
# modelled. NCCL's communicators come on top (vdpp_core/predict/communicators.py).
# From the published run out of memory (reference/a5000x7.json, row 4), which this therefore cannot be tested on: of
# 23.68 GiB 2.75 were free, so 20.93 were in use, where the allocator modelled here holds 20.23 when it comes to that
# same request of 2.75 GiB. `make gpu-check` measures it on other cards.
CONTEXT_GIB = 0.71
# On a CPU: oneDNN's copies of what it computes on, in layouts that it prefers, and what libraries take when they are
# first used. tests/benchmarks/memory.py measured 3 to 5 % above the prediction on one rank, 2 to 11 % with FSDP.
CPU_ALLOWANCE, CPU_CONSTANT = 1.1, 30e6
MOST_RANKS = 8
LARGEST_GIB = 1e6
WIDEST_OF_SMALL = 96  # channels of tiny


def predict(config: RunConfig) -> Peak:
    """Peak of a rank's denoising step. About a second for the published UNet, once for each shape and mode.

    All that PyTorch's operators allocate is counted, but not what kernels use inside (workspaces of cuDNN, oneDNN).
    """
    return peak(trace_of(config), _shards(config), config.fsdp_cpu_offload)


def record(folder: Path) -> None:
    """Write the predicted peak memory of a run's rank into its folder, unless it is there.

    Raises:
        ConfigError: config.json, or the model that it names, cannot be read.
    """
    if runfolder.read_prediction(folder) is None:
        runfolder.write_prediction(folder, predict(RunConfig.read(folder)).in_gb())


def predict_decoding(config: RunConfig) -> Peak | None:
    """Peak of decoding a sample in chunks of `decode_chunk_size` frames, the UNet freed; None without a VAE."""
    if config.model in ("dummy", "medium") and config.model_id is None:
        return None
    if config.model_id is not None and Path(config.model_id).is_dir() and not (Path(config.model_id) / "vae").is_dir():
        return None
    return peak(_decoding(config))


@dataclass(frozen=True)
class Fit:
    """Whether a rank finds room, allowances counted; if it does not, on a GPU, the bytes of the request that failed."""

    fits: bool
    request: int | None = None


def fit(config: RunConfig, capacity: float) -> Fit:
    """A rank on a device of so many bytes: its steps, and where videos are made, their decoding.

    A GPU: the caching allocator's decisions one by one, fragmentation included, in what `outside` leaves of it.
    A CPU: the peak times CPU_ALLOWANCE, and CPU_CONSTANT.
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
    """The smallest device in which `fit` finds room, in bytes."""
    if resolve(config).device_type == "cpu":
        return int(max(peak(*phase).total for phase in _phases(config)) * CPU_ALLOWANCE + CPU_CONSTANT)
    return max(room_needed(*phase) for phase in _phases(config)) + outside(config)


def outside(config: RunConfig) -> int:
    """Bytes of a GPU that the rank with most communicators takes outside PyTorch's allocator; 0 on a CPU."""
    if resolve(config).device_type == "cpu":
        return 0
    gib_each, _ = communicators.gib_each()
    return int((CONTEXT_GIB + communicators.most(config) * gib_each) * GIB)


def outside_a_limit(config: RunConfig) -> int:
    """Bytes by which the device that a run's memory limit plays is larger than it: on CUDA it is the allocator's."""
    limited = config.memory_limit_gib is not None
    return outside(config) if limited and resolve(config).device_type == "cuda" else 0


def device_gib(config: RunConfig, capacity_gib: float | None) -> float | None:
    """Of a rank's device in GiB, if it was said: by itself, or as the limit that the run would be given."""
    if capacity_gib is None and config.memory_limit_gib is not None:
        return config.memory_limit_gib + outside_a_limit(config) / GIB
    return capacity_gib


def report(config: RunConfig, capacity_gib: float | None) -> dict[str, Any]:
    """What `python -m vdpp_core memory` prints. GB are 1e9 bytes.

    Raises:
        ConfigError: the capacity is not positive, or less than the parameters take.
    """
    if capacity_gib is not None:
        check_capacity(capacity_gib)
    checkpoint.check_model(config, resolve(config))
    expected, decoding = predict(config), predict_decoding(config)
    opened, (gib_each, known) = communicators.most(config), communicators.gib_each()
    facts: dict[str, Any] = {
        **expected.in_gb(),
        "peak_layer": expected.layer,
        "largest_unit": expected.largest_unit.name,
        "largest_unit_gb": expected.largest_unit.shard(1) / 1e9,
        "decoding_peak_gb": decoding and decoding.total / 1e9,
        "communicators": opened,
        "communicators_gb": opened * gib_each * GIB / 1e9,
        "communicator_gib": gib_each,
        "communicator_source": known,
    }
    if capacity_gib is None:
        return facts
    if expected.parameters > capacity_gib * GIB:
        allowed = f"must be above what the parameters take on a rank, {expected.parameters / GIB:.3f} GiB"
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
    """ConfigError if that is no size of a device."""
    if not isinstance(capacity_gib, Real) or not 0 < capacity_gib <= LARGEST_GIB:
        raise ConfigError("capacity_gib", capacity_gib, f"must be finite and above 0, at most {LARGEST_GIB:g}")


def _chunk_that_fits(config: RunConfig, capacity: float) -> int | None:
    """The largest decode_chunk_size, halved as often as need be, with which the decoding fits; None if none does."""
    size, allowed = config.decode_chunk_size, _allowed_for_decoding(config, capacity)
    while size >= 1 and peak(_decoding(config.replace(decode_chunk_size=size))).total > allowed:
        size //= 2
    return size or None


def _allowed_for_decoding(config: RunConfig, capacity: float) -> float:
    if resolve(config).device_type == "cpu":
        return (capacity - CPU_CONSTANT) / CPU_ALLOWANCE
    return capacity - outside(config)


def remedies(config: RunConfig, capacity: float) -> list[str]:
    """Changes, each of which alone would make a run fit; with FSDP the least number of ranks."""
    modes: dict[str, dict[str, Any]] = {}
    if not config.sequential and config.guidance_scale > 1:
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
    if frames := _frames_that_fit(config, capacity):
        found.append(f"{frames} frames instead of {config.shape[2]}")
    return found


def _with_lockstep(config: RunConfig, capacity: float) -> list[str]:
    """Each rank one of the guidance's passes, or a share of the frames: of those the fewest ranks that will do."""
    layout, frames = config.parallel or Parallel(), config.shape[2]
    if config.model == "dummy" or layout.lockstep > 1:
        return []
    found, changes = [], []
    if not config.sequential and config.guidance_scale > 1:
        changes.append({"cfg": 2})
    peak, most = predict(config), needed(config)
    enough = (
        ranks
        for ranks in range(2, min(MOST_RANKS, frames) + 1)
        if most - (peak.total - peak.parameters) * (1 - -(-frames // ranks) / frames) < capacity
    )
    if (fewest := next(enough, None)) is not None:
        changes += [{"frames": ranks} for ranks in range(fewest, min(fewest + 2, MOST_RANKS, frames) + 1)]
    for change in changes:
        more = Parallel(**(layout.model_dump() | change))
        if fit(config.replace(parallel=more, fsdp_same_sample=False), capacity).fits:
            (axis, size), *_ = change.items()
            found.append(f"--{axis} {size} on {more.world_size} ranks")
            if axis == "frames":
                break
    return found


def _with_fsdp(config: RunConfig, capacity: float, words: str) -> list[str]:
    own = config.parallel or Parallel()
    fewest = own.dp + 1 if own.fsdp else 1 if own.lockstep > 1 else 2
    for replicas in range(fewest, MOST_RANKS // own.lockstep + 1):
        layout = Parallel(**(own.model_dump() | {"dp": replicas, "fsdp": True}))
        if fit(config.replace(parallel=layout), capacity).fits:
            return [f"{words}--fsdp on {layout.world_size} ranks"]
    return []


def _frames_that_fit(config: RunConfig, capacity: float) -> int | None:
    """Activations grow with the frames: by two points of that line, then checked."""
    batch, channels, frames, rows, columns = config.shape

    def of(count: int) -> RunConfig:
        return config.replace(latent_shape=(batch, channels, count, rows, columns))

    few = max(1, frames // 2)
    least, most = needed(of(few)), needed(config)
    if few == frames or most <= least:
        return None
    guess = min(frames - 1, few + int((capacity - least) / ((most - least) / (frames - few))))
    return next((count for count in (guess, guess - 1) if count >= 1 and fit(of(count), capacity).fits), None)


def _shards(config: RunConfig) -> int:
    return config.parallel.shards if config.parallel else 1


def _phases(config: RunConfig) -> list[tuple[trace.Trace, int, bool]]:
    """What a rank does one after the other: trace, shards, whether they are offloaded."""
    phases = [(trace_of(config), _shards(config), config.fsdp_cpu_offload)]
    if config.command == "generate":
        phases.append((_decoding(config), 1, False))
    return phases


def _decoding(config: RunConfig) -> trace.Trace:
    with countable(config):
        return trace.decoding(alike(config).replace(decode_chunk_size=config.decode_chunk_size), resolve(config).dtype)


def trace_of(config: RunConfig) -> trace.Trace:
    """What a rank allocates in a step. ConfigError: a video too large for the meta device."""
    with countable(config):
        return trace.step(alike(config), resolve(config).dtype)


@contextmanager
def countable(config: RunConfig) -> Iterator[None]:
    """What fails in here, on the meta device, has more bytes than PyTorch can number; that is one ConfigError."""
    try:
        yield
    except RuntimeError as error:
        raise ConfigError("latent_shape", config.shape, f"is too large to be counted ({error})") from None


def alike(config: RunConfig) -> RunConfig:
    """The same for all runs that allocate the same on a rank."""
    fields = ("model", "model_id", "guidance_scale", "min_guidance_scale", "shortcuts")
    mode = {"guidance_mode": "sequential" if config.sequential else "batched", "forward_chunking": config.chunked}
    layout = config.parallel or Parallel()
    samples = math.ceil(config.num_samples / (1 if config.fsdp_same_sample else layout.dp))
    lockstep = Parallel(**layout.lockstep_sizes)
    kept = {name: getattr(config, name) for name in fields}
    return RunConfig(
        parallel=lockstep, random_weights=True, latent_shape=config.shape, num_samples=samples, **mode, **kept
    )


def before_start(config: RunConfig, execution: Execution) -> list[str]:
    """What is to be said before a run starts on this machine.

    Raises:
        ConfigError: its memory limit is below the parameters.
    """
    found, layout = [], config.layout
    if layout.fsdp and layout.shards == 1:
        found.append("fsdp with one rank a stage saves nothing: it has nobody to share the parameters with")
    capacity, limited = devices.capacity(config, execution), config.memory_limit_gib is not None
    if not limited and _at_most(config) + outside(config) < capacity:
        return found
    if limited and (parameters := predict(config).parameters) > capacity:
        allowed = f"must be above what the parameters take on a rank, {parameters / GIB:.3f} GiB"
        raise ConfigError("memory_limit_gib", config.memory_limit_gib, allowed)
    beside = outside_a_limit(config)
    if not fit(config, capacity + beside).fits:
        found.append(
            f"{layout}: will probably run out of memory, {(needed(config) - beside) / GIB:.2f} GiB needed on a rank, "
            f"{capacity / GIB:.2f} GiB there; `python -m vdpp_core memory` with the same flags tells the parts"
        )
    return found


def _at_most(config: RunConfig) -> float:
    """Bytes that the package's small models cannot exceed, without a trace: 0.1 GB, for the steps 40 values of fp32 a
    channel and position of the latents, for the decoding 160 kB a position that is decoded at once."""
    if config.model_id is not None or config.model not in ("dummy", "tiny"):
        return float("inf")
    batch, _, frames, rows, columns = config.shape
    steps = 40 * 4 * WIDEST_OF_SMALL * 2 * batch * frames * rows * columns
    at_once = min(config.decode_chunk_size, frames) if config.command == "generate" else 0
    return 1e8 + steps + 160e3 * at_once * rows * columns
