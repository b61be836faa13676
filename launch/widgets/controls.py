"""A widget for each parameter of a run, made from the choices, bounds and descriptions of RunConfig's fields."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import ipywidgets as widgets
from annotated_types import Ge, Le
from pydantic.fields import FieldInfo

from vdpp_core.config import RunConfig
from vdpp_core.config.axes import AXES
from vdpp_core.config.errors import ConfigError
from vdpp_core.config.fields import PIXELS_PER_LATENT
from vdpp_core.config.layout import Parallel
from vdpp_core.config.run_config import LATENT_SIZES

GROUPS = {
    "Model": ("command", "model", "random_weights", "image", "save_latents"),
    "Video": ("num_frames", "height", "width", "fps", "motion_bucket_id", "noise_aug_strength", "decode_chunk_size"),
    "Steps and samples": ("total_steps", "num_samples", "warmup_samples", "seed"),
    "Guidance": ("guidance_scale", "min_guidance_scale", "guidance_mode"),
    "Layout": (*Parallel.model_fields, "split"),
    "Device": ("device", "dtype", "threads", "memory_limit_gib", "swap", "swap_batch", "forward_chunking", "shortcuts"),
}
SLIDERS = {  # least, most and step; all other numbers are typed
    **{"num_frames": (1, 50, 1), "height": (64, 1280, 64), "width": (64, 2304, 64), "fps": (1, 60, 1)},
    **{"total_steps": (1, 100, 1), "num_samples": (1, 64, 1), "warmup_samples": (0, 8, 1)},
    **{"motion_bucket_id": (0, 255, 1), "decode_chunk_size": (1, 25, 1)},
    **{"guidance_scale": (0.0, 10.0, 0.1), "min_guidance_scale": (0.0, 10.0, 0.1)},
    **{axis.name: (1, min(8, axis.most), 1) for axis in AXES},
}
CHOICES = {"device": ("auto", "cpu", "cuda", "mps"), "model": tuple(LATENT_SIZES)}  # only Stable Video Diffusions
MOST_IN_A_BROWSER = 2**53 - 1  # JavaScript rounds larger whole numbers
BREAKABLE = "_\u200b"  # allows a line break after the underscore
SIZES = ("num_frames", "height", "width")


class Controls:
    """Widgets for the parameters that people vary.

    Args:
        start: the run shown at first. Parameters without a widget keep their values from it.
        changed: called after each change.
    """

    def __init__(self, start: RunConfig, changed: Callable[[], None]) -> None:
        self.start, self.changed = start, changed
        fields = Parallel.model_fields | RunConfig.model_fields
        values = (start.parallel or Parallel()).model_dump() | dict(start) | _size(start)
        groups = []
        self.of: dict[str, widgets.Widget] = {}
        for heading, names in GROUPS.items():
            self.of |= {name: _control(name, fields[name], values[name]) for name in names}
            title = widgets.HTML(f"<b>{heading}</b>")
            groups.append(widgets.VBox([title, *(self.of[name] for name in names)]).add_class("lab-group"))
        self.box = widgets.Box(groups).add_class("lab-controls")
        self.of["model"].observe(self._usual_size, names="value")  # before `changed` is called
        for control in self.of.values():
            control.observe(lambda _: self.changed(), names="value")

    def config(self) -> RunConfig:
        """The run that the widgets describe.

        Raises:
            ConfigError: a parameter's value is not allowed.
        """
        values = {name: control.value for name, control in self.of.items()}
        layout = {name: values.pop(name) for name in Parallel.model_fields}
        if ranks := layout["stage_ranks"].split():
            layout |= {"stage_ranks": tuple(ranks), "pp": len(ranks)}
        else:
            del layout["stage_ranks"]
        for name in ("threads", "memory_limit_gib"):
            values[name] = values[name] or None
        values["image"] = Path(values["image"]).expanduser() if values["image"].strip() else None
        if values["swap"] is None:
            values["swap_batch"] = 1
        return self.start.replace(**values, parallel=Parallel(**layout), output_dir=None)

    def _usual_size(self, _: Any) -> None:
        for name, value in _size(RunConfig(model=self.of["model"].value, random_weights=True)).items():
            self.of[name].value = value


def _size(config: RunConfig) -> dict[str, int]:
    if not config.is_svd:
        raise ConfigError(
            "model_id", config.source, "the panel describes Stable Video Diffusion only: use launch.start"
        )
    _, _, frames, rows, columns = config.shape
    return dict(zip(SIZES, (frames, rows * PIXELS_PER_LATENT, columns * PIXELS_PER_LATENT), strict=True))


def _control(name: str, field: FieldInfo, value: Any) -> widgets.Widget:
    looks: dict[str, Any] = {
        "description": name.replace("_", BREAKABLE),
        "tooltip": field.description or name,
        "style": {"description_width": "7.6em"},
        "layout": widgets.Layout(width="auto"),
    }
    kinds = get_args(field.annotation)
    choices = CHOICES.get(name) or [one for kind in (field.annotation, *kinds) for one in get_args(kind)]
    if choices := [one for one in choices if isinstance(one, str)]:
        if type(None) in kinds:
            choices = [("default" if name == "split" else "none", None), *((one, one) for one in choices)]
            return widgets.Dropdown(options=choices, value=value, **looks)
        return widgets.Dropdown(options=list(dict.fromkeys([*choices, value])), value=value, **looks)
    if field.annotation is bool:
        return widgets.Checkbox(value, indent=False, **looks)
    if name in SLIDERS:
        least, most, step = SLIDERS[name]
        kind = widgets.FloatSlider if isinstance(least, float) else widgets.IntSlider
        reach = {"min": min(least, value), "max": max(most, value), "step": step}
        return kind(value=value, continuous_update=False, **reach, **looks)
    if "tuple" in str(field.annotation):
        numbers = " ".join(map(str, value or ()))
        return widgets.Text(numbers, placeholder="one per stage", continuous_update=False, **looks)
    if "Path" in str(field.annotation):
        return widgets.Text(str(value or ""), placeholder="example", continuous_update=False, **looks)
    return _typed(field, value, looks)


def _typed(field: FieldInfo, value: Any, looks: dict[str, Any]) -> widgets.Widget:
    """A field for a number within the parameter's bounds; 0 stands for None, the default, where that is allowed."""
    kinds = get_args(field.annotation) or (field.annotation,)
    most: Any = next(bound.le for bound in field.metadata if isinstance(bound, Le))
    least: Any = next((bound.ge for bound in field.metadata if isinstance(bound, Ge)), 0)
    if type(None) in kinds:
        looks["tooltip"] += "; 0 uses the default"
        least = 0
    kind = widgets.BoundedFloatText if float in kinds else widgets.BoundedIntText
    return kind(value or 0, min=least, max=min(most, MOST_IN_A_BROWSER), continuous_update=False, **looks)
