"""The conditioning of the UNet: made on a replica's first rank before the clock starts, then sent to the others."""

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


FAR_FROM_THE_NOISE = 2**32  # keeps these seeds apart from those of the samples' noise


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
        """Allocate tensors of the right shapes for `samples` samples."""
        batch, channels, _, rows, columns = config.shape
        batch *= config.guidance_passes
        return cls(
            torch.empty(batch, 1, unet.config.cross_attention_dim, device=device, dtype=dtype),
            torch.empty(samples, batch, channels, rows, columns, device=device, dtype=dtype),
            torch.empty(batch, 3, device=device, dtype=dtype),
        )

    @property
    def dtype(self) -> torch.dtype:
        """Element type of all three tensors."""
        return self.image_embeddings.dtype

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """All tensors, in a fixed order."""
        return self.image_embeddings, self.image_latents, self.added_time_ids


def generators(config: RunConfig, samples: Sequence[int]) -> list[torch.Generator]:
    """Make one CPU generator per sample, so that a sample is the same on every type of device."""
    return [torch.Generator().manual_seed(config.seed + sample) for sample in samples]


def synthetic(config: RunConfig, room: Conditioning, samples: Sequence[int]) -> Conditioning:
    """Fill `room` with random conditioning from the run's seed, for benchmarks without an image.

    It does not depend on the layout: a sample's image latents come from a generator of their own.
    """
    generator = torch.Generator().manual_seed(config.seed)
    room.image_embeddings.copy_(randn_tensor(room.image_embeddings.shape, generator=generator, dtype=room.dtype))
    for latents, sample in zip(room.image_latents, samples or range(1), strict=True):
        generator.manual_seed(config.seed + sample + FAR_FROM_THE_NOISE)
        latents.copy_(randn_tensor(latents.shape, generator=generator, dtype=room.dtype))
    room.added_time_ids.copy_(torch.tensor([_time_ids(config)]))
    return room


def _time_ids(config: RunConfig) -> tuple[float, ...]:
    return config.fps - 1, config.motion_bucket_id, config.noise_aug_strength


def augmentation(config: RunConfig, generator: torch.Generator) -> Tensor:
    """Draw the image's augmentation noise, (1, 3, height, width), the first draw from a sample's generator."""
    width, height = config.image_size
    return randn_tensor((1, 3, height, width), generator=generator)


@torch.no_grad()
def encode(config: RunConfig, pipeline: StableVideoDiffusionPipeline, draws: list[torch.Generator]) -> Conditioning:
    """Encode the run's image with the official pipeline's own methods, drawing in the pipeline's order.

    Each generator of `draws` (one per sample) is left where the pipeline would draw the latents. An fp16 VAE that asks
    for it (`force_upcast`) is left in fp32.
    """
    assert config.image_path is not None
    image, device, batch = read_image(config.image_path, config.image_size), pipeline.vae.device, config.shape[0]
    guided = config.guidance_passes > 1
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
    added_time_ids = pipeline._get_add_time_ids(*_time_ids(config), image_embeddings.dtype, 1, batch, guided)
    return Conditioning(image_embeddings, torch.stack(image_latents), added_time_ids.to(device))
