"""A widget for each parameter of a run, with a label and an explanation in words."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import ipywidgets as widgets
from pydantic.fields import FieldInfo

from vdpp_core.config import RunConfig
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.fields import PIXELS_PER_LATENT
from vdpp_core.config.layout import Parallel
from vdpp_core.config.run_config import LATENT_SIZES

GROUPS = {  # heading -> parameters: label and explanation
    "What to run": {
        "command": (
            "Task",
            "benchmark: denoise and measure. generate: also write videos. simulate: check the logic on a dummy model.",
        ),
        "model": (
            "Model",
            "tiny: a small SVD in the package. svd: the published one. medium: 137 million random parameters. experts: "
            "two small UNets that take turns. dummy: no network at all.",
        ),
        "random_weights": (
            "Random weights",
            "Time and memory are those of the model, the videos are noise. The model svd then needs no download.",
        ),
        "model_id": (
            "Weights folder",
            "The folder, or the hub name, of a Stable Video Diffusion to use in place of the model's own weights.",
        ),
        "image": (
            "Image",
            "The file of the image to animate. Empty: for generate the example in the package, otherwise noise.",
        ),
    },
    "Video": {
        "num_frames": ("Frames", "Number of frames of each video. Memory and time grow with it."),
        "height": ("Height (pixels)", "A multiple of 8."),
        "width": ("Width (pixels)", "A multiple of 8."),
    },
    "How much": {
        "total_steps": ("Steps", "Denoising steps of each video."),
        "num_samples": ("Samples", "Number of videos; each has its own seed, the one after that of the video before."),
        "seed": ("Seed", "Seed of the first video. The same seed gives the same video, whatever the layout."),
    },
    "Layout": {
        "dp": ("Replicas (dp)", "Data parallel: each replica makes whole videos of its own."),
        "pp": ("Stages (pp)", "Step pipeline: each stage has some steps of every video and hands it on."),
        "cfg": ("Guidance split (cfg)", "2: the two passes of classifier-free guidance run on different ranks."),
        "frames": ("Frame split (frames)", "Number of ranks that share the frames of each video."),
        "tp": ("Layer split (tp)", "Tensor parallel: number of ranks that share each layer. Needs a fast link."),
        "fsdp": ("Share parameters (fsdp)", "The ranks of a stage share its parameters: less memory, never faster."),
    },
}
FOLDED = {
    "More about the video": {
        "fps": ("Frames per second", "The model is told this number, and the video file plays at it."),
        "motion_bucket_id": ("Motion", "How much moves: 0 is least, 255 is most. The model was trained with 127."),
        "noise_aug_strength": ("Noise on the image", "How much noise is added to the image before it is animated."),
        "decode_chunk_size": ("Frames decoded at once", "More are faster and need more memory. For generate only."),
    },
    "Guidance": {
        "guidance_scale": ("Scale, last frame", "How closely the last frame follows the image. Up to 1: no guidance."),
        "min_guidance_scale": ("Scale, first frame", "How closely the first frame follows the image."),
        "guidance_mode": ("Passes", "batched: both at once. sequential: one after the other, in half the memory."),
    },
    "Uneven stages": {
        "stage_ranks": ("Ranks of each stage", "For example 1 2: the second stage has two ranks, which take turns."),
        "split": (
            "Steps split by",
            "even: equally. boundary: no stage has steps of two experts. weights: as the weights of the stages say.",
        ),
    },
    "Device, memory and measuring": {
        "device": ("Device", "auto: CUDA where there is one, otherwise the CPU."),
        "dtype": ("Number type", "auto: fp16 on CUDA, otherwise fp32."),
        "threads": ("Threads of a rank", "CPU threads. 0: the cores divided by the ranks."),
        "memory_limit_gib": ("Memory limit (GiB)", "Simulates a smaller device. 0: no limit."),
        "swap": ("Swap experts", "Hold one expert at a time and load the next from host memory (CUDA) or from disk."),
        "swap_batch": ("Samples per swap", "Samples that a rank takes through an expert before it loads the next."),
        "forward_chunking": ("Forward chunking", "Feed-forward layers frame by frame: less memory, a little slower."),
        "shortcuts": ("Shortcuts", "Faster convolutions and linear layers; the result differs by up to 1e-6."),
        "warmup_samples": ("Warm-up samples", "Samples that each replica makes before the clock starts."),
        "save_latents": ("Save latents", "Keep the latents of each sample, so that a stopped run can be resumed."),
    },
}
WORDS = {name: words for group in (GROUPS | FOLDED).values() for name, words in group.items()}
EXPLAINED = dict(WORDS.values())  # label -> explanation
SLIDERS = {"motion_bucket_id": (0, 255), "cfg": (1, 2)}  # which reach whatever is allowed; other numbers are typed
STEPS = {"height": 64, "width": 64, "guidance_scale": 0.1, "min_guidance_scale": 0.1, "noise_aug_strength": 0.01}
CHOICES = {"device": ("auto", "cpu", "cuda", "mps"), "model": tuple(LATENT_SIZES)}  # only Stable Video Diffusions
PLACEHOLDERS = {"image": "example or noise", "model_id": "the model's own weights", "stage_ranks": "one for each stage"}
MOST_IN_A_BROWSER = 2**53 - 1  # JavaScript rounds larger whole numbers
SIZES = ("num_frames", "height", "width")


class Controls:
    """Widgets for the parameters that people vary.

    Args:
        start: the run shown at first. Parameters without a widget keep their values from it.
        changed: called after each change.
    """

    def __init__(self, start: RunConfig, changed: Callable[[], None]) -> None:
        self.start, self.changed, self.loading = start, changed, False
        fields, values = Parallel.model_fields | RunConfig.model_fields, _values(start)
        self.of = {name: _control(name, fields[name], values[name]) for name in WORDS}
        groups = [self._group(_heading(heading), names) for heading, names in GROUPS.items()]
        for heading, names in FOLDED.items():
            groups.append(folded(heading, self._group(None, names)))
        self.box = widgets.Box(groups).add_class("lab-controls")
        self.of["model"].observe(self._usual_size, names="value")  # before `changed` is called
        for control in self.of.values():
            control.observe(self._moved, names="value")

    def _group(self, title: widgets.HTML | None, names: dict[str, Any]) -> widgets.VBox:
        return widgets.VBox([*([title] if title else []), *(self.of[name] for name in names)]).add_class("lab-group")

    def _moved(self, _: Any) -> None:
        if not self.loading:
            self.changed()

    def config(self) -> RunConfig:
        """The run that the widgets describe.

        Raises:
            ConfigError: a parameter's value is not allowed.
        """
        values = {name: control.value for name, control in self.of.items()}
        for name, value in values.items():
            if isinstance(value, int) and value > MOST_IN_A_BROWSER:
                raise ConfigError(name, value, f"must be at most {MOST_IN_A_BROWSER} in a browser")
        layout = {name: values.pop(name) for name in Parallel.model_fields}
        if ranks := layout["stage_ranks"].split():
            layout |= {"stage_ranks": tuple(ranks), "pp": len(ranks)}
        else:
            del layout["stage_ranks"]
        for name in ("threads", "memory_limit_gib"):
            values[name] = values[name] or None
        values["image"] = Path(values["image"]).expanduser() if values["image"].strip() else None
        values["model_id"] = values["model_id"].strip() or None
        if values["swap"] is None:
            values["swap_batch"] = 1
        config = self.start.replace(**values, parallel=Parallel(**layout), output_dir=None)
        _size(config)
        return config

    def load(self, config: RunConfig) -> None:
        """Show the parameters of another run.

        Raises:
            ConfigError: it is not of Stable Video Diffusion; nothing was changed.
        """
        values = _values(config)
        self.loading = True
        try:
            for name, value in values.items():
                if name in self.of:
                    _show(self.of[name], value)
        finally:
            self.loading = False
        self.start = config
        self.changed()

    def _usual_size(self, _: Any) -> None:
        if not self.loading:
            for name, value in _size(RunConfig(model=self.of["model"].value, random_weights=True)).items():
                self.of[name].value = value


def in_words(error: ConfigError) -> str:
    """An error with the labels of the controls in place of the parameters' names and flags."""
    label = {name: words for name, (words, _) in WORDS.items()}
    line = re.sub(rf"^{re.escape(error.argument)}\b", label.get(error.argument, error.argument), str(error))
    if "--model-id" in line:
        line += ", or tick random_weights"
    line = re.sub(r"--([a-z][a-z-]+)", lambda flag: flag[1].replace("-", "_"), line)
    return re.sub(r"\b[a-z]+(_[a-z]+)+\b", lambda name: f"“{label[name[0]]}”" if name[0] in label else name[0], line)


