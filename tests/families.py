"""Small random pipelines of other families than SVD, as the folders that diffusers saves and loads.

Widths and depths are made up; the classes, compression ratios and kinds of guidance are those of the real models.
Tokenizers spell prompts letter by letter, so that every letter matters.
"""

from __future__ import annotations

import functools
import inspect
import string
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.models.unets.unet_i2vgen_xl import I2VGenXLUNet
from PIL import Image

WEIGHTS_SEED = 0
WIDTH = 24  # of text encoders
LETTERS = [*string.ascii_lowercase, *",."]
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
SIZE = {"height": 32, "width": 48, "num_frames": 9, "guidance_scale": 6.0}
OTHER_SIZE = {"height": 48, "width": 32, "num_frames": 5, "guidance_scale": 4.0}
PROMPT = {"prompt": "a red ball rolls.", "negative_prompt": "blurry"}
OTHER_PROMPT = {"prompt": "two boats, one harbour.", "negative_prompt": "dark, noisy"}
NOISE_SOLVERS = (
    "DDIMScheduler", "EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler", "PNDMScheduler",
    "DPMSolverMultistepScheduler", "UniPCMultistepScheduler", "LCMScheduler",
)  # fmt: skip
FLOW_SOLVERS = ("FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler")
WAN_SOLVERS = ("UniPCMultistepScheduler", "DPMSolverMultistepScheduler", "FlowMatchEulerDiscreteScheduler")


@dataclass(frozen=True)
class Family:
    """A kind of pipeline, with what its calls need.

    Attributes:
        make: Build the pipeline from torch's global random state, with the first of `solvers`.
        call: Arguments of a small call, without num_inference_steps, generator and output_type.
        other_call: The same for a second call, of another size.
        solvers: Names of the diffusers schedulers that suit it.
    """

    make: Callable[..., Any]
    call: dict[str, Any]
    other_call: dict[str, Any]
    solvers: tuple[str, ...]


def folder(name: str, solver: str | None = None, root: Path | None = None, **sizes: Any) -> Path:
    """Make the pipeline of a family and save it; a folder that exists already is returned as it is.

    Args:
        name: A key of FAMILIES.
        solver: One of the family's solvers; None stands for the first.
        root: Where to save; None stands for a folder that lives as long as this process.
        sizes: Of the denoiser, as the family's `make` takes them; not in the folder's name.
    """
    family = FAMILIES[name]
    solver = solver or family.solvers[0]
    path = (root or Path(_root().name)) / f"{name}-{solver}"
    if path.exists():
        return path
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(WEIGHTS_SEED)
        pipeline = family.make(**sizes)
        for part in pipeline.components.values():
            if isinstance(part, torch.nn.Module):
                _fill_zeros(part)
    pipeline.scheduler = _solver(pipeline.scheduler, solver)
    pipeline.save_pretrained(path)
    return path


def official(folder: Path, call: dict[str, Any], steps: int, seed: int) -> torch.Tensor:
    """Load the folder and return the latents of the pipeline's own call, as output_type="latent" gives them."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # I2VGen-XL draws its image's latents without the generator
        generator = torch.Generator().manual_seed(seed)
        arguments = call | {"num_inference_steps": steps, "generator": generator}
        return pipeline(**arguments, output_type="latent").frames


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="families-")


def _solver(made: Any, name: str) -> Any:
    """The solver of that name with the noise schedule of another, as diffusers' users change it."""
    if type(made).__name__ == name:
        return made
    kind, config = getattr(diffusers, name), dict(made.config)
    if isinstance(made, diffusers.FlowMatchEulerDiscreteScheduler):
        config |= FLOW
    config["skip_prk_steps"] = True  # of PNDM, as Stable Diffusion's folders have it
    return kind(**{key: config[key] for key in inspect.signature(kind).parameters if key in config})


def _fill_zeros(model: torch.nn.Module) -> None:
    """Give random values to layers that start as zero and would contribute nothing."""
    for parameter in model.parameters():
        if parameter.ndim > 1 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)


def _text(seed: int) -> dict[str, torch.Tensor]:
    """Embeddings in place of prompts, since Wan's image-to-video pipeline reads prompts only with ftfy installed."""
    draw = torch.Generator().manual_seed(seed)
    names = ("prompt_embeds", "negative_prompt_embeds")
    return {name: torch.randn(1, 512, WIDTH, generator=draw) for name in names}


