"""What a run is: all of its parameters. Validated when made, frozen afterwards."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from vdpp_core.config.axes import AXIS_NAMES
from vdpp_core.config.errors import ConfigError, Frozen
from vdpp_core.config.layout import Parallel
from vdpp_core.config.steps import split

ASSETS = Path(__file__).parents[1] / "tiny_svd"  # what the package carries
EXAMPLE_IMAGE = ASSETS / "ball.png"
LATENT_CHANNELS = 4
PIXELS_PER_LATENT = 8  # the VAE of SVD halves height and width three times

MODELS = {  # folder or hub name; None where there are no files
    "dummy": None,
    "tiny": str(ASSETS / "pipeline"),
    "medium": None,
    "svd": "stabilityai/stable-video-diffusion-img2vid-xt",
}
LATENT_SIZES = {  # frames, height, width
    "dummy": (8, 32, 32),
    "tiny": (14, 8, 8),
    "medium": (4, 16, 16),
    "svd": (14, 72, 128),
}
COMMAND_DEFAULTS: dict[str, dict[str, Any]] = {
    "simulate": {"model": "dummy", "device": "cpu", "dtype": "fp32"},
    "benchmark": {"warmup_samples": 1},
    "generate": {"total_steps": 25, "save_latents": True},
}


class RunConfig(Frozen):
    """Everything that determines a run. `RunConfig(**json)` reads what `to_json` wrote.

    Raises:
        ConfigError: one line with the argument, its value and what is allowed.
    """

    command: Literal["simulate", "benchmark", "generate"] = "benchmark"
    model: Literal["dummy", "tiny", "medium", "svd"] = Field(
        default="tiny",
        description="dummy (checks the logic), tiny (a small SVD in the package), medium (137 M random parameters), "
        "svd (the published one)",
    )
    model_id: str | None = Field(
        default=None, min_length=1, description="folder or hub name of any Stable Video Diffusion pipeline"
    )
    random_weights: bool = Field(
        default=False, description="the model's configuration with random weights; svd then needs no download"
    )

    total_steps: int = Field(default=28, ge=1, le=10_000, description="denoising steps of a sample")
    num_samples: int = Field(default=1, ge=1, le=100_000, description="videos to generate; sample m uses seed + m")
    warmup_samples: int = Field(default=0, ge=0, le=1_000, description="samples a replica runs before the clock starts")
    seed: int = Field(default=0, ge=0, le=2**62)
    latent_shape: tuple[int, ...] | None = Field(default=None, description="B C F H W of the latents")
    num_frames: int | None = Field(default=None, ge=1, le=1_000, description="frames; not with --latent-shape")
    height: int | None = Field(default=None, ge=8, le=16_384, description="pixels, a multiple of 8; or --latent-shape")
    width: int | None = Field(default=None, ge=8, le=16_384, description="pixels, a multiple of 8; or --latent-shape")

    image: Path | None = Field(
        default=None, description="image to animate; a benchmark without one conditions on noise"
    )
    guidance_scale: float = Field(default=3.0, ge=0, le=1_000, description="guidance of the last frame")
    min_guidance_scale: float = Field(
        default=1.0, ge=0, le=1_000, description="guidance of the first frame; of a single one above 1, or no guidance"
    )
    fps: int = Field(default=7, ge=1, le=240, description="frames per second; the model is conditioned on fps - 1")
    motion_bucket_id: int = Field(default=127, ge=0, le=255, description="how much should move")
    noise_aug_strength: float = Field(default=0.02, ge=0, le=100, description="noise added to the conditioning image")
    decode_chunk_size: int = Field(default=4, ge=1, le=1_000, description="frames that the VAE decodes at a time")
    compare_official: bool = Field(
        default=False, description="generate each video with diffusers' pipeline, too, and report equality"
    )

    parallel: Parallel | None = Field(default=None, description="layout; every rank a stage where none is given")
    stage_weights: tuple[float, ...] | None = Field(
        default=None, description="relative speed of the stages' ranks; steps are split in proportion"
    )
    device: str = Field(default="auto", description="auto, cpu, cuda, mps; cuda:N for one rank")
    dtype: Literal["auto", "fp32", "fp16", "bf16"] = Field(default="auto", description="auto: fp16 on CUDA, else fp32")
    backend: Literal["auto", "gloo", "nccl"] = Field(default="auto", description="auto: nccl on CUDA, else gloo")
    threads: int | None = Field(default=None, ge=1, le=1_024, description="CPU threads a rank; default: cores / ranks")
    guidance_mode: Literal["batched", "sequential"] = Field(
        default="batched", description="both passes of the guidance at once, or one after the other in half the memory"
    )
    forward_chunking: bool = Field(default=False, description="feed-forward layers frame by frame")
    shortcuts: bool = Field(
        default=False, description="constant cross-attention and flat temporal convolutions: sooner, within 1e-6"
    )
    enable_memory_opt: bool = Field(default=False, description="sequential guidance and forward chunking")
    attention_slicing: bool = Field(default=False, description="says why there is none, and what to use instead")
    fsdp_same_sample: bool = Field(
        default=False, description="all ranks of a shard group compute the same sample, as in the user's documents"
    )
    fsdp_cpu_offload: bool = Field(default=False, description="keep the shards in the host's memory (CUDA)")
    memory_limit_gib: float | None = Field(
        default=None, gt=0, le=100_000, description="play a smaller device: what a rank may use for model and run"
    )
    timeout_s: float = Field(default=300.0, ge=1, le=86_400, description="silence of a rank at work that ends a run")
    stall_steps: float = Field(
        default=10.0, ge=2, le=1e6, description="silence in own steps that names a rank as stalled"
    )

    output_dir: Path | None = Field(default=None, description="the run folder itself; default: a new one under runs/")
    save_latents: bool = Field(default=False, description="write latents/sample-NNN.safetensors as samples finish")

    @model_validator(mode="before")
    @classmethod
    def _command_defaults(cls, data: dict[str, Any]) -> dict[str, Any]:
        defaults = COMMAND_DEFAULTS.get(str(data.get("command", "benchmark")), {})
        return defaults | {name: value for name, value in data.items() if value is not None}

    @field_validator("latent_shape", mode="before")
    @classmethod
    def _five_positive_sizes(cls, shape: Any) -> Any:
        allowed = f"must be five whole numbers B C F H W, each at least 1, with C = {LATENT_CHANNELS}"
        try:
            sizes = [int(str(size)) for size in shape]
            if isinstance(shape, str):
                raise ValueError
        except (TypeError, ValueError):
            raise ConfigError("latent_shape", shape, allowed) from None
        if len(sizes) != 5 or min(sizes) < 1 or max(sizes) > 100_000 or sizes[1] != LATENT_CHANNELS:
            raise ConfigError("latent_shape", shape, allowed)
        return tuple(sizes)

    @field_validator("image", mode="before")
    @classmethod
    def _a_file(cls, image: Any) -> Any:
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(image)):  # a Path has lost a slash; one letter is a drive
            raise ConfigError("image", image, "must be a file, not an address: download it first")
        return image

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d{1,3})?", device):
            raise ConfigError("device", device, "must be auto, cpu, mps, cuda or cuda:N")
        return device

    @field_validator("height", "width")
    @classmethod
    def _multiple_of_8(cls, pixels: int | None, info: Any) -> int | None:
        if pixels is not None and pixels % PIXELS_PER_LATENT:
            raise ConfigError(info.field_name, pixels, f"must be a multiple of {PIXELS_PER_LATENT}")
        return pixels

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if self.latent_shape is not None and any((self.num_frames, self.height, self.width)):
            raise ConfigError("latent_shape", self.latent_shape, "give it or num_frames, height and width, not both")
        if self.guidance_scale <= 1 < self.min_guidance_scale:
            raise ConfigError(
                "min_guidance_scale", self.min_guidance_scale, "must be at most 1 with guidance_scale ≤ 1"
            )
        if self.model == "dummy" and self.model_id is not None:
            raise ConfigError("model_id", self.model_id, "not with model dummy")
        has_encoders = self.model != "dummy" and not self.random_weights
        if (self.image is not None or self.command == "generate") and not has_encoders:
            raise ConfigError("model", self.model, "has no image encoders (dummy, random weights): use tiny or svd")
        if self.compare_official and self.command != "generate":
            raise ConfigError("compare_official", True, f"only with generate, {self.command} makes no videos")
        if self.model == "medium" and self.model_id is None and not self.random_weights:
            raise ConfigError("model", "medium", "has random weights only: add random_weights")
        self._check_memory_options()
        if self.parallel is not None:
            self._check_layout(self.parallel)
        return self

    def _check_memory_options(self) -> None:
        if self.attention_slicing:
            allowed = "SVD's UNet has none, and its attention is fused: use guidance_mode sequential, forward_chunking"
            raise ConfigError("attention_slicing", True, allowed)
        for name in ("forward_chunking", "enable_memory_opt", "shortcuts"):
            if getattr(self, name) and self.model == "dummy":
                raise ConfigError(name, True, "not with model dummy, which has no layers that this concerns")

    def _check_layout(self, parallel: Parallel) -> None:
        if parallel.pp > self.total_steps:
            raise ConfigError("pp", parallel.pp, f"must be at most total_steps, {self.total_steps}")
        if parallel.cfg > 1 and self.guidance_scale <= 1:
            raise ConfigError("cfg", 2, "buys nothing without guidance, which has one pass: guidance_scale above 1")
        if parallel.frames > self.shape[2]:
            raise ConfigError("frames", parallel.frames, f"must be at most num_frames, {self.shape[2]}")
        if parallel.frames > 1 and self.model == "dummy":
            allowed = "not with model dummy: only a spatio-temporal UNet splits by frames"
            raise ConfigError("frames", parallel.frames, allowed)
        for name in ("fsdp_same_sample", "fsdp_cpu_offload"):
            if getattr(self, name) and not parallel.fsdp:
                raise ConfigError(name, True, "only with fsdp")
        weights = self.stage_weights
        if weights is not None and (len(weights) != parallel.pp or min(weights) <= 0):
            raise ConfigError("stage_weights", weights, f"must be {parallel.pp} positive numbers, one per stage")

    def for_ranks(self, ranks: int) -> RunConfig:
        """The same run on so many ranks: every rank a stage, unless the layout was given.

        Raises:
            ConfigError: the layout needs another number of ranks.
        """
        if not isinstance(ranks, int) or ranks < 1:
            raise ConfigError("world_size", ranks, "must be at least 1")
        parallel = self.parallel or Parallel(pp=ranks)
        if parallel.world_size != ranks:
            sizes = parallel.sizes
            axis = next((axis for axis in reversed(AXIS_NAMES) if sizes[axis] > 1), "pp")
            allowed = f"{' × '.join(sizes)} = {' × '.join(map(str, sizes.values()))} must be the ranks, {ranks}"
            raise ConfigError(axis, sizes[axis], allowed)
        return self.replace(parallel=parallel)

    def replace(self, **changes: Any) -> RunConfig:
        """A copy with other values, validated again; a size in latents replaces one in pixels and the reverse."""
        data = {name: value for name, value in self if value is not None}
        in_pixels = {"num_frames", "height", "width"}
        if in_pixels & set(changes):
            data.pop("latent_shape", None)
        if "latent_shape" in changes:
            data = {name: value for name, value in data.items() if name not in in_pixels}
        return RunConfig(**(data | changes))

    @property
    def layout(self) -> Parallel:
        """The layout, once the number of ranks is known."""
        assert self.parallel is not None, "for_ranks comes first"
        return self.parallel

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """B C F H W of the latents, from the size in latents, in pixels, or the model's usual one."""
        if self.latent_shape is not None:
            batch, channels, frames, rows, columns = self.latent_shape
            return batch, channels, frames, rows, columns
        frames, rows, columns = LATENT_SIZES["svd" if self.model_id else self.model]
        rows = self.height // PIXELS_PER_LATENT if self.height else rows
        columns = self.width // PIXELS_PER_LATENT if self.width else columns
        return 1, LATENT_CHANNELS, self.num_frames or frames, rows, columns

    @property
    def image_size(self) -> tuple[int, int]:
        """Width and height of the videos in pixels."""
        return self.shape[4] * PIXELS_PER_LATENT, self.shape[3] * PIXELS_PER_LATENT

    @property
    def source(self) -> str | None:
        """Folder or hub name of the pipeline; None where none is read: dummy, medium, and svd with random weights."""
        if self.model_id is None and self.random_weights and self.model == "svd":
            return None
        return self.model_id or MODELS[self.model]

    @property
    def image_path(self) -> Path | None:
        """The image to animate; None where the conditioning is synthetic."""
        return EXAMPLE_IMAGE if self.image is None and self.command == "generate" else self.image

    def stages(self) -> list[range]:
        """The steps of each stage."""
        return split(self.total_steps, self.layout.pp, self.stage_weights)

    def samples(self, replica: int, of: Sequence[int] | None = None) -> Sequence[int]:
        """The samples of a replica, of these or of all; empty where there are more replicas than samples."""
        of = range(self.num_samples) if of is None else of
        if self.fsdp_same_sample:
            return of if replica == 0 else of[:0]
        return of[replica :: self.layout.dp]

    def padding(self, replica: int, of: Sequence[int] | None = None) -> int:
        """Samples that a replica computes for the company of its shard group only; they count for nothing."""
        return len(self.samples(0, of)) - len(self.samples(replica, of)) if self.layout.fsdp else 0

    @property
    def sequential(self) -> bool:
        """Whether the passes of the guidance are computed one after the other; with cfg 2 each rank has only one."""
        at_once = self.parallel is not None and self.parallel.cfg == 2
        return not at_once and (self.guidance_mode == "sequential" or self.enable_memory_opt)

    @property
    def chunked(self) -> bool:
        """Whether feed-forward layers work frame by frame."""
        return self.forward_chunking or self.enable_memory_opt

    def to_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"

    @classmethod
    def read(cls, run_folder: Path) -> RunConfig:
        """The configuration of a run folder.

        Raises:
            ConfigError: config.json is missing, damaged or holds what is no configuration.
        """
        path = run_folder / "config.json"
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise ConfigError("folder", run_folder, f"must have a run's config.json ({error})") from None