def folded(heading: str, content: widgets.Widget) -> widgets.VBox:
    """A button above something that is shown only after it was pressed."""
    tooltip, layout = f"Show or hide: {heading}.", widgets.Layout(width="auto")
    button = widgets.ToggleButton(description=f"▸ {heading}", tooltip=tooltip, layout=layout)
    content.layout.display = "none"

    def turned(_: Any) -> None:
        button.description = f"{'▾' if button.value else '▸'} {heading}"
        content.layout.display = None if button.value else "none"

    button.observe(turned, names="value")
    return widgets.VBox([button.add_class("lab-fold"), content]).add_class("lab-group")


def _heading(words: str) -> widgets.HTML:
    return widgets.HTML(f'<b role="heading" aria-level="3">{words}</b>')


def _values(config: RunConfig) -> dict[str, Any]:
    """Parameter -> value, with the video's size in pixels.

    Raises:
        ConfigError: the run is not of Stable Video Diffusion.
    """
    return (config.parallel or Parallel()).model_dump() | dict(config) | _size(config)


def _size(config: RunConfig) -> dict[str, int]:
    if not config.is_svd:
        raise ConfigError(
            "model_id", config.source, "the panel describes Stable Video Diffusion only: use launch.start"
        )
    _, _, frames, rows, columns = config.shape
    return dict(zip(SIZES, (frames, rows * PIXELS_PER_LATENT, columns * PIXELS_PER_LATENT), strict=True))


