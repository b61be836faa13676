"""Makes what lies beside this file: the tiny Stable Video Diffusion (random weights, fp16) and the example image.

Run: python -m vdpp_core.assets.make
"""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLTemporalDecoder,
    EulerDiscreteScheduler,
    StableVideoDiffusionPipeline,
    UNetSpatioTemporalConditionModel,
)
from PIL import Image
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

from vdpp_core.config import EXAMPLE_IMAGE, MODELS
from vdpp_core.unets.published import PUBLISHED_SCHEDULER


def tiny_pipeline() -> StableVideoDiffusionPipeline:
    """SVD with every kind of layer that the published one has, at 1.3 M parameters in the UNet."""
    torch.manual_seed(0)
    vae = AutoencoderKLTemporalDecoder(
        block_out_channels=(32, 32, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 4,
        latent_channels=4,
        layers_per_block=1,
    )
    image_encoder = CLIPVisionModelWithProjection(
        CLIPVisionConfig(
            hidden_size=32,
            projection_dim=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=224,
            patch_size=32,
        )
    )
    unet = UNetSpatioTemporalConditionModel(
        sample_size=8,
        num_frames=14,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        cross_attention_dim=32,
        num_attention_heads=(2, 4),
        addition_time_embed_dim=32,
        projection_class_embeddings_input_dim=96,
    )
    scheduler = EulerDiscreteScheduler(**PUBLISHED_SCHEDULER)
    return StableVideoDiffusionPipeline(vae, image_encoder, unet, scheduler, CLIPImageProcessor())


def ball(size: int = 256) -> Image.Image:
    """A ball with a shadow on a slanted gradient."""
    y, x = torch.meshgrid(torch.linspace(0, 1, size), torch.linspace(0, 1, size), indexing="ij")

    def disc(row: float, column: float, radius: float, edge: float) -> torch.Tensor:
        return torch.sigmoid((radius - ((y - row) ** 2 + (x - column) ** 2).sqrt()) * size / edge)

    slope = (0.7 * y + 0.3 * x)[..., None]
    picture = (1 - slope) * torch.tensor([0.16, 0.27, 0.45]) + slope * torch.tensor([0.42, 0.52, 0.40])
    picture = picture * (1 - 0.35 * disc(0.60, 0.40, 0.17, 8))[..., None]
    inside = disc(0.52, 0.36, 0.17, 1)[..., None]
    light = (1.05 - 1.6 * ((y - 0.45) ** 2 + (x - 0.30) ** 2).sqrt())[..., None]
    picture = (1 - inside) * picture + inside * light * torch.tensor([0.95, 0.55, 0.20])
    return Image.fromarray((picture.clamp(0, 1) * 255).round().to(torch.uint8).numpy())


def save(pipeline: StableVideoDiffusionPipeline, folder: Path) -> None:
    """In fp16, described so that every version of diffusers and transformers loads it, in fp32 unless told."""
    pipeline.to(torch.float16).save_pretrained(folder)
    for name, written, wanted in (
        ("model_index.json", "CLIPImageProcessorPil", "CLIPImageProcessor"),
        ("feature_extractor/preprocessor_config.json", "CLIPImageProcessorPil", "CLIPImageProcessor"),
        ("image_encoder/config.json", '"dtype": "float16"', '"dtype": "float32"'),
    ):
        settings = folder / name
        settings.write_text(settings.read_text().replace(written, wanted))


if __name__ == "__main__":
    save(tiny_pipeline(), Path(str(MODELS["tiny"])))
    ball().save(EXAMPLE_IMAGE, optimize=True)
