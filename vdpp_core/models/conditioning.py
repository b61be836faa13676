"""What the UNet is told beside the latents. Made on a replica's first rank before the clock starts, then sent on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from vdpp_core.config import RunConfig
from vdpp_core.models.images import read_image

if TYPE_CHECKING:
    from diffusers import StableVideoDiffusionPipeline


FAR_FROM_THE_NOISE = 2**32  # from the seeds of a run's samples


@dataclass
class Conditioning:
    """The conditioning of a replica's samples. G is 2 with guidance (the unconditional half first), else 1.

    image_embeddings: (G·B, 1, D), one per image
    image_latents:    (samples, G·B, 4, H, W), one per sample: the augmentation noise comes from the sample's generator
    added_time_ids:   (G·B, 3): fps - 1, motion bucket, noise augmentation
    """

    image_embeddings: Tensor
    image_latents: Tensor
    added_time_ids: Tensor

    @classmethod
    def empty(
        cls, config: RunConfig, unet: Any, samples: int, device: torch.device, dtype: torch.dtype
    ) -> Conditioning:
        """Room for what the replica's first rank sends."""
        batch, channels, _, rows, columns = config.shape
        batch *= 2 if config.guidance_scale > 1 else 1
        return cls(
            torch.empty(batch, 1, unet.config.cross_attention_dim, device=device, dtype=dtype),
            torch.empty(samples, batch, channels, rows, columns, device=device, dtype=dtype),
            torch.empty(batch, 3, device=device, dtype=dtype),
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.image_embeddings.dtype

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.image_embeddings, self.image_latents, self.added_time_ids


def generators(config: RunConfig, samples: Sequence[int]) -> list[torch.Generator]:
    """One CPU generator a sample, so that a sample is the same on every kind of device."""
    return [torch.Generator().manual_seed(config.seed + sample) for sample in samples]


def synthetic(config: RunConfig, room: Conditioning, samples: Sequence[int]) -> Conditioning:
    """Conditioning of the right shapes from the run's seed, for benchmarks without an image.

    A sample has the same in every layout: its image latents come from a generator of its own, not that of its noise.
    """
    generator = torch.Generator().manual_seed(config.seed)
    room.image_embeddings.copy_(randn_tensor(room.image_embeddings.shape, generator=generator, dtype=room.dtype))
    for latents, sample in zip(room.image_latents, samples or range(1), strict=True):
        generator.manual_seed(config.seed + sample + FAR_FROM_THE_NOISE)
        latents.copy_(randn_tensor(latents.shape, generator=generator, dtype=room.dtype))
    ids = [config.fps - 1, config.motion_bucket_id, config.noise_aug_strength]
    room.added_time_ids.copy_(torch.tensor([ids]))
    return room


def augmentation(config: RunConfig, generator: torch.Generator) -> Tensor:
    """What the pipeline draws first from a sample's generator, for the image's noise: (1, 3, height, width)."""
    width, height = config.image_size
    return randn_tensor((1, 3, height, width), generator=generator)


@torch.no_grad()
def encode(config: RunConfig, pipeline: StableVideoDiffusionPipeline, draws: list[torch.Generator]) -> Conditioning:
    """The conditioning of one image with the official pipeline's own methods, in its order of drawing.

    Each generator of `draws` (one a sample) is left where the pipeline goes on to draw the latents. With an fp16 VAE
    that asks for it, the VAE is left in fp32.
    """
    assert config.image_path is not None
    image, device, batch = read_image(config.image_path, config.image_size), pipeline.vae.device, config.shape[0]
    guided = config.guidance_scale > 1
    image_embeddings = pipeline._encode_image(image, device, batch, guided)
    pixels = pipeline.video_processor.preprocess(image, height=config.image_size[1], width=config.image_size[0])
    pixels = pixels.to(device)
    if pipeline.vae.dtype == torch.float16 and pipeline.vae.config.force_upcast:
        pipeline.vae.to(dtype=torch.float32)
    image_latents = []
    for generator in draws:
        noisy = pixels + config.noise_aug_strength * augmentation(config, generator).to(pixels)
        latents = pipeline._encode_vae_image(noisy, device, batch, guided)
        image_latents.append(latents.to(image_embeddings.dtype))
    added_time_ids = pipeline._get_add_time_ids(
        config.fps - 1,
        config.motion_bucket_id,
        config.noise_aug_strength,
        image_embeddings.dtype,
        1,
        batch,
        guided,
    )
    return Conditioning(image_embeddings, torch.stack(image_latents), added_time_ids.to(device))
