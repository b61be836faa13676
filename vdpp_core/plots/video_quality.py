"""Figures of videos and their quality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vdpp_core.models.images import Frames
from vdpp_core.plots.style import COLOURS, INK, new_figure

STYLES = ({"color": COLOURS["dp"], "marker": "o"}, {"color": COLOURS["pp"], "marker": "s", "linestyle": "--"})
LABELS = {
    "psnr_first_db": "PSNR of frame 0 (dB)",
    "ssim_first": "SSIM of frame 0 (1 is best)",
    "background_error": "background error (0 to 255)",
    "jerkiness": "jerkiness (0 to 255)",
    "present_share": "frames with the shape (share)",
    "present_last": "shape in the last frame (share)",
    "speed": "speed of the shape (widths/frame)",
}


def strips(rows: Sequence[tuple[str, Frames]], title: str, small_print: str, shown: int = 7) -> Figure:
    """A row of `shown` evenly spaced frames for each video, the first and the last included."""
    figure, axes = new_figure((len(rows), shown), (9, 0.9 + 1.2 * len(rows)), title, small_print)
    for (caption, frames), panels in zip(rows, axes, strict=True):
        for panel, index in zip(panels, _spaced(frames, shown), strict=True):
            panel.imshow(frames[index])
            panel.set(xticks=[], yticks=[])
            panel.set_title(f"frame {index}", fontsize=6.5, pad=2)
        panels[0].set_ylabel(caption, fontsize=7.5)
    return figure


def contact_sheet(
    images: Sequence[tuple[str, Mapping[str, Frames]]], title: str, small_print: str, shown: int = 6
) -> Figure:
    """A panel for each image: a row of `shown` evenly spaced frames for each model, the first and the last included.

    Args:
        images: (caption, model -> its video of this image); an even number of them.
    """
    height = 0.9 + len(images) // 2 * (0.5 + 0.8 * len(images[0][1]))
    figure, axes = new_figure((len(images) // 2, 2), (11, height), title, small_print)
    for (caption, videos), panel in zip(images, axes.flat, strict=True):
        rows = [np.concatenate(frames[_spaced(frames, shown)], axis=1) for frames in videos.values()]
        (size, width), gap = rows[0].shape[:2], 4
        for place, row in enumerate(rows):
            panel.imshow(row, extent=(0, width, (place + 1) * size + place * gap, place * (size + gap)))
        panel.set(xlim=(0, width), ylim=(len(rows) * (size + gap) - gap, 0), title=caption)
        panel.set_yticks([place * (size + gap) + size / 2 for place in range(len(rows))], videos.keys())
        indices = _spaced(next(iter(videos.values())), shown)
        panel.set_xticks([(place + 0.5) * width / shown for place in range(shown)], [f"frame {i}" for i in indices])
        panel.grid(visible=False)
        panel.tick_params(labelsize=7.5)
        panel.spines[:].set_visible(False)
    return figure


def schedules(each: Sequence[tuple[str, pd.DataFrame]], title: str, small_print: str) -> Figure:
    """Noise level sigma and the timestep that conditions the UNet, step by step (Karras et al. 2022).

    Args:
        each: (name, table with columns sigma and timestep, a row per step); at most two.
    """
    figure, axes = new_figure((1, 2), (9, 3.6), title, small_print)
    labels = "noise level sigma", "timestep (symlog)"
    for column, panel, label in zip(("sigma", "timestep"), axes[0], labels, strict=True):
        for (name, table), style in zip(each, STYLES, strict=False):
            panel.plot(table.index, table[column], markersize=4, label=name, **style)
        panel.set_yscale("log" if column == "sigma" else "symlog")
        panel.set_xlabel("step (0 is the noisiest)")
        panel.set_ylabel(label)
        panel.legend(fontsize=7.5)
    return figure


def compared(
    tables: Sequence[tuple[str, pd.DataFrame]], columns: Sequence[str], title: str, small_print: str
) -> Figure:
    """A panel per number: a dot per video, a line at the mean, for two sets of videos of the same images.

    Args:
        tables: (name, table with a row per video) of each set.
        columns: keys of LABELS.
    """
    figure, axes = new_figure((1, len(columns)), (2.3 * len(columns), 3.4), title, small_print)
    for column, panel in zip(columns, axes[0], strict=True):
        for place, ((_, table), style) in enumerate(zip(tables, STYLES, strict=False)):
            values = table[column].to_numpy(dtype=float)
            spread = np.linspace(-0.15, 0.15, len(values))
            panel.plot(place + spread, values, markersize=4, alpha=0.7, **(style | {"linestyle": ""}))
            panel.hlines(np.nanmean(values), place - 0.3, place + 0.3, color="black", linewidth=2)
        panel.set_xticks(range(len(tables)), [name for name, _ in tables], fontsize=7.5)
        panel.set_xlim(-0.6, len(tables) - 0.4)
        panel.set_title(LABELS[column], fontsize=8, fontweight="normal")
        panel.grid(axis="x", visible=False)
    return figure


def speeds(table: pd.DataFrame, fastest: float, title: str, small_print: str) -> Figure:
    """Speed of the shape against the motion bucket: a dot per video, their medians, the training clips dashed.

    Args:
        table: columns bucket and speed (image widths per frame).
        fastest: speed of the training clips at bucket 255.
    """
    figure, axes = new_figure((1, 1), (7, 3.8), title, small_print)
    panel = axes[0, 0]
    medians = table.groupby("bucket")["speed"].median()
    panel.plot(table["bucket"], table["speed"], linestyle="", marker="o", color="#777777", alpha=0.5, label="one video")
    panel.plot(medians.index, medians, label="median", **STYLES[0])
    panel.plot([0, 255], [0, fastest], color=INK, linestyle="--", label="training clips")
    panel.set_xlabel("motion_bucket_id (0 to 255)")
    panel.set_ylabel(LABELS["speed"])
    panel.legend(fontsize=7.5)
    return figure


def steps_against_quality(table: pd.DataFrame, columns: Sequence[str], title: str, small_print: str) -> Figure:
    """Quality and time against the number of denoising steps: medians and the middle half.

    Args:
        table: columns steps, seconds (per video) and each of `columns`, a row per video.
        columns: keys of LABELS.
    """
    figure, axes = new_figure((1, len(columns) + 1), (2.6 * (len(columns) + 1), 3.4), title, small_print)
    grouped = table.groupby("steps")
    for column, panel in zip([*columns, "seconds"], axes[0], strict=True):
        low, middle, high = (grouped[column].quantile(share) for share in (0.25, 0.5, 0.75))
        panel.fill_between(middle.index, low, high, color=COLOURS["dp"], alpha=0.2, label="middle half")
        panel.plot(middle.index, middle, label="median", **STYLES[0])
        _label_steps(panel, LABELS.get(column, "time per video (s)"))
    axes[0, 0].legend(fontsize=7.5)
    return figure


def training(vae: pd.DataFrame, unet: pd.DataFrame, title: str, small_print: str) -> Figure:
    """The course of a training by its two logs: columns iteration, loss and figure (PSNR in dB for the VAE)."""
    figure, axes = new_figure((1, 2), (9, 3.4), title, small_print)
    axes[0, 0].plot(vae["iteration"], vae["figure"], **(STYLES[0] | {"marker": ""}))
    axes[0, 0].set(xlabel="VAE iteration", ylabel="PSNR of the training batches (dB)")
    axes[0, 1].plot(unet["iteration"], unet["loss"], **(STYLES[0] | {"marker": ""}))
    axes[0, 1].set(xlabel="UNet iteration", ylabel="loss (weighted squared error)", ylim=(0, None))
    return figure


def _spaced(frames: Frames, shown: int) -> list[int]:
    return np.linspace(0, len(frames) - 1, shown).round().astype(int).tolist()


def _label_steps(panel: Axes, label: str) -> None:
    panel.set_xlabel("denoising steps")
    panel.set_title(label, fontsize=8, fontweight="normal")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
