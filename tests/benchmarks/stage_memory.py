"""Resident memory of each stage of a Wan with a large text encoder: python -m tests.benchmarks.stage_memory

Four stages of a small random Wan with a text encoder of 0.5 GB. Only the first stage loads the encoder. It frees it
before the clock starts, unless the rows of a manifest are encoded later.
"""

import tempfile
import time
from pathlib import Path

import pandas as pd
import psutil
import transformers

import launch
from tests.families import LETTERS, PROMPT, WIDTH, folder
from vdpp_core import Parallel, RunConfig
from vdpp_core.engine import preflight
from vdpp_core.runs import event_types as kinds

STAGES = 4


def with_a_large_encoder(root: Path) -> Path:
    """A random Wan with many layers in its text encoder."""
    place = folder("wan", root=root)
    config = transformers.UMT5Config(
        vocab_size=4 + len(LETTERS), d_model=WIDTH, d_kv=8, d_ff=40_000, num_layers=40, num_heads=3,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    transformers.UMT5EncoderModel(config).save_pretrained(place / "text_encoder")
    return place


def resident_gb(config: RunConfig) -> pd.Series:
    """The largest resident memory of each rank in GB, looked at 20 times a second."""
    job = launch.start(preflight.complete(config, STAGES))
    most: dict[int, float] = {}
    while job.outcome() is None:
        for start in kinds.of(job.run.events(), kinds.Start):
            if psutil.pid_exists(start.pid):
                most[start.rank] = max(most.get(start.rank, 0), psutil.Process(start.pid).memory_info().rss / 1e9)
        time.sleep(0.05)
    return pd.Series(most).sort_index()


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        place = with_a_large_encoder(Path(root))
        size = sum(path.stat().st_size for path in (place / "text_encoder").glob("*.safetensors")) / 1e9
        table = Path(root) / "jobs.csv"
        table.write_text("prompt\na red ball\ntwo boats\na cat\n")
        base = {"command": "generate", "model_id": str(place), "total_steps": 8, "threads": 1, "device": "cpu"}
        sizes = {"num_frames": 9, "height": 32, "width": 48, "parallel": Parallel(pp=STAGES)}
        found = pd.DataFrame(
            {
                "one prompt": resident_gb(RunConfig(**base, **sizes, **PROMPT, num_samples=3)),
                "a manifest": resident_gb(RunConfig(**base, **sizes, manifest=table)),
            }
        )
    print(f"text encoder: {size:.2f} GB; largest resident memory of each rank in GB")
    print(found.rename_axis("rank").round(3).to_string())


if __name__ == "__main__":
    main()
