"""What the lessons train: a small transformer with the article's arithmetic, and the UNet of the small SVD model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from diffusers import StableVideoDiffusionPipeline, UNetSpatioTemporalConditionModel
from torch import Tensor, nn
from torch.nn import functional

from vdpp_core.config.fields import MODELS
from vdpp_core.lessons import sizing
from vdpp_core.tiny_svd import train
from vdpp_core.tiny_svd.clips import scenes


@dataclass(frozen=True)
class Batch:
    """Samples to train on, first dimension everywhere.

    Attributes:
        inputs: what the model is called with.
        target: what its prediction is compared with.
    """

    inputs: dict[str, Tensor]
    target: Tensor

    def __len__(self) -> int:
        return len(self.target)

    def parts(self, number: int) -> list[Batch]:
        """The batch in so many parts, of which the first are a sample larger where they cannot be equal."""
        targets, count = self.target.tensor_split(number), range(number)
        inputs = {name: value.tensor_split(number) for name, value in self.inputs.items()}
        return [Batch({name: value[part] for name, value in inputs.items()}, targets[part]) for part in count]

    def to(self, dtype: torch.dtype) -> Batch:
        """The batch with numbers that are not whole in fp64 where that is `dtype`, in fp32 elsewhere."""
        dtype = torch.promote_types(dtype, torch.float32)

        def cast(value: Tensor) -> Tensor:
            return value.to(dtype) if value.is_floating_point() else value

        return Batch({name: cast(value) for name, value in self.inputs.items()}, cast(self.target))


class Problem(Protocol):
    """A model and its training loss. Model and batches are the same on every rank, from their seeds."""

    def model(self) -> nn.Module:
        """A new model in fp32, in training mode, with the same weights each time."""

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The model's largest repeated parts: units of FSDP and of activation checkpointing."""

    def batch(self, size: int, step: int) -> Batch:
        """The batch of one training step."""

    def predict(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """The model's prediction."""

    def kept(self, samples: int, precision: str, checkpointing: bool) -> float:
        """Bytes of activations kept for the backward pass, by formula; NaN where there is none."""

    def losses(self, prediction: Tensor, target: Tensor) -> Tensor:
        """The loss of each sample, (N,), at least in fp32. The loss of a step is their mean."""


class Block(nn.Module):
    """A layer of the transformer: 12·h² parameters in its projections, no dropout."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_size = hidden // heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states (N, sequence, h) after the layer."""
        normed = self.norm1(hidden)
        query, key, value = (
            layer(normed).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for layer in (self.to_q, self.to_k, self.to_v)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.to_out(attended.transpose(1, 2).flatten(2))
        return hidden + self.fc2(functional.gelu(self.fc1(self.norm2(hidden))))


class Transformer(nn.Module):
    """A GPT: embeddings, blocks, and a head over the vocabulary."""

    def __init__(self, sizes: TransformerProblem) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.position = nn.Parameter(0.02 * torch.randn(sizes.sequence, sizes.hidden))
        self.blocks = nn.ModuleList(Block(sizes.hidden, sizes.heads) for _ in range(sizes.layers))
        self.norm, self.head = nn.LayerNorm(sizes.hidden), nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (N, sequence, vocabulary) of tokens (N, sequence)."""
        hidden = self.embed(tokens) + self.position
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


@dataclass(frozen=True)
class TransformerProblem:
    """Next-token prediction on random tokens; the projections of a layer have 12·h² parameters."""

    hidden: int = 256
    layers: int = 8
    heads: int = 8
    sequence: int = 128
    vocabulary: int = 512

    def model(self) -> nn.Module:
        """A new transformer, the same each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Transformer(self)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Its layers."""
        return list(cast(nn.ModuleList, model.blocks))

    def batch(self, size: int, step: int) -> Batch:
        """Random tokens, and the token after each."""
        generator = torch.Generator().manual_seed(1 + step)
        tokens = torch.randint(self.vocabulary, (size, self.sequence + 1), generator=generator)
        return Batch({"tokens": tokens[:, :-1]}, tokens[:, 1:])

    def predict(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """Logits (N, sequence, vocabulary)."""
        return model(**inputs)

    def kept(self, samples: int, precision: str, checkpointing: bool) -> float:
        """The layers' activations, without dropout; embeddings and head are left out."""
        each = {"fp32": 4, "bf16": 2, "fp64": 8}[precision]
        sizes = samples, self.sequence, self.hidden, self.layers
        if checkpointing:
            return sizing.checkpointed(*sizes, each=each, dropout=False)
        return sizing.activations(*sizes, sizing.activation_factor(each=each, dropout=False))

    def losses(self, prediction: Tensor, target: Tensor) -> Tensor:
        """The mean cross-entropy of each sequence."""
        logits = prediction.to(torch.promote_types(prediction.dtype, torch.float32))
        return functional.cross_entropy(logits.transpose(1, 2), target, reduction="none").mean(1)


@dataclass(frozen=True)
class SVDProblem:
    """Denoising of drawn clips by the UNet in the package, with SVD's training loss.

    Cross-attention to the only token of SVD's image embedding has no use for its queries and keys: their gradients are
    zero, of which rounding leaves noise that Adam would turn into whole steps. They are frozen.

    Two frames cannot be trained in bf16 on CPUs: oneDNN's weight gradient of a temporal convolution over them is NaN.
    """

    frames: int = 4
    clips: int = 8

    def model(self) -> nn.Module:
        """The UNet in the package."""
        unet = UNetSpatioTemporalConditionModel.from_pretrained(
            MODELS["tiny"], subfolder="unet", use_safetensors=True
        ).train()
        for name, parameter in unet.named_parameters():
            if (
                any(part in name for part in (".attn2.to_q.", ".attn2.to_k.", ".norm2."))
                and "transformer_blocks" in name
            ):
                parameter.requires_grad_(False)
        return unet

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The blocks on the way down, in the middle and on the way up."""
        unet: Any = model
        return [*unet.down_blocks, unet.mid_block, *unet.up_blocks]

    @cached_property
    def _pool(self) -> tuple[train.Pool, Tensor]:
        pipeline = StableVideoDiffusionPipeline.from_pretrained(MODELS["tiny"], use_safetensors=True)
        pool = train.Pool.empty(self.clips, self.frames)
        for index in range(self.clips):
            pool.put(index, pipeline, scenes(1))
        return pool, torch.tensor(pipeline.vae.config.scaling_factor)

    def batch(self, size: int, step: int) -> Batch:
        """Clips of the pool in turn, each with a noise level of its own."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            pool, scaling_factor = self._pool
            torch.manual_seed(1 + step)
            chosen = torch.arange(size) % self.clips
            sigmas = (0.7 + 1.6 * torch.randn(size)).exp()
            return Batch(*train.noisy_batch(pool, chosen, sigmas, scaling_factor, torch.ones(size)))

    def predict(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """The v-prediction (N, frames, 4, H, W)."""
        return model(**inputs, return_dict=False)[0]

    def kept(self, samples: int, precision: str, checkpointing: bool) -> float:
        """Not known: a UNet's layers are of many sizes."""
        return math.nan

    def losses(self, prediction: Tensor, target: Tensor) -> Tensor:
        """The squared error of each clip's v-prediction."""
        return train.v_losses(prediction, target)


PROBLEMS: dict[str, Problem] = {
    "transformer": TransformerProblem(),
    "small": TransformerProblem(hidden=64, layers=4, heads=4, sequence=32, vocabulary=64),
    "svd": SVDProblem(),
}
