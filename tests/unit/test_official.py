"""What is said of a run whose samples were compared with the official pipeline's."""

import json

import pytest

from vdpp_core.compare.official import in_words, table

SPLIT = {
    "samples": 1,
    "equal_latents": 0,
    "equal_frames": 0,
    "max_latent_difference": 1.1e-5,
    "relative_latent_difference": 4.5e-6,
    "max_frame_difference": 1,
    "max_batch_difference": None,
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"equal_latents": 1}, "bit-equal to the official pipeline"),
        ({"equal_latents": 4, "samples": 4}, "bit-equal to the official pipeline, all 4 samples"),
        ({}, "within 1e-05 of the official pipeline (4.5e-06)"),
        ({"equal_latents": 1, "samples": 4}, "within 1e-05 of the official pipeline (4.5e-06); 1 of 4 bit-equal"),
        ({"relative_latent_difference": 3e-4}, "up to 3.0e-04 (relative) from the official pipeline"),
        ({"relative_latent_difference": float("nan")}, "not finite, here or in the official pipeline"),
        ({"relative_latent_difference": None}, "up to 1.1e-05 from the official pipeline"),
    ],
)
def test_latents(changes, said):
    assert in_words(SPLIT | changes)["latents"] == said


def test_frames():
    assert in_words(SPLIT)["frames"] == "up to 1 of 255 grey levels from the official pipeline's"
    assert in_words(SPLIT | {"equal_frames": 1})["frames"] == "equal to the official pipeline's"


def test_a_result_of_an_earlier_version():
    before = json.loads(json.dumps({name: value for name, value in SPLIT.items() if "relative" not in name}))
    assert table({"frames 2": {"official": before}}).loc["frames 2", "latents"].startswith("up to 1.1e-05 from")