def _control(name: str, field: FieldInfo, value: Any) -> widgets.Widget:
    looks: dict[str, Any] = {
        "description": WORDS[name][0],
        "style": {"description_width": "10.5em"},
        "layout": widgets.Layout(width="auto"),
    }
    kinds = get_args(field.annotation) or (field.annotation,)
    choices = CHOICES.get(name) or [one for kind in (field.annotation, *kinds) for one in get_args(kind)]
    if choices := [one for one in choices if isinstance(one, str)]:
        if type(None) in kinds:
            choices = [("default" if name == "split" else "none", None), *((one, one) for one in choices)]
        control = widgets.Dropdown(options=choices, **looks)
    elif bool in kinds:
        control = widgets.Checkbox(indent=False, **looks)
    elif name in SLIDERS:
        least, most = SLIDERS[name]
        control = widgets.IntSlider(min=least, max=most, continuous_update=False, **looks)
    elif name in PLACEHOLDERS:
        control = widgets.Text(placeholder=PLACEHOLDERS[name], continuous_update=False, **looks)
    else:  # without bounds, which a widget would apply in silence
        kind = widgets.FloatText if float in kinds else widgets.IntText
        control = kind(step=STEPS.get(name, 1), continuous_update=False, **looks)
    _show(control, value)
    return control


def _show(control: widgets.Widget, value: Any) -> None:
    """Set a control to a parameter's value. An empty text, and in a field for numbers 0, stand for None."""
    if isinstance(control, widgets.Dropdown):
        if value not in [one[1] if isinstance(one, tuple) else one for one in control.options]:
            control.options = (*control.options, value)
        control.value = value
    elif isinstance(control, widgets.Text):
        control.value = " ".join(map(str, value)) if isinstance(value, tuple) else str(value or "")
    else:
        control.value = value or 0
