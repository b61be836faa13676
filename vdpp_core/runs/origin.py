"""What a run's samples are made from: everything that determines their bits, recorded before the first one is made.

It is in origin.json in the run folder, and its digest in each file of latents. A resumed run is compared with it, so
that the samples of one folder are never made from different settings, images or weights.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from vdpp_core.config import RunConfig, family, manifest
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.execution import Execution
from vdpp_core.runs.files import write_atomically

FILE = "origin.json"
UNKNOWN = "unknown"
# Fields of RunConfig that do not affect the bits of the latents. All others count, including those added later.
WITHOUT_EFFECT = {
    *("num_samples", "warmup_samples"),  # sample m depends on seed + m alone
    *("stage_weights", "split", "fsdp_same_sample"),  # which rank computes what
    *("fsdp_cpu_offload", "swap", "swap_batch", "swap_gb_per_s"),  # where parameters are kept
    "experts",  # follows from the model's files
    *("memory_limit_gib", "timeout_s", "stall_steps"),
    *("output_dir", "save_latents", "compare_official", "attention_slicing", "decode", "profile"),
}
OF_VIDEOS = {"decode_chunk_size"}
# Fields of which only the outcome counts: a shape, the content of files, the device that was found.
BY_OUTCOME = {
    *("latent_shape", "num_frames", "height", "width", "parallel", "backend"),
    *("model", "model_id", "image", "device", "dtype", "threads", "manifest", "rows"),
}
_LIBRARIES = ("torch", "diffusers")
_RESTORE = "restore it, or start a new run"


class Samples(BaseModel):
    """What latents are made from.

    settings: fields of RunConfig, and the outcome of others
    image:    SHA-256 of the file; None where the conditioning is synthetic
    model:    for a folder the SHA-256 of each file that is read; for a hub model its revision
    device, dtype, threads: of rank 0
    rows:     those of the manifest, each image as the SHA-256 of its file; not set without a manifest
    image_path, source: where image and model were found, for messages; they may move later
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    settings: dict[str, Any]
    image: str | None
    model: dict[str, str]
    device: str
    dtype: str
    threads: int
    rows: list[dict[str, Any]] | None = None
    image_path: str | None
    source: str


class Origin(BaseModel):
    """The record in origin.json.

    samples:  what latents are made from
    videos:   settings on which videos depend beside their latents
    versions: of the libraries
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    samples: Samples
    videos: dict[str, Any]
    versions: dict[str, str]

    @property
    def digest(self) -> str:
        """SHA-256 of what latents are made from, stored in each file of them. New fields do not change old digests."""
        facts = json.dumps(self.samples.model_dump(mode="json", exclude_unset=True), sort_keys=True)
        return hashlib.sha256(facts.encode()).hexdigest()

    def to_json(self) -> str:
        """Serialise for origin.json, without fields that were not set, so that the digest stays the same."""
        return self.model_dump_json(indent=2, exclude_unset=True) + "\n"


def of(config: RunConfig, execution: Execution) -> Origin:
    """What this machine would make samples of this configuration from now. Reads the image and the model's files.

    Raises:
        ConfigError: one of the files cannot be read, or the manifest has changed since the run was made.
    """
    fields = config.model_dump(mode="json")
    settings = {name: fields[name] for name in sorted(fields.keys() - WITHOUT_EFFECT - OF_VIDEOS - BY_OUTCOME)}
    settings |= {"shape": list(config.shape), "backend": execution.backend}
    # the axes that reorder sums; tp is younger than the origins of some runs
    settings |= {axis: size for axis, size in config.layout.lockstep_sizes.items() if size > 1 or axis != "tp"}
    samples = Samples(
        settings=settings,
        image=None if config.image_path is None else _digests([config.image_path])[0],
        model=_model(config, execution.dtype),
        device=execution.device_type,
        dtype=execution.dtype_name,
        threads=execution.threads,
        **({} if config.rows is None else {"rows": _rows(config)}),
        image_path=None if config.image_path is None else str(config.image_path),
        source=config.source or config.model,
    )
    return Origin(samples=samples, videos=videos_of(config), versions={name: version(name) for name in _LIBRARIES})


def _rows(config: RunConfig) -> list[dict[str, Any]]:
    """The manifest's rows as `Samples` has them."""
    rows, path = config.rows or (), config.manifest
    if path is not None:
        for number, (was, now) in enumerate(itertools.zip_longest(rows, manifest.read(path))):
            if was != now:
                changed = f"{manifest.name_of_row(number)} has changed since the run was made"
                raise ConfigError("manifest", path, f"{changed}: {_RESTORE}")
    images = sorted({Path(row["image"]) for row in rows if "image" in row})
    digest = dict(zip(images, _digests(images), strict=True))
    return [row | ({"image": digest[Path(row["image"])]} if "image" in row else {}) for row in rows]


def videos_of(config: RunConfig) -> dict[str, Any]:
    """Settings on which videos depend beside their latents."""
    return config.model_dump(mode="json", include=OF_VIDEOS)


def read(folder: Path) -> Origin | None:
    """The record of a run folder; None where it is missing or damaged."""
    try:
        return Origin.model_validate_json((folder / FILE).read_bytes())
    except (OSError, ValueError):
        return None


def write(folder: Path, record: Origin) -> None:
    """Write origin.json."""
    write_atomically(folder / FILE, record.to_json())


