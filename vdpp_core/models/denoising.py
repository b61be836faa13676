"""The denoising loop of diffusers' `StableVideoDiffusionPipeline`, one step at a time, starting at any step."""

from __future__ import annotations

import copy
from typing import Any

import torch
from diffusers.schedulers.scheduling_euler_discrete import EulerDiscreteScheduler
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from vdpp_core.config import RunConfig
from vdpp_core.models.conditioning import Conditioning


class Denoiser:
    """UNet, scheduler and conditioning of a replica's samples.

    Latents here are (B, F, C, H, W), as in the pipeline; files and `RunConfig.latent_shape` are B C F H W.
    """

    def __init__(
        self, config: RunConfig, unet: Any, scheduler: EulerDiscreteScheduler, conditioning: Conditioning
    ) -> None:
        self.unet, self.scheduler, self.conditioning = unet, scheduler, conditioning
        self.device, self.dtype = conditioning.image_embeddings.device, conditioning.image_embeddings.dtype
        batch, channels, frames, rows, columns = config.shape
        self.latent_shape = (batch, frames, channels, rows, columns)
        scales = torch.linspace(config.min_guidance_scale, config.guidance_scale, frames)
        self.guidance_scale = scales.to(self.device, self.dtype).view(1, frames, 1, 1, 1)
        self.halves = 2 if config.guidance_scale > 1 else 1
        self.passes = self.halves if config.sequential else 1

    def noise(self, generator: torch.Generator) -> Tensor:
        """Draw the latents before step 0."""
        noise = randn_tensor(self.latent_shape, generator=generator, device=self.device, dtype=self.dtype)
        return noise * self.scheduler.init_noise_sigma

    def begin(self, index: int, first_step: int) -> Trajectory:
        """Start the replica's sample number `index` at a step.

        Each sample gets its own scheduler, because schedulers count steps; they share the schedule itself.
        """
        scheduler = copy.copy(self.scheduler)
        scheduler.set_begin_index(first_step)
        return Trajectory(self, scheduler, self.conditioning.image_latents[index])


class Trajectory:
    """One sample in consecutive steps."""

    def __init__(self, denoiser: Denoiser, scheduler: EulerDiscreteScheduler, image_latents: Tensor) -> None:
        self.denoiser, self.scheduler = denoiser, scheduler
        frames = denoiser.latent_shape[1]
        self.image_latents = image_latents.unsqueeze(1).expand(-1, frames, -1, -1, -1)  # the same for every frame

    @torch.no_grad()
    def step(self, latents: Tensor, step: int) -> Tensor:
        """Denoise latents (B, F, C, H, W) by one step; the result has the same shape and type."""
        timestep = self.scheduler.timesteps[step]
        prediction = self._predict(latents, timestep)
        if self.denoiser.halves == 2:
            unconditional, conditional = prediction.chunk(2)
            prediction = unconditional + self.denoiser.guidance_scale * (conditional - unconditional)
        return self.scheduler.step(prediction, timestep, latents).prev_sample

    def _predict(self, latents: Tensor, timestep: Tensor) -> Tensor:
        """Run the UNet on both guidance passes, at once or one after the other."""
        denoiser, conditioning = self.denoiser, self.denoiser.conditioning
        noisy = self.scheduler.scale_model_input(torch.cat([latents] * denoiser.halves), timestep)
        inputs = torch.cat([noisy, self.image_latents], dim=2)
        whole = inputs, conditioning.image_embeddings, conditioning.added_time_ids
        passes = [tensor.chunk(denoiser.passes) for tensor in whole]
        predictions = [
            denoiser.unet(part, timestep, encoder_hidden_states=embeddings, added_time_ids=time_ids, return_dict=False)[
                0
            ]
            for part, embeddings, time_ids in zip(*passes, strict=True)
        ]
        return predictions[0] if len(predictions) == 1 else torch.cat(predictions)
