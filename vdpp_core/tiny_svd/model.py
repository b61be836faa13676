"""The networks of the tiny Stable Video Diffusion: every kind of layer of the published one, few of each.

Group norm has 32 groups everywhere. With 32 channels every channel would lose its mean, and the image its colours.
"""

import math
import re
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLTemporalDecoder,
    EulerDiscreteScheduler,
    StableVideoDiffusionPipeline,
    UNetSpatioTemporalConditionModel,
)
from diffusers.models.attention_processor import Attention
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D, TemporalResnetBlock
from diffusers.models.transformers.transformer_temporal import TransformerSpatioTemporalModel
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

from vdpp_core.config.fields import LATENT_CHANNELS
from vdpp_core.models.architectures import PUBLISHED_SCHEDULER
from vdpp_core.models.experts import Experts
from vdpp_core.tiny_svd.clips import FRAMES, SIZE

GROUPS = 32  # of every group norm in these networks


def vae() -> AutoencoderKLTemporalDecoder:
    """The VAE: 1.6 M parameters; 64 × 64 pixels become 4 × 8 × 8 latents."""
    vae = AutoencoderKLTemporalDecoder(
        block_out_channels=(64, 64, 64, 64),
        down_block_types=("DownEncoderBlock2D",) * 4,
        latent_channels=LATENT_CHANNELS,
        layers_per_block=1,
        sample_size=SIZE,
    )
    start_from_thumbnails(vae)
    return vae


@torch.no_grad()
def start_from_thumbnails(vae: AutoencoderKLTemporalDecoder) -> None:
    """Initialise a VAE to shrink an image to its 8 × 8 means and enlarge it again; every block is an identity.

    From random weights it learns brightness first and no colour within 700 iterations: 18 dB, 27 dB from this start. A
    colour passes group norm and SiLU as a pair of channels with opposite signs, since silu(x) - silu(-x) = x; a
    constant in some of the pairs keeps its scale.
    """
    encoder, decoder = vae.encoder, vae.decoder
    for layer in vae.modules():
        if isinstance(layer, ResnetBlock2D | TemporalResnetBlock):
            nn.init.zeros_(layer.conv2.weight)
        elif isinstance(layer, Attention):
            nn.init.zeros_(layer.to_out[0].weight)
        elif isinstance(layer, Downsample2D):
            _same_channels(layer.conv, torch.tensor([[1.0, 1, 0], [1, 1, 0], [0, 0, 0]]) / 4)
        elif isinstance(layer, Upsample2D):
            _same_channels(layer.conv, torch.tensor([[1.0, 2, 1], [2, 4, 2], [1, 2, 1]]) / 16)
    _pairs(encoder.conv_in, encoder.conv_out)
    _pairs(decoder.conv_in, decoder.conv_out)
    nn.init.dirac_(vae.quant_conv.weight)
    vae.quant_conv.weight[LATENT_CHANNELS:] = 0
    vae.quant_conv.bias[LATENT_CHANNELS:] = 2 * math.log(0.1)  # the standard deviation of the posterior
    nn.init.dirac_(decoder.time_conv_out.weight)


def _same_channels(layer: nn.Conv2d, kernel: Tensor) -> None:
    layer.weight += torch.eye(len(layer.weight))[..., None, None] * kernel - 0.5 * layer.weight


def _pairs(spread: nn.Conv2d, gather: nn.Conv2d, signals: slice = slice(None), sign: float = 1.0) -> None:
    """Make `gather` return the signals that `spread` receives: each group of group norm holds s and -s of a mixture s
    of the signals, and a constant in its third channel or, if there is none, in some of the pairs."""
    channels = torch.arange(0, spread.out_channels, spread.out_channels // GROUPS)
    mixtures = nn.functional.normalize(torch.randn(GROUPS, spread.weight[:, signals].shape[1]), dim=1)
    spread.weight *= 0.1
    spread.weight[channels, signals, 1, 1] += mixtures
    spread.weight[channels + 1, signals, 1, 1] -= mixtures
    assert spread.bias is not None
    spread.bias.zero_()
    if spread.out_channels == 2 * GROUPS:
        spread.bias[channels[::2] + 1] = torch.randn(GROUPS // 2)
    else:
        spread.bias[channels + 2] = 1
    back = sign * torch.linalg.pinv(mixtures)[: gather.out_channels]
    gather.weight *= 0.1
    gather.weight[: len(back), channels, 1, 1] += back
    gather.weight[: len(back), channels + 1, 1, 1] -= back


@torch.no_grad()
def start_from_a_still(unet: UNetSpatioTemporalConditionModel) -> None:
    """Initialise a UNet to predict the image in every frame: v = -image_latents, up to a factor.

    Every block is an identity; the image passes through the outermost skip connection.
    """
    for layer in unet.modules():
        if isinstance(layer, ResnetBlock2D | TemporalResnetBlock):
            nn.init.zeros_(layer.conv2.weight)
        elif isinstance(layer, TransformerSpatioTemporalModel):
            nn.init.zeros_(layer.proj_out.weight)
    width = unet.conv_in.out_channels
    shortcut = unet.up_blocks[-1].resnets[-1].spatial_res_block.conv_shortcut
    shortcut.weight *= 0.1
    shortcut.weight[:, -width:, 0, 0] += torch.eye(width)
    _pairs(unet.conv_in, unet.conv_out, signals=slice(LATENT_CHANNELS, None), sign=-1.0)


def unet() -> UNetSpatioTemporalConditionModel:
    """The UNet: 4.3 M parameters, conditioned on fps - 1, motion bucket and noise augmentation, 32 values each."""
    unet = UNetSpatioTemporalConditionModel(
        sample_size=SIZE // 8,
        num_frames=FRAMES,
        block_out_channels=(96, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        cross_attention_dim=32,
        num_attention_heads=(3, 2),
        addition_time_embed_dim=32,
        projection_class_embeddings_input_dim=96,
    )
    start_from_a_still(unet)
    return unet


def image_encoder() -> CLIPVisionModelWithProjection:
    """The image encoder: 0.1 M random parameters, since the first frame's latents hold all the information."""
    return CLIPVisionModelWithProjection(
        CLIPVisionConfig(
            hidden_size=32,
            projection_dim=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=224,
            patch_size=32,
        )
    )


def assemble(
    vae: AutoencoderKLTemporalDecoder,
    image_encoder: CLIPVisionModelWithProjection,
    unet: UNetSpatioTemporalConditionModel | Experts,
) -> StableVideoDiffusionPipeline:
    """Assemble a pipeline with the published scheduler."""
    scheduler = EulerDiscreteScheduler(**PUBLISHED_SCHEDULER)
    return StableVideoDiffusionPipeline(vae, image_encoder.eval(), unet, scheduler, CLIPImageProcessor())


def save(pipeline: StableVideoDiffusionPipeline, folder: Path) -> None:
    """Save a pipeline in fp16, described so that every version of diffusers and transformers loads it (as fp32)."""
    pipeline.to(torch.float16).save_pretrained(folder)
    for name, written, wanted in (
        ("model_index.json", "CLIPImageProcessorPil", "CLIPImageProcessor"),
        ("feature_extractor/preprocessor_config.json", "CLIPImageProcessorPil", "CLIPImageProcessor"),
        ("image_encoder/config.json", '"dtype": "float16"', '"dtype": "float32"'),
    ):
        settings = folder / name
        settings.write_text(settings.read_text().replace(written, wanted))
    for settings in folder.rglob("*.json"):
        settings.write_text(re.sub(r'\n *"_name_or_path": .*', "", settings.read_text()))  # where it was loaded from
