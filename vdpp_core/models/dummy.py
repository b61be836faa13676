"""A tiny network with the signature of SVD's UNet, to check the logic of a run in milliseconds."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn


class DummyUNet(nn.Module):
    """Two small 3-D convolutions conditioned on the timestep. The output is meaningless but depends on the step."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            in_channels=8, out_channels=4, num_frames=8, cross_attention_dim=32, addition_time_embed_dim=32
        )
        self.add_embedding = SimpleNamespace(linear_1=SimpleNamespace(in_features=3 * 32))  # which the pipeline reads
        self.conv_in = nn.Conv3d(8, 16, 3, padding=1)
        self.time_embedding = nn.Linear(1, 16)
        self.conv_out = nn.Conv3d(16, 4, 3, padding=1)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.conv_in.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the parameters."""
        return self.conv_in.weight.dtype

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        added_time_ids: Tensor,
        return_dict: bool = False,
    ) -> tuple[Tensor]:
        """Map (B, F, 8, H, W) to ((B, F, 4, H, W),), as `UNetSpatioTemporalConditionModel` does."""
        time = self.time_embedding(timestep.reshape(1, 1).to(sample))
        hidden = self.conv_in(sample.transpose(1, 2)) + time[..., None, None, None]
        return (self.conv_out(nn.functional.silu(hidden)).transpose(1, 2),)
