"""A run: all of its parameters. Validated when made, frozen afterwards."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import model_validator

from vdpp_core.config import family, fields, manifest
from vdpp_core.config.axes import AXIS_NAMES
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.layout import Parallel, Place
from vdpp_core.config.steps import split, split_at

LATENT_SIZES = {
    "dummy": (8, 32, 32),
    "tiny": (14, 8, 8),
    "experts": (14, 8, 8),
    "medium": (4, 16, 16),
    "svd": (14, 72, 128),
}  # F H W
COMMAND_DEFAULTS: dict[str, dict[str, Any]] = {
    "simulate": {"model": "dummy", "device": "cpu", "dtype": "fp32"},
    "benchmark": {"warmup_samples": 1},
    "generate": {"total_steps": 25, "save_latents": True},
}


def by_text(*sizes: int) -> str:
    """Sizes as text: `14 × 72 × 128`."""
    return " × ".join(map(str, sizes))


class RunConfig(
    fields.Output,
    fields.Watching,
    fields.Memory,
    fields.Execution,
    fields.Conditioning,
    fields.Video,
    fields.Model,
):
    """Everything that determines a run. `RunConfig(**json)` reads what `to_json` wrote.

    Raises:
        ConfigError: one line with the argument, its value and what is allowed.
    """

    @model_validator(mode="before")
    @classmethod
    def _command_defaults(cls, data: dict[str, Any]) -> dict[str, Any]:
        defaults = COMMAND_DEFAULTS.get(str(data.get("command", "benchmark")), {})
        given = defaults | {name: value for name, value in data.items() if value is not None}
        if "manifest" in given and "rows" not in given:
            path = Path(str(given["manifest"])).absolute()
            rows = manifest.read(path)
            if str(given.get("num_samples", len(rows))) != str(len(rows)):
                allowed = f"leave it out: the manifest's {len(rows)} rows are the samples"
                raise ConfigError("num_samples", given["num_samples"], allowed)
            given |= {"manifest": path, "rows": rows, "num_samples": len(rows)}
        return given

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if self.is_svd:
            self._check_svd()
        makes = f"only with generate, {self.command} makes no videos"
        for name in ("compare_official", "manifest", "rows", "decode"):
            value = getattr(self, name)
            if self.command != "generate" and value != RunConfig.model_fields[name].default:
                raise ConfigError(name, value, makes)
        if self.rows is not None and self.num_samples > len(self.rows):
            raise ConfigError("num_samples", self.num_samples, f"must be at most {len(self.rows)}, a row for each")
        for name in ("forward_chunking", "enable_memory_opt", "shortcuts"):
            if getattr(self, name) and self.model == "dummy":
                raise ConfigError(name, True, "not with model dummy, which has no layers that this concerns")
        if self.parallel is not None:
            self._check_layout(self.parallel)
        return self

    def _check_svd(self) -> None:
        """What holds for Stable Video Diffusion alone."""
        shape, pixels = self.latent_shape, {name: getattr(self, name) for name in ("height", "width")}
        for name, size in pixels.items():
            if size is not None and size % fields.PIXELS_PER_LATENT:
                raise ConfigError(name, size, f"must be a multiple of {fields.PIXELS_PER_LATENT}")
        if shape is not None and (len(shape) != 5 or shape[1] != fields.LATENT_CHANNELS):
            allowed = f"must be five whole numbers B C F H W, each at least 1, with C = {fields.LATENT_CHANNELS}"
            raise ConfigError("latent_shape", shape, allowed)
        if shape is not None and any((self.num_frames, *pixels.values())):
            raise ConfigError("latent_shape", shape, "give it or num_frames, height and width, not both")
        for name in family.OF_OTHERS:
            if value := getattr(self, name):
                raise ConfigError(name, value, "Stable Video Diffusion takes none; it has flags of its own")
        has_encoders = self.model != "dummy" and not self.random_weights
        if (self.image is not None or self.command == "generate") and not has_encoders:
            raise ConfigError("model", self.model, "has no image encoders (dummy, random weights): use tiny or svd")

    def _check_layout(self, parallel: Parallel) -> None:
        if parallel.pp > self.total_steps:
            if parallel.stage_ranks is not None:
                allowed = f"must be at most total_steps, {self.total_steps}, numbers: one for each stage"
                raise ConfigError("stage_ranks", parallel.stage_ranks, allowed)
            raise ConfigError("pp", parallel.pp, f"must be at most total_steps, {self.total_steps}")
        if self.is_svd:
            self._check_lockstep(parallel)
        for name in ("fsdp_same_sample", "fsdp_cpu_offload"):
            if getattr(self, name) and not parallel.fsdp:
                raise ConfigError(name, True, "only with fsdp")
        if self.fsdp_same_sample and parallel.stage_ranks is not None:
            raise ConfigError("fsdp_same_sample", True, "not with stage_ranks, whose copies take samples in turn")
        weights = self.stage_weights
        if weights is not None and (len(weights) != parallel.pp or min(weights) <= 0):
            raise ConfigError("stage_weights", weights, f"must be {parallel.pp} positive numbers, one per stage")
        if self.split is not None and (weights is None) == (self.split == "weights"):
            allowed = "needs stage_weights" if weights is None else "must be weights where stage_weights are given"
            raise ConfigError("split", self.split, allowed)
        if self.swap is not None and (parallel.pp > 1 or parallel.fsdp):
            allowed = "only for ranks that run all steps with whole parameters: not with pp or fsdp"
            raise ConfigError("swap", self.swap, allowed)
        for name in ("swap_batch", "swap_gb_per_s"):
            if self.swap is None and getattr(self, name) != RunConfig.model_fields[name].default:
                raise ConfigError(name, getattr(self, name), "only with swap")
        if self.experts is not None:
            self._check_experts(parallel, self.experts)

    def _check_experts(self, parallel: Parallel, experts: Sequence[tuple[str, int]]) -> None:
        if sum(count for _, count in experts) != self.total_steps:
            raise ConfigError("experts", experts, f"must serve total_steps, {self.total_steps}, in sum")
        steps = " and ".join(f"{count} of {name}" for name, count in experts)
        if self.split == "boundary" and len(experts) == 1:
            allowed = f"the boundary leaves a stage without steps: all are {steps}"
            raise ConfigError("split", self.split, allowed)
        if self.split == "boundary" and parallel.pp < len(experts):
            allowed = f"needs at least {len(experts)} stages (pp), for {steps}"
            raise ConfigError("split", self.split, allowed)
        if self.swap is not None and len(experts) == 1:
            raise ConfigError("swap", self.swap, f"only for a model with several experts: all steps are {steps}")

    def _check_lockstep(self, parallel: Parallel) -> None:
        if parallel.cfg > 1 and self.guidance_scale <= 1:
            raise ConfigError(
                "cfg", 2, "buys nothing without guidance, which has one pass: guidance_scale must be above 1"
            )
        if parallel.frames > self.shape[2]:
            raise ConfigError("frames", parallel.frames, f"must be at most num_frames, {self.shape[2]}")
        if parallel.frames > 1 and self.model == "dummy":
            allowed = "not with model dummy: only a spatio-temporal UNet splits by frames"
            raise ConfigError("frames", parallel.frames, allowed)
        if parallel.tp > 1 and self.model == "dummy":
            raise ConfigError("tp", parallel.tp, "not with model dummy, which has no attention to split")

    def for_ranks(self, ranks: int) -> RunConfig:
        """Fix the layout for a number of ranks: the given layout, or else every rank a stage.

        Raises:
            ConfigError: the given layout needs another number of ranks.
        """
        if not isinstance(ranks, int) or ranks < 1:
            raise ConfigError("world_size", ranks, "must be at least 1")
        parallel = self.parallel or Parallel(pp=ranks)
        if parallel.world_size != ranks:
            sizes = parallel.sizes
            axis = next((axis for axis in reversed(AXIS_NAMES) if sizes[axis] > 1), "pp")
            if parallel.stage_ranks is not None:
                allowed = f"{parallel} needs {parallel.world_size} ranks, not {ranks}"
                raise ConfigError("stage_ranks", parallel.stage_ranks, allowed)
            allowed = f"{' × '.join(sizes)} = {' × '.join(map(str, sizes.values()))} must be the ranks, {ranks}"
            raise ConfigError(axis, sizes[axis], allowed)
        return self.replace(parallel=parallel)

    def replace(self, **changes: Any) -> RunConfig:
        """Copy the configuration with other values and validate it. `latent_shape` replaces the size in pixels and vice
        versa; `manifest` replaces rows and number of samples; what experts serve is forgotten with other steps.

        Raises:
            ConfigError: as the constructor.
        """
        data = {name: value for name, value in self if value is not None}
        in_pixels = {"num_frames", "height", "width"}
        if in_pixels & set(changes):
            data.pop("latent_shape", None)
        if "latent_shape" in changes and self.is_svd:
            data = {name: value for name, value in data.items() if name not in in_pixels}
        if {"total_steps", "model", "model_id"} & set(changes):
            data.pop("experts", None)
        if "manifest" in changes:
            data = {name: value for name, value in data.items() if name not in ("rows", "num_samples")}
        return RunConfig(**(data | changes))

    def __hash__(self) -> int:
        return hash(tuple(value for name, value in self if name != "rows"))

    def of_sample(self, sample: int) -> RunConfig:
        """The configuration with the values of a sample's row, its seed among them; the same without a manifest.

        Raises:
            ConfigError: a value is bad, or the column belongs to no row. `call` stands for further arguments.
        """
        if self.rows is None:
            return self
        row, own = self.rows[sample], manifest.OF_SVD if self.is_svd else manifest.OF_ANY
        call = {name: value for name, value in row.items() if name not in own}
        for name in call:
            if name in manifest.SHARED:
                raise ConfigError("call", name, "is the same in all rows of a run: give it as a flag instead")
            if self.is_svd:
                raise ConfigError("call", name, f"must be one of {', '.join(own)}")
        for name, value in call.items():
            call[name] = fields.value_of(value) if isinstance(value, str) else value
        values = {"seed": self.seed + sample} | {name: row[name] for name in own if name in row}
        return self.replace(manifest=None, rows=None, call=(self.call_values | call) or None, **values)

    def seed_of(self, sample: int) -> int:
        """The seed of a sample."""
        return self.seed + sample if self.rows is None else self.of_sample(sample).seed

    @property
    def pipeline_class(self) -> str:
        """Name of the diffusers class that runs the model; "" where its files are missing and only they would say."""
        sized_twice = self.latent_shape is not None and any((self.num_frames, self.height, self.width))
        of_others = sized_twice or any(getattr(self, name) for name in family.OF_OTHERS)
        return family.pipeline_class(self.model_id or fields.CONFIGURATIONS.get(self.model), of_others)

    @property
    def is_svd(self) -> bool:
        """Whether the model is a Stable Video Diffusion."""
        return self.pipeline_class == family.SVD

    @property
    def svd_experts(self) -> list[str]:
        """Names of the UNets that take turns in the run's Stable Video Diffusion; none where it has one."""
        packaged = self.model_id is None and self.model != "experts"
        return [] if packaged or self.source is None else family.experts(self.source)

    @property
    def layout(self) -> Parallel:
        """The layout; known once `for_ranks` has been called, if not given."""
        assert self.parallel is not None, "for_ranks comes first"
        return self.parallel

    @property
    def shape(self) -> tuple[int, ...]:
        """B C F H W of the latents: as given, from the size in pixels, or the model's default. Of other pipelines than
        Stable Video Diffusion: as the pipeline holds them."""
        if self.latent_shape is not None:
            return self.latent_shape
        assert self.is_svd, "`preflight.complete` comes first"
        frames, rows, columns = LATENT_SIZES["svd" if self.model_id else self.model]
        rows = self.height // fields.PIXELS_PER_LATENT if self.height else rows
        columns = self.width // fields.PIXELS_PER_LATENT if self.width else columns
        return 1, fields.LATENT_CHANNELS, self.num_frames or frames, rows, columns

    @property
    def size_text(self) -> str:
        """Frames × height × width of the latents as text, with the batch in front where it holds several videos; of
        other pipelines than Stable Video Diffusion, all sizes as the pipeline holds them."""
        if not self.is_svd:
            return by_text(*self.shape)
        batch, _, *size = self.shape
        return by_text(*[batch] * (batch > 1), *size)

    @property
    def image_size(self) -> tuple[int, int]:
        """Width and height of the videos in pixels."""
        return self.shape[4] * fields.PIXELS_PER_LATENT, self.shape[3] * fields.PIXELS_PER_LATENT

    @property
    def image_path(self) -> Path | None:
        """The image to animate; None if there is none."""
        example = self.image is None and self.command == "generate" and self.is_svd
        return fields.EXAMPLE_IMAGE if example else self.image

    @property
    def encodes(self) -> bool:
        """Whether the encoders run. A benchmark without an image or prompt conditions on random numbers."""
        given = self.image_path is not None or self.prompt is not None
        return not self.random_weights and (given or any({"image", "prompt"} & row.keys() for row in self.rows or ()))

    def stages(self) -> list[range]:
        """List the steps of each stage: within an expert's, unless the split is another one; in proportion to the
        ranks of the stages and their speeds."""
        layout, experts, speeds = self.layout, self.experts or (), self.stage_weights
        if layout.stage_ranks is not None:
            speeds = tuple(
                count * speed for count, speed in zip(layout.copies, speeds or (1.0,) * layout.pp, strict=True)
            )
        if self.split in (None, "boundary") and self.stage_weights is None and 1 < len(experts) <= layout.pp:
            return split_at([steps for _, steps in experts], layout.pp, speeds)
        return split(self.total_steps, layout.pp, speeds)

    def segments(self, steps: range) -> list[tuple[str | None, range]]:
        """Cut consecutive steps into those of one expert each; one piece for a model without experts.

        Returns:
            (name of the expert or None, its steps).
        """
        if self.experts is None:
            return [(None, steps)]
        ends = list(itertools.accumulate(count for _, count in self.experts))
        spans = [range(end - count, end) for end, (_, count) in zip(ends, self.experts, strict=True)]
        cut = [range(max(steps.start, own.start), min(steps.stop, own.stop)) for own in spans]
        return [(name, own) for (name, _), own in zip(self.experts, cut, strict=True) if own]

    def experts_of(self, stage: int) -> tuple[str, ...] | None:
        """Names of the experts that a stage needs; None where the model has none."""
        names = [name for name, _ in self.segments(self.stages()[stage])]
        return None if self.experts is None else tuple(dict.fromkeys(name for name in names if name is not None))

    def steps_of(self, rank: int) -> range:
        """The steps of a rank's stage."""
        return self.stages()[self.layout.place(rank).stage]

    def samples(self, replica: int, of: Sequence[int] | None = None) -> Sequence[int]:
        """List a replica's samples, out of these or all; none where there are more replicas than samples."""
        of = range(self.num_samples) if of is None else of
        if self.fsdp_same_sample:
            return of if replica == 0 else of[:0]
        return of[replica :: self.layout.dp]

    def samples_at(self, place: Place, of: Sequence[int] | None = None) -> Sequence[int]:
        """List the samples of a rank, out of these or all: those of its replica, shared by the copies of its stage."""
        return self.samples(place.replica, of)[place.copy :: self.layout.copies[place.stage]]

    def padding(self, place: Place, of: Sequence[int] | None = None) -> int:
        """Number of extra samples a rank computes only because its shard group needs it; they are dropped."""
        most = self.samples_at(place._replace(replica=0, copy=0), of)
        return len(most) - len(self.samples_at(place, of)) if self.layout.fsdp else 0

    @property
    def sequential(self) -> bool:
        """Whether guidance passes run one after the other; with cfg 2 each rank has only one."""
        at_once = self.parallel is not None and self.parallel.cfg == 2
        return not at_once and (self.guidance_mode == "sequential" or self.enable_memory_opt)

    @property
    def guidance_passes(self) -> int:
        """UNet passes of a step: 2 with classifier-free guidance (Ho and Salimans 2022), else 1."""
        return 2 if self.guidance_scale > 1 else 1

    @property
    def calls_per_step(self) -> int:
        """Calls of the UNet in a step on one rank: one per pass where the passes run one after the other, else 1."""
        return self.guidance_passes if self.sequential else 1

    def to_json(self) -> str:
        """Serialise for config.json."""
        return self.model_dump_json(indent=2) + "\n"

    @classmethod
    def read(cls, run_folder: Path) -> RunConfig:
        """Read the configuration of a run folder.

        Raises:
            ConfigError: config.json is missing, damaged or not a configuration.
        """
        path = run_folder / "config.json"
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise ConfigError("folder", run_folder, f"must have a run's config.json ({error})") from None
