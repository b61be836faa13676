"""Sequence parallelism over frames: one forward pass of a video UNet split by frames. Exact up to the order of sums.

Spatial layers see one frame at a time and run unchanged on a rank's own frames. Two kinds of layers mix frames:

TemporalResnetBlock (SVD) and TemporalConvLayer (text-to-video, I2VGen-XL) convolve three neighbouring frames, each time
after a group norm over all frames. Each convolution costs one halo exchange: the norm's statistics go to all ranks, the
first and last frame to the neighbours.
Temporal transformers attend over all frames, separately at each position. An all-to-all turns "own frames, all
positions" into "all frames, own positions", and another one back (Jacobs et al. 2023, "DeepSpeed Ulysses"). All but
SVD's also begin with a group norm over all frames, whose statistics are gathered.

With N ranks, F frames and a hidden state of X bytes, the halo exchanges of a resnet block move 4(N-1)·X/F bytes. An
all-to-all there and back moves 2(N-1)·X/N: more as long as 2N < F, and as much for 7 ranks and 14 frames.

Alternatives that do not pay. An all-to-all of query, key and value moves 3X out instead of X, because all have as many
channels as the hidden state. Gathering the hidden state that keys and values are made of moves (N-1)·X in one exchange:
as much for two ranks, with 7 % more operations in a block, and more for other N. Letting the two passes of the guidance
take turns, so that one computes while the other's exchange travels, would save 5 to 30 % of a pass of the published
UNet on two GPUs at 12 to 25 GB/s and 1 to 3 % at 200 GB/s (14 × 72 × 128, 60 to 300 TFLOP/s, 10 µs an exchange; a cost
model, not measured). On CPU ranks it saves nothing for the tiny model and costs 6 % for the medium one, whose layers
are slower in half batches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vdpp_core.models.patches import Patches
from vdpp_core.models.stand_ins import replaced
from vdpp_core.parallel.group import Group

Edge = Tensor | None


def frame_axis(denoiser: Any) -> int | None:
    """The dimension of the frames in the latents of a UNet that can be split by them; None for other denoisers."""
    from diffusers import I2VGenXLUNet, UNet3DConditionModel, UNetMotionModel, UNetSpatioTemporalConditionModel

    if isinstance(denoiser, UNetSpatioTemporalConditionModel):
        return 1
    return 2 if isinstance(denoiser, UNetMotionModel | UNet3DConditionModel | I2VGenXLUNet) else None


def split(unet: Any, group: Group, patches: Patches) -> None:
    """Have each rank of `group` compute its share of the frames: whole latents in, whole prediction out.

    The frames need not divide evenly; shares then differ by one. In a call of the UNet, fewer frames than ranks raise a
    ValueError.
    """
    from diffusers.models.attention import TemporalBasicTransformerBlock
    from diffusers.models.resnet import TemporalConvLayer, TemporalResnetBlock
    from diffusers.models.transformers.transformer_temporal import (
        TransformerSpatioTemporalModel,
        TransformerTemporalModel,
    )
    from diffusers.models.unets.unet_motion_model import AnimateDiffTransformer3D

    axis = frame_axis(unet)
    assert axis is not None
    frames = Frames(group, unet.forward, axis)
    for name, module in unet.named_modules():
        if isinstance(module, TemporalResnetBlock):
            patches.forward(module, partial(frames.resnet, module, name))
        elif isinstance(module, TemporalConvLayer):
            patches.forward(module, partial(frames.convolutions, module, name))
        elif isinstance(module, TemporalBasicTransformerBlock):
            patches.forward(module, partial(frames.transformer, name, module.forward))
        elif isinstance(module, TransformerSpatioTemporalModel):
            patches.before(module.time_proj, frames.count_from_own)
        elif isinstance(module, AnimateDiffTransformer3D | TransformerTemporalModel):
            patches.forward(module.norm, partial(frames.norm, module.norm, name))
            for block in module.transformer_blocks:
                patches.forward(block, partial(frames.block, name, block.forward))
    if hasattr(unet, "image_latents_temporal_encoder"):  # I2VGen-XL
        encoder = unet.image_latents_temporal_encoder
        patches.forward(encoder, partial(frames.block, "image_latents_temporal_encoder", encoder.forward))
        patches.before(unet.image_latents_context_embedding, frames.first_of_all)
    patches.forward(unet, frames.forward)


class Frames:
    """A rank's share of the frames, and the layers that need other ranks' frames.

    Args:
        compute: the UNet's own forward pass.
        axis: the dimension of the frames in the latents.
    """

    def __init__(self, group: Group, compute: Any, axis: int) -> None:
        self.group, self.compute, self.axis = group, compute, axis
        self.shares: list[slice] = []
        self.counts: list[int] = []
        self.weights = torch.empty(0)
        self.first: Tensor | None = None
        self.shared_out: tuple[int, torch.device, torch.dtype] | None = None

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the UNet on this rank's frames and gather the whole prediction; signature as of the UNet.

        Raises:
            ValueError: fewer frames than ranks.
        """
        sample = args[0] if args else kwargs["sample"]
        batch, frames = len(sample), sample.shape[self.axis]
        if frames < self.group.size:
            raise ValueError(f"frames {self.group.size}: must be at most num_frames, {frames}")
        wanted = frames, sample.device, torch.promote_types(sample.dtype, torch.float32)
        if self.shared_out != wanted:
            self.share_out(*wanted)
        mine = self.shares[self.group.rank]

        def own(value: Tensor) -> Tensor:
            if value.ndim == 5:
                if value is not sample:  # the latents of I2VGen-XL's image
                    self.first = value.select(self.axis, 0)
                return value.narrow(self.axis, mine.start, mine.stop - mine.start)
            if value.ndim > 2 and len(value) == batch * frames:  # AnimateDiff repeats the text for every frame
                return value.unflatten(0, (batch, frames))[:, mine].flatten(0, 1)
            return value

        own_args, own_kwargs = replaced((args, kwargs), own)
        made = self.compute(*own_args, **own_kwargs)
        self.first = None
        return replaced(made, self._whole)

    def share_out(self, frames: int, device: torch.device, wide: torch.dtype) -> None:
        """Compute the shares and the norm's weights once for all steps, to spare a GPU the wait for the host."""
        self.shared_out = frames, device, wide
        self.shares = self.group.shares(frames)
        self.counts = [share.stop - share.start for share in self.shares]
        self.weights = torch.tensor(self.counts, dtype=wide, device=device).view(-1, 1, 1, 1) / frames

    def _whole(self, prediction: Tensor) -> Tensor:
        """The whole prediction from the ranks' shares, which differ in length."""
        missing = max(self.counts) - prediction.shape[self.axis]
        padded = F.pad(prediction, (0, 0) * (4 - self.axis) + (0, missing))
        gathered = self.group.all_gather(padded, "", "prediction")
        parts = [part.narrow(self.axis, 0, count) for part, count in zip(gathered, self.counts, strict=True)]
        return torch.cat(parts, dim=self.axis)

    def count_from_own(self, module: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any]) -> Any:
        """Shift the frame indices of the positional embedding to this rank's frames (a forward pre-hook)."""
        return (args[0] + self.shares[self.group.rank].start,), kwargs

    def first_of_all(self, module: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any]) -> Any:
        """Give I2VGen-XL's image, the first of all frames, in place of this rank's first (a forward pre-hook)."""
        return (self.first,), kwargs

    def transformer(
        self,
        name: str,
        compute: Any,
        hidden_states: Tensor,
        num_frames: int,
        encoder_hidden_states: Tensor | None = None,
    ) -> Tensor:
        """Run one of SVD's temporal transformer blocks: (B·f, S, C) -> the same.

        The block itself sees (F, B·s, C): positions are independent, so those of a batch may pass for one video's.
        """
        by_frame = hidden_states.unflatten(0, (-1, num_frames)).transpose(0, 1)

        def over_time(whole: Tensor, mine: slice) -> Tensor:
            context = encoder_hidden_states
            if context is not None:
                context = context.unflatten(0, by_frame.shape[1:3])[:, mine].flatten(0, 1)
            return compute(whole, num_frames=len(whole), encoder_hidden_states=context)

        return self.over_positions(name, by_frame, over_time).transpose(0, 1).flatten(0, 1)

    def block(self, name: str, compute: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Run a transformer block that attends over the frames of each position: (B·S, f, C) -> the same."""

        def over_time(whole: Tensor, _: slice) -> Tensor:
            return compute(whole.transpose(0, 1), **kwargs).transpose(0, 1)

        return self.over_positions(name, hidden_states.transpose(0, 1)[:, None], over_time)[:, 0].transpose(0, 1)

    def over_positions(self, name: str, by_frame: Tensor, compute: Callable[[Tensor, slice], Tensor]) -> Tensor:
        """Compute something at each position over all frames: (f, B, S, C) -> the same, own frames and all positions.

        `compute` maps (F, B·s, C) to the same, all frames and own positions; it also gets which of the S are its own.
        """
        num_frames, batch, positions, channels = by_frame.shape
        shares = self.group.shares(positions)
        mine = shares[self.group.rank]
        widths = [share.stop - share.start for share in shares]
        width = widths[self.group.rank]
        out = [num_frames * batch * one * channels for one in widths]
        back = [count * batch * width * channels for count in self.counts]

        pieces = by_frame.new_empty(sum(out))
        for piece, share in zip(pieces.split(out), shares, strict=True):
            piece.view(num_frames, batch, -1, channels).copy_(by_frame[:, :, share])
        whole = self.group.all_to_all(pieces, out, back, name).view(sum(self.counts), batch * width, channels)
        del pieces
        if width:
            whole = compute(whole, mine)
        arrived = self.group.all_to_all(whole.reshape(-1), back, out, name)
        del whole
        result = torch.empty_like(by_frame)
        for part, share in zip(arrived.split(out), shares, strict=True):
            result[:, :, share] = part.view(num_frames, batch, -1, channels)
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

    def convolutions(self, layer: Any, name: str, hidden_states: Tensor, num_frames: int) -> Tensor:
        """Run a temporal convolution layer: (B·f, C, H, W) -> the same."""
        own = hidden = hidden_states.unflatten(0, (-1, num_frames)).transpose(1, 2)
        for norm, *_, conv in (layer.conv1, layer.conv2, layer.conv3, layer.conv4):
            hidden, before, after = self.activate(norm, hidden, name)
            hidden = _convolve(conv, hidden, before, after)
        return (own + hidden).transpose(1, 2).flatten(0, 1)

    def activate(self, norm: nn.GroupNorm, hidden: Tensor, name: str) -> tuple[Tensor, Edge, Edge]:
        """Apply group norm over all frames, then SiLU, to the own frames (B, C, f, H, W).

        Returns:
            The result, and that of the neighbouring frames before and after, each (B, C, H, W) or None.
        """
        hidden = hidden.contiguous()  # once for both: SVD's frames come before its channels in memory
        own = _statistics(norm, hidden, self.weights.dtype)
        gathered, *edges = self.group.all_gather_with_edges(own, hidden[:, :, 0], hidden[:, :, -1], name)
        moments = self._moments(norm, hidden, gathered)

        def activated(values: Tensor) -> Tensor:
            return F.silu(_normalise(norm, values, *moments), inplace=True)

        before, after = (edge if edge is None else activated(edge) for edge in edges)
        return activated(hidden), before, after

    def norm(self, norm: nn.GroupNorm, name: str, hidden: Tensor) -> Tensor:
        """Apply group norm over all frames to the own frames (B, C, f, H, W)."""
        gathered = self.group.all_gather(_statistics(norm, hidden, self.weights.dtype), name, "statistics")
        return _normalise(norm, hidden, *self._moments(norm, hidden, gathered))

    def _moments(self, norm: nn.GroupNorm, hidden: Tensor, gathered: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of all frames, each (B, groups, 1), from the statistics of all ranks."""
        means, m2 = gathered.unbind(1)
        mean = (self.weights * means).sum(0)
        count = hidden[0].numel() // norm.num_groups // self.counts[self.group.rank] * sum(self.counts)
        return mean, m2.sum(0) / count + (self.weights * (means - mean).square()).sum(0)


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
    """(B, C, …) -> the same: group norm with given statistics (B, groups, 1).

    Computed as a batch norm of B·C channels, whose kernels subtract the mean first and round once, at the end. In half
    precision x·scale + shift has 13 times the error where the mean is ten standard deviations.
    """
    videos, channels = hidden.shape[:2]
    mean, variance = (one.repeat_interleave(channels // norm.num_groups, 1).flatten() for one in (mean, variance))
    scale, shift = (one.to(mean.dtype).repeat(videos) for one in (norm.weight, norm.bias))
    flat = hidden.reshape(1, videos * channels, -1)
    return F.batch_norm(flat, mean, variance, scale, shift, eps=norm.eps).view(hidden.shape)


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
