"""Trains the tiny Stable Video Diffusion that ships with the package, on clips that it draws itself; see TRAINING.md.

Run: python -m vdpp_core.tiny_svd.train FOLDER [--experts] [--small]
The same command resumes an interrupted training.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from diffusers import AutoencoderKLTemporalDecoder, StableVideoDiffusionPipeline
from diffusers.training_utils import EMAModel
from torch import Tensor, nn

from vdpp_core.config.fields import MODELS
from vdpp_core.models.architectures import PUBLISHED_SCHEDULER
from vdpp_core.models.experts import Experts
from vdpp_core.plots import video_quality
from vdpp_core.runs import machine
from vdpp_core.tiny_svd import model
from vdpp_core.tiny_svd.clips import FRAMES, SIZE, Scenes, scenes, to_image

CHECKPOINT_EVERY_S = 120
LOG_EVERY = 50
BATCH = 8
CROP = 32
CONDITIONING_DROPOUT = 0.1
BOUNDARY = 9.0  # sigma; Wan 2.2 image-to-video changes experts at flow time 0.9, where noise / signal is 0.9 / 0.1
SIGMA_MIN, SIGMA_MAX = PUBLISHED_SCHEDULER["sigma_min"], PUBLISHED_SCHEDULER["sigma_max"]
EXPERTS = {"high_noise": (BOUNDARY, SIGMA_MAX), "low_noise": (SIGMA_MIN, BOUNDARY)}
RANGES = EXPERTS | {"control": (SIGMA_MIN, SIGMA_MAX)}


@dataclass(frozen=True)
class Setting:
    """The length of a training."""

    vae_iterations: int
    unet_iterations: int
    expert_iterations: int  # of each of the two; their control takes as many as both
    pool: int  # clips that the UNet's batches are drawn from; every second iteration replaces one


LONG = Setting(vae_iterations=2400, unet_iterations=1800, expert_iterations=600, pool=1024)
SMALL = Setting(vae_iterations=200, unet_iterations=200, expert_iterations=30, pool=64)


class Training:
    """Training of one network: warm-up and cosine decay, clipped gradients, averaged weights (EMA), checkpoints, a log.

    An interrupted training resumes from its last checkpoint with the same results, since the generator is saved too.
    """

    def __init__(
        self,
        name: str,
        network: nn.Module,
        folder: Path,
        iterations: int,
        learning_rate: float,
        memory: dict[str, Tensor] | None = None,
    ) -> None:
        self.name, self.network, self.iterations, self.memory = name, network, iterations, memory or {}
        self.parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, learning_rate, betas=(0.9, 0.99), weight_decay=1e-3)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)
        self.average = EMAModel(self.parameters, decay=0.998, use_ema_warmup=True, power=0.75)
        self.checkpoint, self.log = folder / f"{name}.pt", folder / f"{name}.csv"
        self.iteration, self.seconds = 0, 0.0
        self.lines: list[list[float | str]] = []
        if self.checkpoint.exists():
            self._resume()

    def _rate(self, iteration: int) -> float:
        cosine = (1 + math.cos(math.pi * iteration / self.iterations)) / 2
        return min(1.0, (iteration + 1) / min(100, self.iterations / 6)) * max(0.01, cosine)

    def run(self, loss_of_a_batch: Callable[[], tuple[Tensor, float]]) -> None:
        """Train to the end; `loss_of_a_batch` returns the loss and a figure to log beside it."""
        saved = time.perf_counter()
        losses: list[float] = []
        figures: list[float] = []
        while self.iteration < self.iterations:
            started = time.perf_counter()
            loss, figure = loss_of_a_batch()
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.average.step(self.parameters)
            self.iteration += 1
            self.seconds += time.perf_counter() - started
            losses.append(loss.item())
            figures.append(figure)
            if self.iteration % LOG_EVERY == 0 or self.iteration == self.iterations:
                self._report(sum(losses) / len(losses), sum(figures) / len(figures))
                losses, figures = [], []
                if time.perf_counter() - saved > CHECKPOINT_EVERY_S or self.iteration == self.iterations:
                    self._save()
                    saved = time.perf_counter()
        self.average.copy_to(self.parameters)
        self.network.eval().requires_grad_(False)

    def _report(self, loss: float, figure: float) -> None:
        self.lines.append([self.iteration, round(self.seconds), f"{loss:.5f}", f"{figure:.3f}"])
        print(
            f"{self.name} {self.iteration}/{self.iterations}, {self.seconds:.0f} s: loss {loss:.4f}, {figure:.2f}",
            flush=True,
        )

    def _save(self) -> None:
        state = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "average": self.average.state_dict(),
            "generator": torch.get_rng_state(),
            "memory": self.memory,
            "progress": [self.iteration, self.seconds, self.lines],
        }
        unfinished = self.checkpoint.with_suffix(".tmp")
        torch.save(state, unfinished)
        unfinished.replace(self.checkpoint)
        with self.log.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([["iteration", "seconds", "loss", "figure"], *self.lines])

    def _resume(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.average.load_state_dict(state["average"])
        torch.set_rng_state(state["generator"])
        for name, tensor in self.memory.items():
            tensor.copy_(state["memory"][name])
        self.iteration, self.seconds, self.lines = state["progress"]


def train_vae(folder: Path, setting: Setting) -> AutoencoderKLTemporalDecoder:
    """Train the VAE: first on crops, which are cheap, then on whole frames, half of them four in a row for the temporal
    layers. The loss is L2 + 0.2·L1 + 1e-6·KL."""
    torch.manual_seed(1)
    vae = model.vae()

    def batch() -> tuple[Tensor, float]:
        cropped = training.iteration < 0.6 * setting.vae_iterations
        frames = 1 if cropped else (1, 4)[int(torch.randint(2, ()))]
        first = int(torch.randint(FRAMES, ()))
        pixels = scenes(BATCH // frames).draw(first + frames)[:, first:].flatten(0, 1) * 2 - 1
        if cropped:
            top, left = torch.randint(SIZE - CROP + 1, (2,)).tolist()
            pixels = pixels[..., top : top + CROP, left : left + CROP]
        posterior = vae.encode(pixels).latent_dist
        error = vae.decode(posterior.sample(), num_frames=frames).sample - pixels
        loss = error.square().mean() + 0.2 * error.abs().mean() + 1e-6 * posterior.kl().mean()
        return loss, -10 * math.log10(error.square().mean().item() / 4)

    training = Training("vae", vae, folder, setting.vae_iterations, 2e-3)
    training.run(batch)
    return vae


@dataclass
class Pool:
    """Encoded clips that the UNet's batches are drawn from, replaced one by one so that few are seen twice.

    Attributes:
        latents: (N, frames, 4, 8, 8).
        image_latents: (N, 4, 8, 8).
        image_embeddings: (N, 1, 32).
        added_time_ids: (N, 3): fps - 1, motion bucket, noise augmentation.
    """

    latents: Tensor
    image_latents: Tensor
    image_embeddings: Tensor
    added_time_ids: Tensor

    @classmethod
    def empty(cls, size: int, frames: int = FRAMES) -> Pool:
        """A pool of `size` clips without values."""
        return cls(
            torch.empty(size, frames, 4, 8, 8),
            torch.empty(size, 4, 8, 8),
            torch.empty(size, 1, 32),
            torch.empty(size, 3),
        )

    @torch.no_grad()
    def put(self, index: int, pipeline: StableVideoDiffusionPipeline, clip: Scenes) -> None:
        """Encode the clip of one scene as the official pipeline does, with a random frame rate, which has no effect."""
        frames = clip.draw(self.latents.shape[1])[0]
        strength = 0.1 * torch.rand(()).item()
        noisy = frames[:1] * 2 - 1 + strength * torch.randn_like(frames[:1])
        self.latents[index] = pipeline.vae.encode(frames * 2 - 1).latent_dist.mode()
        self.image_latents[index] = pipeline._encode_vae_image(noisy, "cpu", 1, False)[0]
        self.image_embeddings[index] = pipeline._encode_image([to_image(frames[0])], "cpu", 1, False)[0]
        self.added_time_ids[index] = torch.tensor([torch.randint(31, ()).item(), clip.motion_buckets.item(), strength])


def train_unet(folder: Path, setting: Setting, vae: AutoencoderKLTemporalDecoder) -> StableVideoDiffusionPipeline:
    """Train the UNet over all noise levels, after measuring the scaling factor of the latents."""
    torch.manual_seed(2)
    unet = model.unet()
    pipeline = model.assemble(vae, model.image_encoder(), unet)
    train_denoiser("unet", pipeline, folder, setting.unet_iterations, 8e-4, setting.pool, measure_scale=True)
    return pipeline


def train_expert(name: str, folder: Path, setting: Setting) -> StableVideoDiffusionPipeline:
    """Fine-tune the UNet in the package on one of RANGES.

    Iteration i of each name has the same clips, noise and quantiles of sigma, since the seed is the same.
    """
    torch.manual_seed(3)
    pipeline = StableVideoDiffusionPipeline.from_pretrained(MODELS["tiny"], use_safetensors=True)
    iterations = setting.expert_iterations * (2 if name == "control" else 1)
    train_denoiser(name, pipeline, folder, iterations, 3e-4, setting.pool, RANGES[name])
    return pipeline


def train_denoiser(
    name: str,
    pipeline: StableVideoDiffusionPipeline,
    folder: Path,
    iterations: int,
    learning_rate: float,
    pool_size: int,
    sigma_range: tuple[float, float] = (SIGMA_MIN, SIGMA_MAX),
    measure_scale: bool = False,
) -> None:
    """Train a pipeline's UNet as a denoiser with SVD's preconditioning (Karras et al. 2022, EDM; Blattmann et al. 2023,
    SVD).

    σ is log-normal, and one in eight uniform in log σ, both within `sigma_range`. Conditioning is dropped at random for
    classifier-free guidance (Ho and Salimans 2022).
    """
    vae, unet, pool = pipeline.vae, pipeline.unet, Pool.empty(pool_size)
    scaling_factor = torch.tensor(vae.config.scaling_factor)
    memory = vars(pool) | {"scaling_factor": scaling_factor}
    training = Training(name, unet, folder, iterations, learning_rate, memory)
    if not training.iteration:
        for index in range(pool_size):
            pool.put(index, pipeline, scenes(1))
        if measure_scale:
            scaling_factor.copy_(1 / pool.latents.std())
    vae.register_to_config(scaling_factor=scaling_factor.item())

    def batch() -> tuple[Tensor, float]:
        if training.iteration % 2:
            pool.put(training.iteration // 2 % pool_size, pipeline, scenes(1))
        chosen = torch.randint(pool_size, (BATCH,))
        kept = (torch.rand(BATCH) > CONDITIONING_DROPOUT).float()
        sigmas = draw_sigmas(*sigma_range)
        losses = denoising_losses(unet, pool, chosen, sigmas, scaling_factor, kept)
        errors = losses.detach() * sigmas**2 / (sigmas**2 + 1)
        return losses.mean(), errors.mean().sqrt().item()

    training.run(batch)


def denoising_losses(
    unet: nn.Module, pool: Pool, chosen: Tensor, sigmas: Tensor, scaling_factor: Tensor, kept: Tensor
) -> Tensor:
    """Losses (N,) of clips denoised in one step, with noise from torch's global generator; see `noisy_batch`."""
    inputs, wanted = noisy_batch(pool, chosen, sigmas, scaling_factor, kept)
    with torch.autocast("cpu", torch.bfloat16, enabled=torch.cpu._is_avx512_bf16_supported()):
        prediction = unet(**inputs, return_dict=False)[0]
    return v_losses(prediction, wanted)


