"""The clips that the tiny model is trained and judged on: one shape that moves over a gradient and bounces.

Run: python -m vdpp_core.tiny_svd.clips      (redraws the example image)
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
FASTEST = 0.08  # image widths per frame, at motion bucket 255


@dataclass(frozen=True)
class Scenes:
    """N scenes. Lengths are shares of the image width, colours 0 to 1, angles radians; y grows downwards.

    Attributes:
        shapes: (N,), index into SHAPES.
        colours: (N, 3), of the shapes.
        gradients: (N, 2, 3), the background's colours at its two sides.
        angles: (N,), of the gradients.
        radii: (N,), of the shapes.
        starts: (N, 2), x and y of the centres in the first frame.
        directions: (N,), of the motion.
        motion_buckets: (N,), 0 to 255, which set the speed.
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
        """One or some of the scenes."""
        chosen = index if isinstance(index, slice) else slice(index, index + 1)
        return replace(self, **{name: values[chosen] for name, values in vars(self).items()})

    def images(self, size: int = SIZE) -> list[Image.Image]:
        """The first frames as images of size × size pixels."""
        return [to_image(frames[0]) for frames in self.draw(1, size)]

    def positions(self, frames: int = FRAMES) -> Tensor:
        """Centres of the shapes, (N, frames, 2), reflected at the walls."""
        speeds = self.motion_buckets / 255 * FASTEST
        velocities = speeds[:, None] * torch.stack([self.directions.cos(), self.directions.sin()], dim=1)
        low = self.radii[:, None, None]
        room = 1 - 2 * low
        path = self.starts[:, None] - low + velocities[:, None] * torch.arange(frames)[:, None]
        return low + room - (path.remainder(2 * room) - room).abs()

    def backgrounds(self, size: int = SIZE) -> Tensor:
        """Backgrounds without the shapes, (N, 3, size, size), 0 to 1."""
        y, x = _grid(size)
        cosines, sines = self.angles.cos()[:, None, None], self.angles.sin()[:, None, None]
        share = (cosines * (x - 0.5) + sines * (y - 0.5) + 0.5)[:, None]
        near, far = self.gradients[:, 0, :, None, None], self.gradients[:, 1, :, None, None]
        return (near + (far - near) * share).clamp(0, 1)

    def masks(self, frames: int = FRAMES, size: int = SIZE) -> Tensor:
        """Coverage of each pixel by the shape, (N, frames, 1, size, size), 0 to 1."""
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
        """Draw the clips, (N, frames, 3, size, size), 0 to 1."""
        masks = self.masks(frames, size)
        return self.backgrounds(size)[:, None] * (1 - masks) + self.colours[:, None, :, None, None] * masks


def scenes(count: int, generator: torch.Generator | None = None) -> Scenes:
    """Random scenes: a bright shape on a dark gradient."""

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
    """Scenes that training never draws: they have their own generator, training uses the global one."""
    return scenes(count, torch.Generator().manual_seed(20_261_128))


def example() -> Scenes:
    """The scene of the example image: an orange ball on a blue background."""
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
    """Convert a frame (3, height, width), 0 to 1, to an RGB image."""
    return Image.fromarray((frame.permute(1, 2, 0) * 255).round().to(torch.uint8).numpy())


def _grid(size: int) -> tuple[Tensor, Tensor]:
    ticks = (torch.arange(size) + 0.5) / size
    y, x = torch.meshgrid(ticks, ticks, indexing="ij")
    return y, x


if __name__ == "__main__":
    example().images(256)[0].save(EXAMPLE_IMAGE, optimize=True)