def begin(folder: Path, config: RunConfig, execution: Execution, record: Origin | None = None) -> Origin:
    """Record what the samples of a run are made from, unless an earlier attempt did, and return the record.

    Args:
        folder: the run folder.
        config: its configuration.
        execution: of this machine.
        record: that of rank 0, for another machine, which then keeps it in its folder too.

    Raises:
        ConfigError: this machine would make samples from something else than the earlier attempt or rank 0.
    """
    now, before = of(config, execution), record or read(folder)
    check(before or now, now, folder.name)
    if read(folder) is None:
        write(folder, before or now)
    return before or now


def check(before: Origin, now: Origin, run: str) -> None:
    """Check that samples would be made from the same settings and files as before.

    Raises:
        ConfigError: one line with the first difference.
    """
    if found := _difference(before.samples, now.samples):
        raise ConfigError("run", run, found)


def other_versions(before: Origin) -> list[str]:
    """A line on each library whose version has changed: its kernels may round differently."""
    now = {name: version(name) for name in _LIBRARIES}
    return [
        f"{name} was {was} when the first samples were made and is {now[name]} now: the last bits may differ"
        for name, was in before.versions.items()
        if now.get(name, was) != was
    ]


def other_videos(before: Origin, config: RunConfig) -> str | None:
    """The first setting that has changed for videos but not for latents, in words."""
    edited = _first_edited(before.videos, videos_of(config))
    return "{} was {} and is {} in config.json now".format(*edited) if edited else None


def _first_edited(was: dict[str, Any], now: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """Name, earlier and present value of the first setting that differs. One that was not there had its default."""
    for name, value in now.items():
        field = RunConfig.model_fields.get(name)
        before = was.get(name, field.default if field else value)
        if before != value:
            return name, before, value
    return None


def _difference(was: Samples, now: Samples) -> str | None:
    if edited := _first_edited(was.settings, now.settings):
        return _edited(*edited)
    for number, (before, after) in enumerate(zip(was.rows or [], now.rows or [], strict=False)):
        if name := next((name for name in before | after if before.get(name) != after.get(name)), None):
            changed = f"{manifest.name_of_row(number)}, column {name} of the manifest"
            return f"{changed} is not what its sample was made from: {_RESTORE}"
    if len(was.rows or []) != len(now.rows or []):
        return f"the manifest has other rows than its samples were made from: {_RESTORE}"
    if was.image != now.image:
        if was.image is None or now.image is None:
            return _edited("image", was.image_path, now.image_path)
        return f"image {now.image_path} is not the file that its samples were made from: {_RESTORE}"
    return _other_model(was, now) if was.model != now.model else None


def _edited(name: str, was: Any, now: Any) -> str:
    return f"{name} was {was} when its samples were made and is {now} in config.json now: {_RESTORE}"


def _other_model(was: Samples, now: Samples) -> str:
    if was.source != now.source:
        return f"model was {was.source} when its samples were made and is {now.source} now: {_RESTORE}"
    name = min(name for name in was.model.keys() | now.model.keys() if was.model.get(name) != now.model.get(name))
    if name == "revision" and name in was.model and name in now.model:
        return f"model {was.source} was at revision {was.model[name]} and is at {now.model[name]} now: {_RESTORE}"
    how = "been added" if name not in was.model else "disappeared" if name not in now.model else "changed"
    return f"{name} of the model has {how} since its samples were made: {_RESTORE}"


def _model(config: RunConfig, dtype: torch.dtype) -> dict[str, str]:
    if config.source is None:
        return {"architecture": config.model}
    folder = Path(config.source).expanduser()
    if not folder.is_dir():
        return {"revision": _revision(config)}
    paths = list(_read_files(folder, config, dtype))
    return dict(zip((path.relative_to(folder).as_posix() for path in paths), _digests(paths), strict=True))


def _read_files(folder: Path, config: RunConfig, dtype: torch.dtype) -> Iterable[Path]:
    """The files that a run reads from a pipeline's folder. Of two variants of weights, the one nearer to its dtype."""
    parts = ["scheduler", "unet", *(f"unet/{name}" for name in config.svd_experts)]
    if not config.is_svd:
        index = family.index(str(folder))
        parts = [name for name, place in index.items() if isinstance(place, list) and place[0]]
    elif config.image_path is not None:
        parts += ["feature_extractor", "image_encoder", "vae"]
    if not config.is_svd or config.image_path is not None:
        yield folder / family.INDEX
    for part in parts:
        for kind in ("json",) if config.is_svd else ("json", "txt", "model"):  # of tokenizers, too
            yield from sorted(folder.glob(f"{part}/*.{kind}"))
        weights = [] if config.random_weights else sorted(folder.glob(f"{part}/*.safetensors"))
        half = [path for path in weights if ".fp16" in path.name]
        full = [path for path in weights if path not in half]
        yield from (full or half) if dtype == torch.float32 else (half or full)


def _revision(config: RunConfig) -> str:
    """The commit of a hub model in the cache."""
    import huggingface_hub as hub

    name = family.UNET if config.is_svd else family.INDEX
    path = hub.try_to_load_from_cache(str(config.source), name)
    return Path(path).parents[name.count("/")].name if isinstance(path, str) else UNKNOWN


def _digests(paths: list[Path]) -> list[str]:
    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    try:
        with ThreadPoolExecutor() as pool:
            return list(pool.map(digest, paths))
    except OSError as error:
        allowed = f"must be readable: samples are made from it ({error.strerror})"
        raise ConfigError("file", error.filename, allowed) from None
