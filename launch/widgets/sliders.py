"""Sliders above a figure. They hold no logic of their own."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable
from typing import Any

import ipywidgets as widgets
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

SCREEN_DPI = 100


def sliders(draw: Callable[..., Figure], **controls: widgets.Widget) -> widgets.VBox:
    """Sliders above the figure that `draw(**values)` returns, redrawn when one is moved.

    The figure is an Image widget and not, as with `interact`, an Output widget: while a notebook is executed for a
    report, nbclient has to play the front end of those, and may wait for ever in it (jupyter/nbclient issue 312).
    """
    picture = widgets.Image(format="png", layout=widgets.Layout(max_width="100%"))

    def redraw(*_: Any) -> None:
        picture.value = png(draw(**{name: control.value for name, control in controls.items()}))

    for name, control in controls.items():
        control.description = control.description or name
        control.style = {"description_width": "10em"}
        control.layout = widgets.Layout(width="32em")
        control.observe(redraw, names="value")
    redraw()
    gc.collect()
    gc.freeze()  # no move then waits until all that was made before, as what predictions counted, was searched again
    return widgets.VBox([*controls.values(), picture])


def png(figure: Figure) -> bytes:
    """A figure as a widget shows it, and freed at once: not by a search for garbage during some later move."""
    buffer = io.BytesIO()
    with plt.rc_context({"text.hinting": "no_hinting"}):  # soon, not small
        figure.savefig(buffer, format="png", dpi=SCREEN_DPI, pil_kwargs={"compress_level": 1})
    figure.clear()
    return buffer.getvalue()
