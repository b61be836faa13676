"""The clips that the tiny model learns from and is judged on: one shape that moves over a gradient and bounces.

Run: python -m vdpp_core.tiny_svd.clips      (draws the example image again)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from PIL import Image
from torch import Tensor

from vdpp_core.config.fields import EXAMPLE_IMAGE

FRAMES, SIZE = 14, 64
SHAPES = ("disc", "square", "triangle")
FASTEST = 0.08  # of the width, a frame, at motion bucket 255


@dataclass(frozen=True)
class Scenes:
    """N scenes; lengths are shares of the width, colours 0 to 1, y grows downwards.

    shapes (N): index into SHAPES. colours (N, 3), gradients (N, 2, 3): from one side to the other, angles (N).
    radii (N), starts (N, 2): x, y. directions (N): radians. motion_buckets (N): 0 to 255, sets the speed.
    """

    shapes: Tensor
    colours: Tensor
    gradients: Tensor
    angles: Tensor
    radii: Tensor
    starts: Tensor
    directions: Tensor
    motion_buckets: Tensor

    def __getitem__(self, index: int | slice) -> Scenes:
        """One or some of them, as scenes of their own."""
        chosen = index if isinstance(index, slice) else slice(index, index + 1)
        return replace(self, **{name: values[chosen] for name, values in vars(self).items()})

    def with_bucket(self, motion_bucket: float) -> Scenes:
        """The same images, moving as much as the bucket says."""
        return replace(self, motion_buckets=torch.full_like(self.motion_buckets, motion_bucket))

    def images(self, size: int = SIZE) -> list[Image.Image]:
        """The first frames."""
        return [to_image(frames[0]) for frames in self.draw(1, size)]

    def positions(self, frames: int = FRAMES) -> Tensor:
        """(N, frames, 2): the centre, thrown back by the walls."""
        speeds = self.motion_buckets / 255 * FASTEST
        velocities = speeds[:, None] * torch.stack([self.directions.cos(), self.directions.sin()], dim=1)
        low = self.radii[:, None, None]
        room = 1 - 2 * low
        path = self.starts[:, None] - low + velocities[:, None] * torch.arange(frames)[:, None]
        return low + room - (path.remainder(2 * room) - room).abs()

    def backgrounds(self, size: int = SIZE) -> Tensor:
        """(N, 3, size, size)."""
        y, x = _grid(size)
        cosines, sines = self.angles.cos()[:, None, None], self.angles.sin()[:, None, None]
        share = (cosines * (x - 0.5) + sines * (y - 0.5) + 0.5)[:, None]
        near, far = self.gradients[:, 0, :, None, None], self.gradients[:, 1, :, None, None]
        return (near + (far - near) * share).clamp(0, 1)

    def masks(self, frames: int = FRAMES, size: int = SIZE) -> Tensor:
        """(N, frames, 1, size, size): how much of a pixel the shape covers."""
        y, x = _grid(size)
        centres = self.positions(frames)[..., None, None]
        dx, dy = x - centres[:, :, 0], y - centres[:, :, 1]
        disc = (dx**2 + dy**2).sqrt()
        square = torch.maximum(dx.abs(), dy.abs()) / 0.886  # the area of the disc
        triangle = torch.maximum(0.866 * dx.abs() - 0.5 * dy, dy) / 0.65
        kinds = self.shapes[:, None, None, None]
        distance = torch.where(kinds == 0, disc, torch.where(kinds == 1, square, triangle))
        return torch.sigmoid((self.radii[:, None, None, None] - distance) * size * 1.5)[:, :, None]

    def draw(self, frames: int = FRAMES, size: int = SIZE) -> Tensor:
        """(N, frames, 3, size, size), 0 to 1."""
        masks = self.masks(frames, size)
        return self.backgrounds(size)[:, None] * (1 - masks) + self.colours[:, None, :, None, None] * masks


def scenes(count: int, generator: torch.Generator | None = None) -> Scenes:
    """Scenes drawn at random: a bright shape before a dark gradient."""

    def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=generator)

    colours = uniform(3)
    colours = colours / colours.amax(dim=1, keepdim=True) * uniform(1, low=0.75)
    radii = uniform(low=0.12, high=0.2)
    return Scenes(
        shapes=torch.randint(len(SHAPES), (count,), generator=generator),
        colours=colours,
        gradients=uniform(2, 3, high=0.45),
        angles=uniform(high=2 * math.pi),
        radii=radii,
        starts=radii[:, None] + (1 - 2 * radii[:, None]) * uniform(2),
        directions=uniform(high=2 * math.pi),
        motion_buckets=torch.randint(256, (count,), generator=generator).float(),
    )


def held_out(count: int) -> Scenes:
    """Scenes that training never draws: it uses the global generator, these their own."""
    return scenes(count, torch.Generator().manual_seed(20_261_128))


def example() -> Scenes:
    """What the example image shows: an orange ball before a blue evening."""
    return Scenes(
        shapes=torch.tensor([0]),
        colours=torch.tensor([[0.95, 0.55, 0.2]]),
        gradients=torch.tensor([[[0.12, 0.16, 0.42], [0.1, 0.36, 0.3]]]),
        angles=torch.tensor([1.2]),
        radii=torch.tensor([0.17]),
        starts=torch.tensor([[0.36, 0.52]]),
        directions=torch.tensor([0.6]),
        motion_buckets=torch.tensor([127.0]),
    )


def to_image(frame: Tensor) -> Image.Image:
    """(3, height, width), 0 to 1 -> an RGB image."""
    return Image.fromarray((frame.permute(1, 2, 0) * 255).round().to(torch.uint8).numpy())


def _grid(size: int) -> tuple[Tensor, Tensor]:
    ticks = (torch.arange(size) + 0.5) / size
    y, x = torch.meshgrid(ticks, ticks, indexing="ij")
    return y, x


if __name__ == "__main__":
    example().images(256)[0].save(EXAMPLE_IMAGE, optimize=True)
