"""Sliders above a figure that is redrawn when they move."""

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
    """Controls above the figure that `draw(**values)` returns, redrawn after each change.

    The figure is an Image widget, not an Output widget as in `interact`: when nbclient executes a notebook it acts as
    the front end of Output widgets, and may hang (jupyter/nbclient issue 312).

    Args:
        draw: takes the value of each control by name.
        controls: name -> ipywidgets control.
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
    gc.freeze()  # the collector skips everything made so far, so that a move does not wait for it
    return widgets.VBox([*controls.values(), picture])


def png(figure: Figure) -> bytes:
    """A figure as PNG at SCREEN_DPI. Clears the figure, so that no later move waits for the garbage collector."""
    buffer = io.BytesIO()
    with plt.rc_context({"text.hinting": "no_hinting"}):  # fast rather than small
        figure.savefig(buffer, format="png", dpi=SCREEN_DPI, pil_kwargs={"compress_level": 1})
    figure.clear()
    return buffer.getvalue()
