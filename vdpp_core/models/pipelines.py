"""The official pipeline of a run, around denoisers of ours and without the weights of anything else."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers.models.unets.unet_spatio_temporal_condition import UNetSpatioTemporalConditionModel
from torch import nn

from vdpp_core import models
from vdpp_core.config import RunConfig, family
from vdpp_core.config.errors import ConfigError, in_one_line
from vdpp_core.models import svd, weights
from vdpp_core.models.experts import Experts
from vdpp_core.models.images import whole_image
from vdpp_core.models.stand_ins import Answer, StandIn

DENOISERS = ("unet", "transformer", "transformer_2")
OURS = (  # arguments of a pipeline's call that a run sets, or that have no place in one
    *("generator", "latents", "output_type", "return_dict", "num_inference_steps", "timesteps", "sigmas"),
    *("image", "prompt", "negative_prompt", "height", "width", "num_frames"),
    *("callback_on_step_end", "callback_on_step_end_tensor_inputs"),
)
OF_SVD = (  # of a run, which have no effect on any other pipeline
    *("guidance_scale", "min_guidance_scale", "motion_bucket_id", "noise_aug_strength", "decode_chunk_size"),
    *("random_weights", "shortcuts", "forward_chunking", "enable_memory_opt"),
)
SETTINGS = ["*.json", "*.txt", "*.model", "*.jinja"]  # tokenizers, too
NEEDED = ("latents", "output_type", "generator", "num_inference_steps")


@dataclass
class Official:
    """A pipeline whose denoisers are real and whose encoders, the VAE among them, are stand-ins.

    Attributes:
        stand_ins: component -> what stands for it.
        once_encoded: arguments that may be others in a call whose encoders only repeat what they returned before.
    """

    pipeline: Any
    stand_ins: dict[str, StandIn] = field(default_factory=dict)
    once_encoded: dict[str, Any] = field(default_factory=dict)

    @property
    def denoisers(self) -> dict[str, nn.Module]:
        """Name -> the denoiser, or component/expert -> the expert."""
        found: dict[str, nn.Module] = {}
        for name in DENOISERS:
            module = getattr(self.pipeline, name, None)
            if isinstance(module, Experts):
                found |= {f"{name}/{each}": expert for each, expert in module.experts.items()}
            elif module is not None:
                found[name] = module
        return found

    def answer(self, answer: Answer) -> None:
        """Have all stand-ins answer with a `Recorder`, `Player`, `Real` or `Inventor`."""
        for stand_in in self.stand_ins.values():
            stand_in.answer = answer

    def replace(self, name: str, module: Any) -> None:
        """Put a module in the place of a component or expert. The pipeline's own record of classes stays as it is."""
        component, _, expert = name.partition("/")
        if expert:
            getattr(self.pipeline, component).experts[expert] = module
        else:
            object.__setattr__(self.pipeline, component, module)