def _image(*colours: tuple[int, int, int]) -> Image.Image:
    """Diagonal stripes of these colours, 64×48."""
    image = Image.new("RGB", (64, 48))
    image.putdata([colours[(x + y) // 8 % len(colours)] for y in range(48) for x in range(64)])
    return image


def _clip_tokenizer() -> Any:
    tokens = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    vocab = {token: number for number, token in enumerate(tokens)}
    return transformers.CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)


def _clip() -> Any:
    tokenizer = _clip_tokenizer()
    config = transformers.CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2,
        num_attention_heads=4, projection_dim=WIDTH, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return transformers.CLIPTextModel(config)


def _clip_image_encoder(kind: Any) -> Any:
    config = transformers.CLIPVisionConfig(
        hidden_size=WIDTH, intermediate_size=2 * WIDTH, projection_dim=WIDTH, num_hidden_layers=2,
        num_attention_heads=4, image_size=32, patch_size=8,
    )  # fmt: skip
    return kind(config)


def _clip_image_processor() -> Any:
    return transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})


def _t5_tokenizer() -> Any:
    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    vocab = specials + [(letter, -3.0) for letter in LETTERS]
    return transformers.T5TokenizerFast(vocab=vocab, extra_ids=0, model_max_length=512)


def _t5(kind: str = "T5") -> Any:
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=4 + len(LETTERS), d_model=WIDTH, d_kv=8, d_ff=2 * WIDTH, num_layers=2, num_heads=3,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return getattr(transformers, f"{kind}EncoderModel")(config)


def _image_parts() -> dict[str, Any]:
    vae = diffusers.AutoencoderKL(
        block_out_channels=(4,) * 4, down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4, norm_num_groups=2,
    )  # fmt: skip
    solver = diffusers.DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, steps_offset=1
    )
    return {"vae": vae, "text_encoder": _clip(), "tokenizer": _clip_tokenizer(), "scheduler": solver}


def _animatediff(widths: tuple[int, int] = (8, 8), layers: int = 1) -> Any:
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=widths, layers_per_block=layers, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=WIDTH, attention_head_dim=2,
        norm_num_groups=2, sample_size=4,
    )  # fmt: skip
    adapter = diffusers.MotionAdapter(
        block_out_channels=widths, motion_layers_per_block=layers, motion_norm_num_groups=2,
        motion_num_attention_heads=2,
    )  # fmt: skip
    return diffusers.AnimateDiffPipeline(**_image_parts(), unet=unet, motion_adapter=adapter)


def _unet_3d(kind: Any) -> Any:
    return kind(
        block_out_channels=(4, 8), layers_per_block=1, down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"), cross_attention_dim=WIDTH, attention_head_dim=4,
        norm_num_groups=2, sample_size=4,
    )  # fmt: skip


def _text_to_video() -> Any:
    unet = _unet_3d(diffusers.UNet3DConditionModel)
    return diffusers.TextToVideoSDPipeline(**_image_parts(), unet=unet)


def _i2vgen_xl() -> Any:
    encoder = _clip_image_encoder(transformers.CLIPVisionModelWithProjection)
    processor, unet = _clip_image_processor(), _unet_3d(I2VGenXLUNet)
    return diffusers.I2VGenXLPipeline(**_image_parts(), image_encoder=encoder, feature_extractor=processor, unet=unet)


def _cogvideox() -> Any:
    transformer = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8,
        text_embed_dim=WIDTH, num_layers=2, sample_height=4, sample_width=6, sample_frames=9,
        use_rotary_positional_embeddings=True,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLCogVideoX(
        block_out_channels=(8,) * 4, down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4, latent_channels=4, layers_per_block=1, norm_num_groups=2,
    )  # fmt: skip
    solver = diffusers.CogVideoXDDIMScheduler(
        beta_schedule="scaled_linear", prediction_type="v_prediction", rescale_betas_zero_snr=True,
        snr_shift_scale=1.0, timestep_spacing="trailing",
    )  # fmt: skip
    return diffusers.CogVideoXPipeline(
        tokenizer=_t5_tokenizer(), text_encoder=_t5(), vae=vae, transformer=transformer, scheduler=solver
    )


def _ltx() -> Any:
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=4, attention_head_dim=8, cross_attention_dim=32,
        num_layers=2, caption_channels=WIDTH,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=(8,) * 4, decoder_block_out_channels=(8,) * 4,
        layers_per_block=(1,) * 5, decoder_layers_per_block=(1,) * 5,
    )  # fmt: skip
    solver = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, max_image_seq_len=4096,
        shift_terminal=0.1,
    )  # fmt: skip
    return diffusers.LTXPipeline(
        scheduler=solver, vae=vae, text_encoder=_t5(), tokenizer=_t5_tokenizer(), transformer=transformer
    )


def _wan_transformer(**changes: Any) -> Any:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "ffn_dim": 32, "freq_dim": 32}
    return diffusers.WanTransformer3DModel(text_dim=WIDTH, rope_max_seq_len=32, **(sizes | changes))


