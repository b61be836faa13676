"""Stable Video Diffusion: the published configuration, and loading from a folder, the hub or random weights."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.unets.unet_spatio_temporal_condition import UNetSpatioTemporalConditionModel
from PIL import Image
from torch import nn

from vdpp_core.config import RunConfig
from vdpp_core.models.architectures import PUBLISHED, PUBLISHED_SCHEDULER, PUBLISHED_VAE
from vdpp_core.models.images import read_image

if TYPE_CHECKING:
    from diffusers import StableVideoDiffusionPipeline

# The pipeline would keep the image at full size, and as much noise, on the device through its loop. Encoders that only
# repeat what they returned for the real image can do with a tiny one.
TINY = torch.zeros(1, 3, 2, 2, device="cpu")  # also where this is imported for the meta device
ONCE_ENCODED = {"image": TINY}


def denoisers(config: RunConfig) -> tuple[str, ...]:
    """Names of a run's denoisers: "unet", or unet/expert for each of its experts."""
    return tuple(f"unet/{name}" for name in config.svd_experts) or ("unet",)


def structure(config: RunConfig, name: str = "unet") -> UNetSpatioTemporalConditionModel:
    """Construct a UNet of a run from its architecture alone, with the constructor's values."""
    if config.source is None:
        return UNetSpatioTemporalConditionModel.from_config(PUBLISHED[config.model])
    architecture = UNetSpatioTemporalConditionModel.load_config(config.source, subfolder=name)
    return UNetSpatioTemporalConditionModel.from_config(architecture)


def weights_folder(config: RunConfig, dtype: torch.dtype, part: str = "unet") -> Path:
    """Folder of a part's weights; those of a hub model are downloaded unless they are in the cache."""
    folder = Path(str(config.source)).expanduser()
    if not folder.is_dir():
        import huggingface_hub as hub

        half, full = (f"{part}/*.fp16*.safetensors", None), (f"{part}/*.safetensors", "*.fp16*")
        for wanted, unwanted in (full, half) if dtype == torch.float32 else (half, full):
            place = hub.snapshot_download(
                str(config.source), allow_patterns=[wanted, f"{part}/*.json"], ignore_patterns=unwanted
            )
            folder = Path(place)
            if any(folder.glob(f"{part}/*.safetensors")):
                break
    return folder / part


def any_shells(unet: Any) -> dict[str, nn.Module]:
    """Encoders without weights for a UNet alone. Their sizes do not matter: its conditioning is random."""
    from diffusers import AutoencoderKLTemporalDecoder
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    clip = CLIPVisionConfig(projection_dim=unet.config.cross_attention_dim, **sizes)
    with torch.device("meta"):
        vae = AutoencoderKLTemporalDecoder.from_config(PUBLISHED_VAE)
        return {"vae": vae, "image_encoder": CLIPVisionModelWithProjection(clip)}


def pipeline(config: RunConfig, **given: Any) -> StableVideoDiffusionPipeline:
    """Make the official pipeline around a given UNet and given encoders."""
    from diffusers import EulerDiscreteScheduler, StableVideoDiffusionPipeline
    from transformers import CLIPImageProcessor

    if config.source is None:
        scheduler = EulerDiscreteScheduler(**PUBLISHED_SCHEDULER)
    else:
        scheduler = EulerDiscreteScheduler.from_pretrained(config.source, subfolder="scheduler")
    if has_pipeline(config):
        extractor = CLIPImageProcessor.from_pretrained(config.source, subfolder="feature_extractor")
    else:
        extractor = CLIPImageProcessor()

    class Pipeline(StableVideoDiffusionPipeline):
        """Decides whether to guide without asking the device for the scale of each frame at every step."""

        do_classifier_free_guidance = config.guidance_scale > 1

    made = Pipeline(scheduler=scheduler, feature_extractor=extractor, **given)
    prepare = made.video_processor.preprocess

    def prepare_unless_tiny(image: Any, *args: Any, **kwargs: Any) -> Any:
        return image if image is TINY else prepare(image, *args, **kwargs)

    made.video_processor.preprocess = prepare_unless_tiny
    return made


def has_pipeline(config: RunConfig) -> bool:
    """Whether the source has all parts of a pipeline; a UNet and a scheduler are enough without an image."""
    return config.source is not None and config.image_path is not None


def call_arguments(config: RunConfig) -> dict[str, Any]:
    """Arguments of `StableVideoDiffusionPipeline` for a run, except generator and output type."""
    if config.image_path is None:
        image = Image.new("RGB", (64, 64))  # the pipeline resizes it; what it shows does not matter
    else:
        image = read_image(config.image_path, config.image_size)
    return {
        "image": image,
        "height": config.image_size[1],
        "width": config.image_size[0],
        "num_frames": config.shape[2],
        "num_inference_steps": config.total_steps,
        "min_guidance_scale": config.min_guidance_scale,
        "max_guidance_scale": config.guidance_scale,
        "fps": config.fps,
        "motion_bucket_id": config.motion_bucket_id,
        "noise_aug_strength": config.noise_aug_strength,
        "decode_chunk_size": config.decode_chunk_size,
        "num_videos_per_prompt": config.shape[0],
    }


def load_whole(kind: Any, folder: Path, dtype: torch.dtype, variant: str | None, **kwargs: Any) -> Any:
    """Load a pipeline or a part of one as diffusers and transformers do, except for what is given."""
    with warnings.catch_warnings():  # diffusers ≥ 0.42 prefers `dtype`, which 0.36 does not know
        warnings.filterwarnings("ignore", message=".*torch_dtype.*")
        return kind.from_pretrained(folder, torch_dtype=dtype, variant=variant, use_safetensors=True, **kwargs)
