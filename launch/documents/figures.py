"""The figures that the user's documents publish, by section; times in seconds, memory in GB (1e9 bytes) unless named.

Only values. Those that predictions are checked against (sections 3 and 10 to 13) are read from where the predictor
keeps them, vdpp_core/predict/reference/a5000x7.json. README and guide are the documents' own README and their guide to
the benchmark; numbers are sections of their results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from vdpp_core.predict import published

KNOWN = published.figures()
RANKS = (1, 2, 4, 7)
STEPS = published.STEPS
CARD = "RTX A5000"
CARD_GIB = 23.68  # what PyTorch found on a card (section 12)

# Section 2: the simulator, 28 steps of one sample, gloo on a CPU
SIMULATOR_TOTAL_S = {1: 3.99, 2: 4.22, 4: 4.15, 7: 4.43}
SIMULATOR_COLD_S = 0.16234  # on cuda:0, CUDA's start included
SIMULATOR_STEP_S = (0.0003, 0.0005)

# Section 3: the same network on GPUs, NCCL, latents of 8 × 32 × 32
DUMMY_LATENTS = (1, 4, 8, 32, 32)
DUMMY_TOTAL_S = {row["gpus"]: row["total_s"] for row in KNOWN["single_sample_dummy_nccl"]}


class FewFrames(NamedTuple):
    """A row of section 5: one sample, latents of `frames` × 32 × 32."""

    frames: int
    gpus: int
    steps: int
    total_s: float


# Section 5: SVD
FEW_FRAMES = (
    FewFrames(2, 1, 25, 4.8),
    FewFrames(4, 2, 24, 5.0),
    FewFrames(8, 4, 24, 6.5),
    FewFrames(14, 7, 21, 8.4),
)
SMALL_HW = (32, 32)
STEPS_UNTIL_FULL = {14: 4, 4: 17}  # frames -> steps on one card until its memory was full
SMALL_STEP_S, SMALL_COLD_S = (0.15, 0.17), (0.7, 0.9)
MODEL_GB = 10  # conclusion before section 11: what each GPU holds

# Sections 8 and 9: what was expected of ten samples
EXPECTED_STEP_S = 0.15
EXPECTED_LATENCY_S = 8.0
EXPECTED_TEN_S = {1: 42, 2: 25, 4: 15, 7: 10}
EXPECTED_GAIN = {1: 1.0, 2: 1.7, 4: 2.8, 7: 4.2}
EXPECTED_TEN_ON_SEVEN_S = 14  # the table of section 8
EXPECTED_SAMPLES_PER_S = 0.71
EXPECTED_TIMES_FASTER = 3
SLOWER = {2: 0.16, 4: 0.45, 7: 0.84}  # than one GPU

# Section 10: one video of 1024 × 576 with 14 frames
VIDEO = KNOWN["single_video_1024x576_14f_25steps"]
VIDEO_STEPS = 25
VIDEO_LATENTS = (1, 4, 14, 72, 128)
MP4_KB = {"official pipeline": 216, "official encoders and decoder": 245, "before the correction": 531, "after it": 341}
DECODING_AT_ONCE_GIB = 7.88

# Section 11: throughput
THROUGHPUT = {row["world_size"]: row for row in KNOWN["throughput_cfg3_14x72x128"]["rows"]}
TEN_SAMPLES_S = {1: 548.4, 2: 275.0, 4: 136.1, 7: 75.6}
SCALING = {1: 1.0, 2: 2.0, 4: 4.04, 7: 7.27}

# Section 12: memory
MEMORY = published.memory_rows()
FSDP_SAVES = 0.37
FSDP_SLOWER = 1.83
PARAMETERS_GB = 5.0

# Section 13: step pipeline and data parallel, 14 samples
COMPARISON: dict[str, Any] = KNOWN["pipeline_vs_data_parallel"]
DUMMY = {row["world_size"]: row for row in COMPARISON["dummy_fp32"]}
SVD = {row["world_size"]: row for row in COMPARISON["svd_fp16"]}
LATENCY_GAIN = 7.3
SCALING_OF_FOUR = {"pipeline": 4.16, "data": 3.50}  # against one GPU

# Their README and their guide to the benchmark
README_ONE_GPU_S, README_FIRST_S, README_STEADY_S = (40, 60), 35, (8, 12)
GUIDE_GAIN = {2: 2, 4: 4, 7: 7}