def _wan_parts() -> dict[str, Any]:
    vae = diffusers.AutoencoderKLWan(base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    solver = diffusers.UniPCMultistepScheduler(**FLOW)
    return {"tokenizer": _t5_tokenizer(), "text_encoder": _t5("UMT5"), "vae": vae, "scheduler": solver}


def _wan(**changes: Any) -> Any:
    return diffusers.WanPipeline(**_wan_parts(), transformer=_wan_transformer(**changes))


def _wan_two_experts() -> Any:
    experts = {"transformer": _wan_transformer(), "transformer_2": _wan_transformer()}
    return diffusers.WanPipeline(**_wan_parts(), **experts, boundary_ratio=0.875)


def _wan_image_to_video() -> Any:
    transformer = _wan_transformer(in_channels=36, image_dim=WIDTH, added_kv_proj_dim=24)
    return diffusers.WanImageToVideoPipeline(
        **_wan_parts(), transformer=transformer, image_encoder=_clip_image_encoder(transformers.CLIPVisionModel),
        image_processor=_clip_image_processor(),
    )  # fmt: skip


def _hunyuan_video() -> Any:
    tokens = ["<unk>", "<s>", "</s>", "<pad>", "▁", *LETTERS]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = transformers.LlamaTokenizerFast(vocab=vocab, merges=[], pad_token="<pad>", padding_side="right")
    config = transformers.LlamaConfig(
        vocab_size=len(tokens), hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=3,
        num_attention_heads=4, pad_token_id=3,
    )  # fmt: skip
    transformer = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=2, num_single_layers=2,
        num_refiner_layers=1, text_embed_dim=WIDTH, pooled_projection_dim=WIDTH, rope_axes_dim=(4, 4, 4),
    )  # fmt: skip
    vae = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(8,) * 4, layers_per_block=1, norm_num_groups=4
    )
    return diffusers.HunyuanVideoPipeline(
        text_encoder=transformers.LlamaModel(config), tokenizer=tokenizer, transformer=transformer, vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0), text_encoder_2=_clip(),
        tokenizer_2=_clip_tokenizer(),
    )  # fmt: skip


BARE = {"prompt_template": {"template": "{}", "crop_start": 0}, "max_sequence_length": 64}
NO_CLIP_SKIP = {"clip_skip": None}  # I2VGen-XL's default, 1, fails with transformers 5
IMAGE = {"image": _image((200, 30, 20), (20, 60, 200))}
OTHER_IMAGE = {"image": _image((10, 160, 60), (240, 220, 80), (90, 90, 90))}
LTX_SIZE = {"height": 64, "width": 96, "num_frames": 17, "guidance_scale": 3.0}
OTHER_LTX_SIZE = {"height": 96, "width": 64, "num_frames": 9, "guidance_scale": 5.0}

# fmt: off
FAMILIES: dict[str, Family] = {
    "animatediff": Family(
        _animatediff, PROMPT | SIZE, OTHER_PROMPT | OTHER_SIZE | {"eta": 0.5}, NOISE_SOLVERS),
    "text-to-video": Family(
        _text_to_video, PROMPT | SIZE, OTHER_PROMPT | OTHER_SIZE | {"eta": 0.5}, NOISE_SOLVERS),
    "i2vgen-xl": Family(
        _i2vgen_xl, PROMPT | IMAGE | SIZE | NO_CLIP_SKIP,
        OTHER_PROMPT | OTHER_IMAGE | OTHER_SIZE | NO_CLIP_SKIP | {"target_fps": 8}, NOISE_SOLVERS),
    "cogvideox": Family(
        _cogvideox, PROMPT | SIZE, OTHER_PROMPT | OTHER_SIZE | {"use_dynamic_cfg": True},
        ("CogVideoXDDIMScheduler", "CogVideoXDPMScheduler")),
    "ltx": Family(
        _ltx, PROMPT | LTX_SIZE, OTHER_PROMPT | OTHER_LTX_SIZE | {"frame_rate": 12}, FLOW_SOLVERS),
    "wan": Family(
        _wan, PROMPT | SIZE, OTHER_PROMPT | OTHER_SIZE, WAN_SOLVERS),
    "wan-2.2": Family(
        _wan_two_experts, PROMPT | SIZE | {"guidance_scale_2": 3.0}, OTHER_PROMPT | OTHER_SIZE, WAN_SOLVERS),
    "wan-image-to-video": Family(
        _wan_image_to_video, _text(1) | IMAGE | SIZE, _text(2) | OTHER_IMAGE | OTHER_SIZE, WAN_SOLVERS),
    "hunyuan-video": Family(
        _hunyuan_video, {"prompt": PROMPT["prompt"]} | SIZE | BARE,
        OTHER_PROMPT | OTHER_SIZE | BARE | {"true_cfg_scale": 3.0}, FLOW_SOLVERS),
}