def noisy_batch(
    pool: Pool, chosen: Tensor, sigmas: Tensor, scaling_factor: Tensor, kept: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Arguments of the UNet for noisy clips, and the v-prediction that is right for them, (N, frames, 4, H, W).

    Args:
        chosen: (N,), indices of clips in the pool.
        sigmas: (N,), their noise levels, or () for one of all; the noise comes from torch's global generator.
        kept: (N,), 1 with conditioning and 0 without.
    """
    sigma, kept = (values.view(-1, 1, 1, 1, 1) for values in (sigmas, kept))
    clean = pool.latents[chosen] * scaling_factor
    noise = torch.randn_like(clean)
    image_latents = (pool.image_latents[chosen][:, None] * kept).expand_as(clean)
    inputs = {
        "sample": torch.cat([(clean + sigma * noise) / (sigma**2 + 1).sqrt(), image_latents], dim=2),
        "timestep": sigmas.log() / 4,
        "encoder_hidden_states": pool.image_embeddings[chosen] * kept[..., 0, 0],
        "added_time_ids": pool.added_time_ids[chosen],
    }
    return inputs, (noise - sigma * clean) / (sigma**2 + 1).sqrt()


def v_losses(prediction: Tensor, wanted: Tensor) -> Tensor:
    """Mean squared error of each clip's v-prediction, (N,): that of the denoised latents weighted with (σ² + 1)/σ²."""
    return ((prediction - wanted) ** 2).mean(dim=(1, 2, 3, 4))


def draw_sigmas(low: float = SIGMA_MIN, high: float = SIGMA_MAX) -> Tensor:
    """One sigma from each eighth of the distribution between low and high, so that batches differ less."""
    first, last = torch.special.ndtr((torch.tensor([low, high]).log() - 0.7) / 1.6)
    shares = first + (last - first) * (torch.arange(BATCH) + torch.rand(BATCH)) / BATCH
    sigmas = (0.7 + 1.6 * torch.special.ndtri(shares)).exp()
    sigmas[torch.randint(BATCH, ())] = low * (high / low) ** torch.rand(()).item()
    return sigmas.clamp(low, high)


def train(folder: Path, setting: Setting) -> None:
    """Train both networks, resuming if possible; write folder/tiny-svd and a figure of the logs beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    vae = train_vae(folder, setting)
    model.save(train_unet(folder, setting, vae), folder / "tiny-svd")
    vae_log, unet_log = (pd.read_csv(folder / f"{name}.csv") for name in ("vae", "unet"))
    minutes = (vae_log.seconds.iloc[-1] + unet_log.seconds.iloc[-1]) / 60
    reached = f"VAE {vae_log.figure.iloc[-1]:.1f} dB, UNet loss {unet_log['loss'].iloc[-1]:.2f}"
    title = f"{minutes:.0f} minutes of training: {reached}"
    figure = video_quality.training(vae_log, unet_log, title, machine.hardware_name(machine.hardware()))
    figure.savefig(folder / "training.png")


def train_experts(folder: Path, setting: Setting) -> None:
    """Fine-tune the experts and their control, resuming if possible; write folder/experts, folder/control, a log."""
    folder.mkdir(parents=True, exist_ok=True)
    pipelines = {name: train_expert(name, folder, setting) for name in RANGES}
    logs = pd.concat({name: pd.read_csv(folder / f"{name}.csv") for name in RANGES}, names=["network"])
    logs.droplevel(1).to_csv(folder / "training-experts.csv")
    control = pipelines["control"]
    experts = Experts({name: pipelines[name].unet for name in EXPERTS}, [math.log(BOUNDARY) / 4])
    model.save(model.assemble(control.vae, control.image_encoder, experts), folder / "experts")
    model.save(control, folder / "control")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--experts", action="store_true", help="fine-tune the experts from the model in the package")
    parser.add_argument("--small", action="store_true", help="a few minutes at most, to check that it works")
    arguments = parser.parse_args()
    (train_experts if arguments.experts else train)(arguments.folder, SMALL if arguments.small else LONG)
