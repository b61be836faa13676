"""The parameters of a run, grouped by what they are about. `RunConfig` joins the groups; each checks its own fields."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from vdpp_core.config import manifest
from vdpp_core.config.errors import ConfigError, Frozen
from vdpp_core.config.layout import Parallel

ASSETS = Path(__file__).parents[1] / "tiny_svd"  # shipped with the package
EXAMPLE_IMAGE = ASSETS / "ball.png"
LATENT_CHANNELS = 4
PIXELS_PER_LATENT = 8  # SVD's VAE halves height and width three times
MODELS = {  # folder or hub name; None for models without files
    "dummy": None,
    "tiny": str(ASSETS / "pipeline"),
    "experts": str(ASSETS / "experts"),
    "medium": None,
    "svd": "stabilityai/stable-video-diffusion-img2vid-xt",
    "wan22": "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
}
CONFIGURATIONS = {  # the source with random weights, of models whose own would be downloaded
    "svd": None,  # vdpp_core/models/architectures.py
    "wan22": str(Path(__file__).parents[1] / "models" / "published" / "wan22"),  # sources: README.md beside it
}


class Model(Frozen):
    """What is done, and with which model."""

    command: Literal["simulate", "benchmark", "generate"] = "benchmark"
    model: Literal["dummy", "tiny", "experts", "medium", "svd", "wan22"] = Field(
        default="tiny",
        description="dummy (checks the logic), tiny (a small SVD in the package), experts (the same with two UNets "
        "that take turns), medium (137 M random parameters), svd (the published one), wan22 (Wan 2.2 A14B, which has "
        "two transformers of 14 billion parameters)",
    )
    model_id: str | None = Field(
        default=None, min_length=1, description="folder or hub name of any diffusers video pipeline"
    )
    random_weights: bool = Field(
        default=False, description="the model's configuration with random weights; svd then needs no download"
    )

    @model_validator(mode="after")
    def _has_weights(self) -> Self:
        if self.model == "dummy" and self.model_id is not None:
            raise ConfigError("model_id", self.model_id, "not with model dummy")
        if self.model == "medium" and self.model_id is None and not self.random_weights:
            raise ConfigError("model", "medium", "has random weights only: add random_weights")
        return self

    @property
    def model_argument(self) -> tuple[str, str]:
        """The argument that names the model, and its value."""
        return ("model", self.model) if self.model_id is None else ("model_id", self.model_id)

    @property
    def source(self) -> str | None:
        """Folder or hub name of the pipeline; None where none is read: dummy, medium, and svd with random weights."""
        if self.model_id is None and self.random_weights and self.model in CONFIGURATIONS:
            return CONFIGURATIONS[self.model]
        return self.model_id or MODELS[self.model]


class Video(Frozen):
    """How many videos of what size, in how many steps."""

    total_steps: int = Field(default=28, ge=1, le=10_000, description="denoising steps of a sample")
    num_samples: int = Field(default=1, ge=1, le=100_000, description="videos to generate; sample m uses seed + m")
    warmup_samples: int = Field(default=0, ge=0, le=1_000, description="samples a replica runs before the clock starts")
    seed: int = Field(default=0, ge=0, le=2**62, description="seed of sample 0")
    manifest: Path | None = Field(
        default=None, description="CSV or JSONL file with a row for each video: image, prompt, seed, …"
    )
    rows: tuple[dict[str, Any], ...] | None = Field(default=None, min_length=1, description="the manifest's rows")
    latent_shape: tuple[int, ...] | None = Field(default=None, description="B C F H W of the latents")
    num_frames: int | None = Field(default=None, ge=1, le=1_000, description="frames; not with --latent-shape")
    height: int | None = Field(default=None, ge=8, le=16_384, description="pixels, a multiple of 8; or --latent-shape")
    width: int | None = Field(default=None, ge=8, le=16_384, description="pixels, a multiple of 8; or --latent-shape")

    @field_validator("latent_shape", mode="before")
    @classmethod
    def _five_positive_sizes(cls, shape: Any) -> Any:
        allowed = f"must be five whole numbers B C F H W, each at least 1, with C = {LATENT_CHANNELS}"
        try:
            sizes = [] if isinstance(shape, str) else [int(str(size)) for size in shape]
        except (TypeError, ValueError):
            sizes = []
        if not 3 <= len(sizes) <= 5 or min(sizes) < 1 or max(sizes) > 100_000:
            raise ConfigError("latent_shape", shape, allowed)
        return tuple(sizes)


class Conditioning(Frozen):
    """What the video is generated from, and how closely it follows."""

    image: Path | None = Field(
        default=None, description="image to animate; a benchmark without one conditions on noise"
    )
    prompt: str | None = Field(default=None, description="what the video shows, for pipelines that take a text")
    negative_prompt: str | None = Field(default=None, description="what it shall not show")
    call: tuple[str, ...] | None = Field(
        default=None, description="further arguments of the pipeline's call, such as guidance_scale=5.0"
    )
    guidance_scale: float = Field(default=3.0, ge=0, le=1_000, description="guidance of the last frame")
    min_guidance_scale: float = Field(
        default=1.0, ge=0, le=1_000, description="guidance of the first frame; of a single one above 1, or no guidance"
    )
    fps: int = Field(default=7, ge=1, le=240, description="frames per second; the model is conditioned on fps - 1")
    motion_bucket_id: int = Field(default=127, ge=0, le=255, description="amount of motion")
    noise_aug_strength: float = Field(default=0.02, ge=0, le=100, description="noise added to the conditioning image")

    @field_validator("call", mode="before")
    @classmethod
    def _named_values(cls, call: Any) -> Any:
        allowed = "must be NAME=VALUE, with a name of the pipeline's call"
        if isinstance(call, dict):
            return tuple(f"{name}={json.dumps(value)}" for name, value in call.items())
        if not isinstance(call, list | tuple | None):
            raise ConfigError("call", call, allowed)
        for pair in call or ():
            name, equals, _ = str(pair).partition("=")
            if not (equals and name.isidentifier()):
                raise ConfigError("call", pair, allowed)
        return call

    @property
    def call_values(self) -> dict[str, Any]:
        """Name -> value of the further arguments of the pipeline's call."""
        pairs = [pair.partition("=") for pair in self.call or ()]
        return {name: value_of(text) for name, _, text in pairs}

    @field_validator("image", mode="before")
    @classmethod
    def _a_file(cls, image: Any) -> Any:
        if manifest.is_address(image):
            raise ConfigError("image", image, "must be a file, not an address: download it first")
        return image

    @model_validator(mode="after")
    def _guided_or_not(self) -> Self:
        if self.guidance_scale <= 1 < self.min_guidance_scale:
            allowed = "must be at most 1 with guidance_scale ≤ 1"
            raise ConfigError("min_guidance_scale", self.min_guidance_scale, allowed)
        return self


