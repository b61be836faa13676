"""The published configuration of Stable Video Diffusion XT (Blattmann et al. 2023), and one of 0.3 of its width."""

from typing import Any

# huggingface.co/stabilityai/stable-video-diffusion-img2vid-xt: {unet,vae,scheduler}/*config.json
PUBLISHED_UNET: dict[str, Any] = {
    "sample_size": 96,
    "in_channels": 8,
    "out_channels": 4,
    "down_block_types": ("CrossAttnDownBlockSpatioTemporal",) * 3 + ("DownBlockSpatioTemporal",),
    "up_block_types": ("UpBlockSpatioTemporal",) + ("CrossAttnUpBlockSpatioTemporal",) * 3,
    "block_out_channels": (320, 640, 1280, 1280),
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 768,
    "layers_per_block": 2,
    "cross_attention_dim": 1024,
    "transformer_layers_per_block": 1,
    "num_attention_heads": (5, 10, 20, 20),
    "num_frames": 25,
}
MEDIUM_UNET = PUBLISHED_UNET | {  # 137 million parameters: large enough to matter, small enough for a laptop
    "block_out_channels": (96, 192, 384, 384),
    "num_attention_heads": (3, 6, 12, 12),
    "addition_time_embed_dim": 64,
    "projection_class_embeddings_input_dim": 192,
    "cross_attention_dim": 256,
}
PUBLISHED_VAE: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "force_upcast": True,
    "latent_channels": 4,
    "layers_per_block": 2,
    "sample_size": 768,
    "scaling_factor": 0.18215,
}
PUBLISHED = {"svd": PUBLISHED_UNET, "medium": MEDIUM_UNET}
PUBLISHED_SCHEDULER: dict[str, Any] = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "interpolation_type": "linear",
    "num_train_timesteps": 1000,
    "prediction_type": "v_prediction",
    "sigma_max": 700.0,
    "sigma_min": 0.002,
    "steps_offset": 1,
    "timestep_spacing": "leading",
    "timestep_type": "continuous",
    "use_karras_sigmas": True,
}
