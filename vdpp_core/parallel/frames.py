"""Sequence parallelism over frames: one forward pass of SVD's UNet split by frames. Exact up to the order of sums.

Spatial layers see one frame at a time and run unchanged on a rank's own frames. Two kinds of layers mix frames:

TemporalResnetBlock has two convolutions over three neighbouring frames, each after a group norm over all frames. Each
convolution costs one halo exchange: the norm's statistics go to all ranks, the first and last frame to the neighbours.
TemporalBasicTransformerBlock attends over all frames, separately at each position. An all-to-all turns "own frames, all
positions" into "all frames, own positions", and another one back (Jacobs et al. 2023, "DeepSpeed Ulysses").

With N ranks, F frames and a hidden state of X bytes, the halo exchanges of a resnet block move 4(N-1)·X/F bytes. An
all-to-all there and back moves 2(N-1)·X/N: more as long as 2N < F, and as much for 7 ranks and 14 frames.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vdpp_core.models.patches import Patches, as_asked
from vdpp_core.parallel.group import Group

Edge = Tensor | None


def split(unet: nn.Module, group: Group, patches: Patches) -> None:
    """Have each rank of `group` compute its share of the frames: whole latents in, whole prediction out.

    The frames need not divide evenly; shares then differ by one. In a call of the UNet, fewer frames than ranks raise a
    ValueError.
    """
    from diffusers.models.attention import TemporalBasicTransformerBlock
    from diffusers.models.resnet import TemporalResnetBlock
    from diffusers.models.transformers.transformer_temporal import TransformerSpatioTemporalModel

    frames = Frames(group, unet.forward)
    for name, module in unet.named_modules():
        if isinstance(module, TemporalResnetBlock):
            patches.forward(module, partial(frames.resnet, module, name))
        elif isinstance(module, TemporalBasicTransformerBlock):
            patches.forward(module, partial(frames.transformer, module, name, module.forward))
        elif isinstance(module, TransformerSpatioTemporalModel):
            patches.before(module.time_proj, frames.count_from_own)
    patches.forward(unet, frames.forward)


class Frames:
    """A rank's share of the frames, and the layers that need other ranks' frames.

    Args:
        compute: the UNet's own forward pass.
    """

    def __init__(self, group: Group, compute: Any) -> None:
        self.group, self.compute = group, compute
        self.shares: list[slice] = []
        self.counts: list[int] = []
        self.weights = torch.empty(0)
        self.shared_out: tuple[int, torch.device, torch.dtype] | None = None

    @torch.no_grad()
    def forward(
        self,
        sample: Tensor,
        timestep: Any,
        encoder_hidden_states: Tensor,
        added_time_ids: Tensor,
        return_dict: bool = True,
    ) -> Any:
        """Run the UNet on this rank's frames and gather the whole prediction; signature as of the UNet.

        Raises:
            ValueError: fewer frames than ranks.
        """
        frames = sample.shape[1]
        if frames < self.group.size:
            raise ValueError(f"frames {self.group.size}: must be at most num_frames, {frames}")
        wanted = frames, sample.device, torch.promote_types(sample.dtype, torch.float32)
        if self.shared_out != wanted:
            self.share_out(*wanted)
        own = sample[:, self.shares[self.group.rank]]
        prediction = self.compute(own, timestep, encoder_hidden_states, added_time_ids, return_dict=False)[0]
        return as_asked(self._whole(prediction), return_dict)

    def share_out(self, frames: int, device: torch.device, wide: torch.dtype) -> None:
        """Compute the shares and the norm's weights once for all steps, to spare a GPU the wait for the host."""
        self.shared_out = frames, device, wide
        self.shares = self.group.shares(frames)
        self.counts = [share.stop - share.start for share in self.shares]
        self.weights = torch.tensor(self.counts, dtype=wide, device=device).view(-1, 1, 1, 1) / frames

    def _whole(self, prediction: Tensor) -> Tensor:
        """Shares (B, f, 4, H, W) of different lengths -> (B, F, 4, H, W)."""
        padded = F.pad(prediction, (0, 0) * 3 + (0, max(self.counts) - prediction.shape[1]))
        gathered = self.group.all_gather(padded, "", "prediction")
        return torch.cat([part[:, :count] for part, count in zip(gathered, self.counts, strict=True)], dim=1)

    def count_from_own(self, module: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any]) -> Any:
        """Shift the frame indices of the positional embedding to this rank's frames (a forward pre-hook)."""
        return (args[0] + self.shares[self.group.rank].start,), kwargs

    def transformer(
        self,
        block: nn.Module,
        name: str,
        compute: Any,
        hidden_states: Tensor,
        num_frames: int,
        encoder_hidden_states: Tensor | None = None,
    ) -> Tensor:
        """Run a temporal transformer block: (B·f, S, C) -> the same, with own frames and all positions.

        The block itself sees (F, B·s, C): positions are independent, so those of a batch may pass for one video's.
        """
        frames, (positions, channels) = sum(self.counts), hidden_states.shape[1:]
        batch, shares = hidden_states.shape[0] // num_frames, self.group.shares(positions)
        mine = shares[self.group.rank]
        widths = [share.stop - share.start for share in shares]
        width = widths[self.group.rank]
        out = [num_frames * batch * one * channels for one in widths]
        back = [count * batch * width * channels for count in self.counts]

        by_frame = hidden_states.view(batch, num_frames, positions, channels).transpose(0, 1)
        pieces = hidden_states.new_empty(sum(out))
        for piece, share in zip(pieces.split(out), shares, strict=True):
            piece.view(num_frames, batch, -1, channels).copy_(by_frame[:, :, share])
        whole = self.group.all_to_all(pieces, out, back, name).view(frames, batch * width, channels)
        del pieces
        if width:
            context = encoder_hidden_states
            if context is not None:
                context = context.unflatten(0, (batch, positions))[:, mine].flatten(0, 1)
            whole = compute(whole, num_frames=frames, encoder_hidden_states=context)
        arrived = self.group.all_to_all(whole.reshape(-1), back, out, name)
        del whole
        result = torch.empty_like(hidden_states)
        by_frame = result.view(batch, num_frames, positions, channels).transpose(0, 1)
        for part, share in zip(arrived.split(out), shares, strict=True):
            by_frame[:, :, share] = part.view(num_frames, batch, -1, channels)
        return result

    def resnet(self, block: Any, name: str, input_tensor: Tensor, temb: Tensor) -> Tensor:
        """Run a temporal resnet block: (B, C, f, H, W) and the time embedding (B, f, D) -> (B, C', f, H, W)."""
        hidden, before, after = self.activate(block.norm1, input_tensor, name)
        hidden = _convolve(block.conv1, hidden, before, after)
        if block.time_emb_proj is not None:
            hidden += block.time_emb_proj(block.nonlinearity(temb)).transpose(1, 2)[..., None, None]
        hidden, before, after = self.activate(block.norm2, hidden, name)
        hidden = _convolve(block.conv2, hidden, before, after)
        if block.conv_shortcut is not None:
            input_tensor = block.conv_shortcut(input_tensor)
        return input_tensor + hidden

    def activate(self, norm: nn.GroupNorm, hidden: Tensor, name: str) -> tuple[Tensor, Edge, Edge]:
        """Apply group norm over all frames, then SiLU, to the own frames (B, C, f, H, W).

        Returns:
            The result, and that of the neighbouring frames before and after, each (B, C, H, W) or None.
        """
        own = _statistics(norm, hidden, self.weights.dtype)
        gathered, *edges = self.group.all_gather_with_edges(own, hidden[:, :, 0], hidden[:, :, -1], name)
        means, m2 = gathered.unbind(1)
        mean = (self.weights * means).sum(0)
        count = hidden[0].numel() // norm.num_groups // self.counts[self.group.rank] * sum(self.counts)
        variance = m2.sum(0) / count + (self.weights * (means - mean).square()).sum(0)
        before, after = (edge if edge is None else _normalise(norm, edge, mean, variance) for edge in edges)
        return _normalise(norm, hidden, mean, variance), before, after