def around(config: RunConfig, given: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Official:
    """Make the run's official pipeline around its denoisers; whatever else has weights is a stand-in, and so is a
    denoiser that is not given."""
    names = models.denoisers(config)
    absent = models.denoisers_on_meta(config, dtype, [name for name in names if name not in given])
    denoisers = {name: (given | absent)[name] for name in names}
    if config.is_svd and len(names) > 1:
        experts = {name.partition("/")[2]: module for name, module in denoisers.items()}
        settings = UNetSpatioTemporalConditionModel.load_config(config.source, subfolder="unet")
        denoisers = {"unet": Experts(experts, settings["boundaries"])}
    if config.is_svd:
        encoders = shells(config) if svd.has_pipeline(config) else svd.any_shells(denoisers["unet"])
        pipeline = svd.pipeline(config, **denoisers, **encoders)
    else:
        encoders = shells(config)
        pipeline = svd.load_whole(kind(config), folder(config), dtype, None, **denoisers, **encoders)
    pipeline.set_progress_bar_config(disable=True)  # the rank shows one
    official = Official(pipeline, once_encoded=svd.ONCE_ENCODED if config.is_svd else {})
    for name, shell in absent.items():
        official.replace(name, StandIn(name, shell, device, dtype))
    for name, shell in encoders.items():
        official.stand_ins[name] = StandIn(name, shell, device, dtype)
        official.replace(name, official.stand_ins[name])
    return official


def kind(config: RunConfig) -> Any:
    """The class of the run's pipeline."""
    return getattr(importlib.import_module("diffusers"), config.pipeline_class)


def parts(config: RunConfig) -> dict[str, Any]:
    """Component -> class, of those with weights.

    Raises:
        ConfigError: a class is neither diffusers' nor transformers'.
    """
    unets = dict.fromkeys(svd.denoisers(config), UNetSpatioTemporalConditionModel) if config.is_svd else {}
    if config.is_svd and not svd.has_pipeline(config):
        return unets
    index = json.loads((folder(config) / "model_index.json").read_bytes())
    places = {name: place for name, place in index.items() if isinstance(place, list) and place[0]}
    classes = {name: _named(config, name, *place) for name, place in places.items() if not (unets and name == "unet")}
    return unets | {name: found for name, found in classes.items() if issubclass(found, nn.Module)}


def _named(config: RunConfig, name: str, library: str, kind: str) -> type:
    """A component's class: of diffusers, of transformers, or of one of diffusers' pipelines."""
    if library not in ("diffusers", "transformers"):
        library = f"diffusers.pipelines.{library}"
    try:
        return getattr(importlib.import_module(library), kind)
    except (ImportError, AttributeError):
        allowed = f"must have parts of diffusers and transformers, not code of its own ({name}: {library}.{kind})"
        raise ConfigError(*config.model_argument, allowed) from None


def shells(config: RunConfig) -> dict[str, nn.Module]:
    """Component -> the encoder without weights, on the meta device."""
    made = {}
    for name, found in parts(config).items():
        if name.partition("/")[0] not in DENOISERS:
            place = folder(config) / name
            with torch.device("meta"):
                if hasattr(found, "load_config"):  # diffusers
                    made[name] = found.from_config(found.load_config(place)).eval()
                else:  # transformers
                    made[name] = found(found.config_class.from_pretrained(place)).eval()
    return made


def skeletons(config: RunConfig, dtype: torch.dtype, only: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """Component -> denoiser, all or some, its parameters on the meta device, in the types that `load_part` gives them.

    Buffers have their values: some are computed by the constructor and not stored.
    """
    from accelerate import init_empty_weights
    from diffusers.models.modeling_utils import no_init_weights

    made = {}
    for name, found in parts(config).items():
        if name in (DENOISERS if only is None else only):
            with no_init_weights(), init_empty_weights(include_buffers=False):
                module = found.from_config(found.load_config(folder(config) / name)).eval().requires_grad_(False)
            kept, stored = set(found._keep_in_fp32_modules or ()), module.state_dict().keys()
            for path, tensor in [*module.named_parameters(), *module.named_buffers()]:
                if tensor.is_floating_point() and path in stored:
                    tensor.data = tensor.data.to(torch.float32 if kept & set(path.split(".")) else dtype)
            made[name] = module
    return made


def load_part(config: RunConfig, name: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Load a component with its weights, of a variant in the run's type where there is one."""
    place = svd.weights_folder(config, dtype, name)
    return svd.load_whole(parts(config)[name], place, dtype, weights.variant(place, dtype)).to(device).eval()


def load_official(config: RunConfig, device: torch.device, dtype: torch.dtype, without: tuple[str, ...] = ()) -> Any:
    """Load the official pipeline as any user would, without anything of ours in it, or only some of its components."""
    places = [svd.weights_folder(config, dtype, name) for name in parts(config) if name not in without]
    variant = next(filter(None, (weights.variant(place, dtype) for place in places)), None)  # for those that have it
    absent: dict[str, Any] = dict.fromkeys(without)
    pipeline = svd.load_whole(kind(config), folder(config), dtype, variant, **absent).to(device)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def folder(config: RunConfig) -> Path:
    """Folder of the run's pipeline; of a hub model, the snapshot in the cache, for which weights are not downloaded."""
    place = Path(str(config.source)).expanduser()
    if place.is_dir():
        return place
    import huggingface_hub as hub

    return Path(hub.snapshot_download(str(config.source), allow_patterns=SETTINGS))


@functools.lru_cache(maxsize=8)
def call_arguments(config: RunConfig) -> dict[str, Any]:
    """Arguments of the official pipeline's call for a run, except generator and output type.

    What a run does not set is left to the pipeline.
    """
    if config.is_svd:
        return svd.call_arguments(config)
    given: dict[str, Any] = {name: getattr(config, name) for name in ("prompt", "negative_prompt", *SIZES)}
    if config.image is not None:
        given["image"] = whole_image(config.image)
    return {name: value for name, value in given.items() if value is not None} | {
        "num_inference_steps": config.total_steps,
        **config.call_values,
    }


SIZES = ("num_frames", "height", "width")


def prompted(config: RunConfig) -> RunConfig:
    """The run with an empty prompt where its pipeline takes one and none is given, which is enough for predictions."""
    without = config.prompt is None and "prompt" in _parameters(config)
    return config.replace(prompt="") if without else config


def _parameters(config: RunConfig) -> dict[str, inspect.Parameter]:
    """Name -> parameter of the pipeline's call.

    Raises:
        ConfigError: it is not known which pipeline that is, or diffusers has none of that name.
    """
    if not config.pipeline_class:
        allowed = "must be the folder or hub name of a diffusers pipeline, of which model_index.json can be read"
        raise ConfigError(*config.model_argument, allowed)
    found = getattr(importlib.import_module("diffusers"), config.pipeline_class, None)
    if found is None:
        raise ConfigError(*config.model_argument, f"diffusers has no {config.pipeline_class}, which it names")
    parameters = inspect.signature(found.__call__).parameters.items()
    return {name: one for name, one in parameters if name != "self" and one.kind is not one.VAR_KEYWORD}


def check(config: RunConfig) -> None:
    """Check that a run can call its pipeline.

    Raises:
        ConfigError: diffusers has no such pipeline, its call lacks something, or an argument is none of it.
    """
    if config.model_id is None and not config.random_weights and not family.index(str(config.source)):
        allowed = "is not in the cache and the hub cannot be reached: download it where it can"
        raise ConfigError("model", f"wan22 ({config.source})", f"{allowed}, or pass its folder with --model-id")
    known = _parameters(config)
    if missing := [name for name in NEEDED if name not in known]:
        allowed = f"cannot be split by steps: the call of {config.pipeline_class} has no {', '.join(missing)}"
        raise ConfigError(*config.model_argument, allowed)
    for name in OF_SVD:
        if name == "random_weights" and config.model_id is None:
            continue  # the published configuration
        if (value := getattr(config, name)) != RunConfig.model_fields[name].default:
            instead = f": use --call {name}={value}" if name in known else ""
            raise ConfigError(name, value, f"only for Stable Video Diffusion, not {config.pipeline_class}{instead}")
    for name, value in config.call_values.items():
        if name not in known or name in OURS:
            allowed = f"must be one of {', '.join(sorted(set(known) - {*OURS}))}"
            raise ConfigError("call", name, allowed)
        if isinstance(known[name].default, int | float) and isinstance(value, str):
            raise ConfigError("call", name, f"must be a number, true or false, not {in_one_line(value)}")
    for name in ("prompt", "negative_prompt", "image", *SIZES):
        if getattr(config, name) is not None and name not in known:
            raise ConfigError(name, getattr(config, name), f"{config.pipeline_class} takes none")
    needed = [name for name in ("prompt", "image") if name in known and known[name].default is inspect.Parameter.empty]
    for name in needed:
        if getattr(config, name) is None:
            raise ConfigError(name, "", f"{config.pipeline_class} needs one")
