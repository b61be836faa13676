"""One forward pass of SVD's UNet split by frames, exactly (sums are reordered, nothing else).

Spatial layers see one frame at a time and run unchanged on a rank's own frames. Two kinds of layers look across:

TemporalResnetBlock: two convolutions over three neighbouring frames, each after a group norm over all frames. A rank
sends its first and its last frame to its neighbours while it convolves its own; the norm's statistics are gathered.
TemporalBasicTransformerBlock: attention over all frames, for each position alone. All-to-all turns 'my frames, all
positions' into 'all frames, my positions', and back.

With N ranks, F frames and a hidden state of X bytes, the convolutions' halo moves 4(N-1)·X/F in a block, the all-to-all
2(N-1)·X/N: around the convolutions it would move more as long as 2N < F, as much at 7 ranks and 14 frames.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vdpp_core.parallel.group import Group
from vdpp_core.parallel.output import as_asked
from vdpp_core.unets.patches import Patches


def split(unet: nn.Module, group: Group, patches: Patches) -> None:
    """Have each rank of `group` compute its share of the frames: whole latents in, whole prediction out.

    Any number of frames that is at least the ranks'; uneven shares differ by one.
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
    """A rank's share of the frames, and the layers that look beyond it. `compute` is the UNet's own forward pass."""

    def __init__(self, group: Group, compute: Any) -> None:
        self.group, self.compute = group, compute
        self.shares: list[slice] = []
        self.counts: list[int] = []

    @torch.no_grad()
    def forward(
        self,
        sample: Tensor,
        timestep: Any,
        encoder_hidden_states: Tensor,
        added_time_ids: Tensor,
        return_dict: bool = True,
    ) -> Any:
        """Raises ValueError where there are fewer frames than ranks."""
        frames = sample.shape[1]
        if frames < self.group.size:
            raise ValueError(f"frames {self.group.size}: must be at most num_frames, {frames}")
        self.shares = self.group.shares(frames)
        self.counts = [share.stop - share.start for share in self.shares]
        wide = torch.promote_types(sample.dtype, torch.float32)
        self.weights = torch.tensor(self.counts, dtype=wide, device=sample.device).view(-1, 1, 1, 1) / frames
        own = sample[:, self.shares[self.group.rank]]
        prediction = self.compute(own, timestep, encoder_hidden_states, added_time_ids, return_dict=False)[0]
        return as_asked(self._whole(prediction), return_dict)

    def _whole(self, prediction: Tensor) -> Tensor:
        """Shares (B, f, 4, H, W), of different lengths, -> (B, F, 4, H, W)."""
        padded = F.pad(prediction, (0, 0) * 3 + (0, max(self.counts) - prediction.shape[1]))
        gathered = self.group.all_gather(padded, "", "prediction")
        return torch.cat([part[:, :count] for part, count in zip(gathered, self.counts, strict=True)], dim=1)

    def count_from_own(self, module: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any]) -> Any:
        """The positional embedding counts the frames of the whole video."""
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
        """(B·f, S, C) -> the same: own frames, all positions. The block itself computes (F, B·s, C): positions are
        independent, so it may take those of the whole batch for those of one video."""
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
        """(B, C, f, H, W) and the time's embedding (B, f, D) -> (B, C', f, H, W)."""
        hidden = input_tensor.clone(memory_format=torch.contiguous_format)
        hidden = self.convolve(block.norm1, block.conv1, hidden, name)
        if block.time_emb_proj is not None:
            hidden += block.time_emb_proj(block.nonlinearity(temb)).transpose(1, 2)[..., None, None]
        hidden = self.convolve(block.norm2, block.conv2, hidden, name)
        if block.conv_shortcut is not None:
            input_tensor = block.conv_shortcut(input_tensor)
        return input_tensor + hidden

    def convolve(self, norm: nn.GroupNorm, conv: nn.Conv3d, hidden: Tensor, name: str) -> Tensor:
        """Group norm (in place), SiLU and a (3, 1, 1) convolution over all frames.

        The edges are sent as they are: they travel while the statistics are gathered and the own frames, between
        zeros, convolved. What the neighbours' edges add comes on top.
        """
        arriving = self.group.swap_edges(hidden[:, :, 0].clone(), hidden[:, :, -1].clone(), name)
        activate = self.normalisation(norm, hidden, name)
        result = conv(activate(hidden))
        before, after = arriving()
        if before is not None:
            result[:, :, 0] += _pointwise(conv.weight[:, :, 0], activate(before))
        if after is not None:
            result[:, :, -1] += _pointwise(conv.weight[:, :, 2], activate(after))
        return result

    def normalisation(self, norm: nn.GroupNorm, hidden: Tensor, name: str) -> Callable[[Tensor], Tensor]:
        """Group norm over all frames and SiLU, in place, as a function for own frames and for others' edges.

        Each rank gives the mean and the sum of squares about it, M2; combined as in Chan, Golub and LeVeque, 1979.
        Sums of what was centred beforehand: no large numbers cancel.
        """
        wide = torch.promote_types(hidden.dtype, torch.float32)
        values = hidden.view(hidden.shape[0], norm.num_groups, -1)
        count, centre = values.shape[-1], values.mean(-1, keepdim=True)
        centred = values - centre
        rest = centred.sum(-1, keepdim=True, dtype=wide) / count
        squares = torch.linalg.vector_norm(centred, dim=-1, keepdim=True, dtype=wide).square() - count * rest.square()
        del centred
        means, m2 = self.group.all_gather(torch.stack([centre + rest, squares]), name, "statistics").unbind(1)
        mean = (self.weights * means).sum(0)
        total = count // self.counts[self.group.rank] * sum(self.counts)
        variance = m2.sum(0) / total + (self.weights * (means - mean).square()).sum(0)
        scale = torch.rsqrt(variance + norm.eps) * norm.weight.view(norm.num_groups, -1)
        shift = norm.bias.view(norm.num_groups, -1) - mean * scale
        scale, shift = (one.view(len(hidden), -1, 1).to(hidden.dtype) for one in (scale, shift))

        def activate(frames: Tensor) -> Tensor:
            flat = frames.view(*scale.shape[:2], -1)
            flat.mul_(scale).add_(shift)
            return F.silu(frames, inplace=True)

        return activate


def _pointwise(weight: Tensor, frame: Tensor) -> Tensor:
    """A convolution of one point: weight (C', C, 1, 1), frame (B, C, H, W) -> (B, C', H, W)."""
    return torch.matmul(weight.flatten(1), frame.flatten(2)).unflatten(-1, frame.shape[2:])