def _statistics(norm: nn.GroupNorm, hidden: Tensor, wide: torch.dtype) -> Tensor:
    """(B, C, …) -> (2, B, groups, 1): mean and squared deviations (M2), combined over ranks as in Chan, Golub and
    LeVeque 1979. Values are centred first, so that no large numbers cancel."""
    values = hidden.unflatten(1, (norm.num_groups, -1))
    rest_of = tuple(range(2, values.ndim))
    count, centre = values[0, 0].numel(), values.mean(rest_of, keepdim=True)
    centred = values - centre
    rest = centred.sum(rest_of, keepdim=True, dtype=wide) / count
    squares = torch.linalg.vector_norm(centred, dim=rest_of, keepdim=True, dtype=wide).square() - count * rest.square()
    return torch.stack([centre + rest, squares]).flatten(3)


def _normalise(norm: nn.GroupNorm, hidden: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """(B, C, …) -> the same: group norm with given statistics (B, groups, 1), then SiLU.

    Computed as a batch norm of B·C channels, whose kernels subtract the mean first and round once, at the end. In half
    precision x·scale + shift has 13 times the error where the mean is ten standard deviations.
    """
    videos, channels = hidden.shape[:2]
    mean, variance = (one.repeat_interleave(channels // norm.num_groups, 1).flatten() for one in (mean, variance))
    scale, shift = (one.to(mean.dtype).repeat(videos) for one in (norm.weight, norm.bias))
    flat = hidden.reshape(1, videos * channels, -1)
    return F.silu(F.batch_norm(flat, mean, variance, scale, shift, eps=norm.eps), inplace=True).view(hidden.shape)


def _convolve(conv: nn.Conv3d, hidden: Tensor, before: Edge, after: Edge) -> Tensor:
    """A (3, 1, 1) convolution of the own frames with zero padding, plus the contribution of the neighbours' edges."""
    result = conv(hidden)
    if before is not None:
        result[:, :, 0] += _pointwise(conv.weight[:, :, 0], before)
    if after is not None:
        result[:, :, -1] += _pointwise(conv.weight[:, :, 2], after)
    return result


def _pointwise(weight: Tensor, frame: Tensor) -> Tensor:
    """A pointwise convolution: weight (C', C, 1, 1), frame (B, C, H, W) -> (B, C', H, W)."""
    return torch.matmul(weight.flatten(1), frame.flatten(2)).unflatten(-1, frame.shape[2:])