def value_of(text: str) -> Any:
    """A number, true, false, null or a list, as JSON; anything else is text, and so are numbers that are not finite."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if _all_finite(value) else text


def _all_finite(value: Any) -> bool:
    if isinstance(value, list | dict):
        return all(map(_all_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


class Execution(Frozen):
    """What the run executes on, and how it is split."""

    parallel: Parallel | None = Field(default=None, description="layout; default: every rank a stage")
    split: Literal["boundary", "even", "weights"] | None = Field(
        default=None,
        description="how stages share the steps: boundary (none has steps of two experts; default for models with "
        "experts), even, or weights (--stage-weights)",
    )
    stage_weights: tuple[float, ...] | None = Field(
        default=None, description="relative speed of the stages' ranks; steps are split in proportion"
    )
    experts: tuple[tuple[str, Annotated[int, Field(ge=1)]], ...] | None = Field(
        default=None, description="a model's experts, in order, and the number of steps that each of them serves"
    )
    device: str = Field(default="auto", description="auto, cpu, cuda, mps; cuda:N for one rank")
    dtype: Literal["auto", "fp32", "fp16", "bf16"] = Field(default="auto", description="auto: fp16 on CUDA, else fp32")
    backend: Literal["auto", "gloo", "nccl"] = Field(default="auto", description="auto: nccl on CUDA, else gloo")
    threads: int | None = Field(default=None, ge=1, le=1_024, description="CPU threads a rank; default: cores / ranks")
    shortcuts: bool = Field(
        default=False,
        description="flat temporal convolutions, and linear layers by oneDNN on CPUs: faster, within 1e-6",
    )

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d{1,3})?", device):
            raise ConfigError("device", device, "must be auto, cpu, mps, cuda or cuda:N")
        return device


class Memory(Frozen):
    """What trades time for memory."""

    guidance_mode: Literal["batched", "sequential"] = Field(
        default="batched", description="both guidance passes at once, or one after the other in half the memory"
    )
    forward_chunking: bool = Field(default=False, description="feed-forward layers frame by frame")
    enable_memory_opt: bool = Field(default=False, description="sequential guidance and forward chunking")
    attention_slicing: bool = Field(default=False, description="explains why there is none, and what to use instead")
    fsdp_same_sample: bool = Field(
        default=False, description="all ranks of a shard group compute the same sample, as in the published runs"
    )
    fsdp_cpu_offload: bool = Field(default=False, description="keep the shards in host memory (CUDA)")
    swap: Literal["host", "disk"] | None = Field(
        default=None,
        description="hold one expert at a time and load it when its steps begin: from host memory (CUDA) or from disk",
    )
    swap_batch: int = Field(
        default=1, ge=1, le=100_000, description="samples that a rank takes through an expert before the next is loaded"
    )
    swap_gb_per_s: float | None = Field(
        default=None, gt=0, le=1e6, description="simulate a slower disk: 1e9 bytes per second of an expert's parameters"
    )
    memory_limit_gib: float | None = Field(
        default=None, gt=0, le=100_000, description="simulate a smaller device: what a rank may use for model and run"
    )

    @model_validator(mode="after")
    def _no_slicing(self) -> Self:
        if self.attention_slicing:
            allowed = "SVD's UNet has none, and its attention is fused: use guidance_mode sequential, forward_chunking"
            raise ConfigError("attention_slicing", True, allowed)
        return self

    @property
    def chunked(self) -> bool:
        """Whether feed-forward layers run frame by frame."""
        return self.forward_chunking or self.enable_memory_opt


class Watching(Frozen):
    """When silent ranks are reported, and when they end the run."""

    timeout_s: float = Field(default=300.0, ge=1, le=86_400, description="seconds a busy rank may be silent")
    stall_steps: float = Field(
        default=10.0, ge=2, le=1e6, description="silence, in steps of its own, after which a rank counts as stalled"
    )


class Output(Frozen):
    """What a run leaves."""

    decode: Literal["at-end", "as-ready"] = Field(
        default="at-end", description="when videos are decoded: after the last sample, or each as soon as it is ready"
    )
    decode_chunk_size: int = Field(default=4, ge=1, le=1_000, description="frames that the VAE decodes at a time")
    compare_official: bool = Field(
        default=False, description="also generate each video with diffusers' pipeline, and report equality"
    )
    output_dir: Path | None = Field(default=None, description="the run folder itself; default: a new one under runs/")
    save_latents: bool = Field(default=False, description="write latents/sample-NNN.safetensors as samples finish")
    profile: bool = Field(
        default=False, description="trace two more steps of each rank with torch.profiler, after the last sample"
    )
