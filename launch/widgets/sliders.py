"""Sliders above a figure that is redrawn when they move."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets as widgets
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from launch.widgets import keyboard
from vdpp_core.config.errors import ConfigError

SCREEN_DPI = 100
OLD = "lab-old"  # class of a figure that does not show what the controls say
STYLE = f"""<style>
.{OLD} {{opacity: 0.35; filter: grayscale(1)}}
.lab-refused {{color: var(--jp-error-color1); margin: 4px 0; line-height: 1.35}}
</style>"""


def sliders(draw: Callable[..., Figure], **controls: widgets.Widget) -> widgets.VBox:
    """Controls, a message and the figure that `draw(**values)` returns, redrawn after each change.

    Where `draw` raises, the message says why and the last figure is greyed, until it can be drawn again. An error in
    the first figure is the cell's.

    The figure is an Image widget, not an Output widget as in `interact`: when nbclient executes a notebook it acts as
    the front end of Output widgets, and may hang (jupyter/nbclient issue 312).

    Args:
        draw: takes the value of each control by name.
        controls: name -> ipywidgets control.
    """
    picture = widgets.Image(format="png", layout=widgets.Layout(max_width="100%"))
    message = widgets.HTML(STYLE + keyboard.keys())
    drawn: dict[str, Any] = {}

    def redraw(*_: Any) -> None:
        values = {name: control.value for name, control in controls.items()}
        try:
            picture.value = png(draw(**values))
        except Exception as error:
            if not drawn:
                raise
            picture.add_class(OLD)
            message.value = STYLE + keyboard.keys() + _refused(error, drawn)
        else:
            drawn.update(values)
            picture.remove_class(OLD)
            message.value = STYLE + keyboard.keys()

    for name, control in controls.items():
        control.description = control.description or name.replace("_", " ")
        control.style = {"description_width": "10em"}
        control.layout = widgets.Layout(width="32em", max_width="100%")
        control.observe(redraw, names="value")
    redraw()
    gc.collect()
    gc.freeze()  # the collector skips everything made so far, so that a move does not wait for it
    return widgets.VBox([widgets.VBox([*controls.values()]), message, picture]).add_class(keyboard.CLASS)


def _refused(error: Exception, drawn: dict[str, Any]) -> str:
    """What is wrong, and which values the grey figure has."""
    words = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
    values = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in drawn.items())
    return (
        f'<p class="lab-refused" role="alert"><b>{escape(words)}</b><br>'
        f"The grey figure still shows {escape(values)}.</p>"
    )


def png(figure: Figure) -> bytes:
    """A figure as PNG at SCREEN_DPI. Clears the figure, so that no later move waits for the garbage collector."""
    buffer = io.BytesIO()
    with plt.rc_context({"text.hinting": "no_hinting"}):  # fast rather than small
        figure.savefig(buffer, format="png", dpi=SCREEN_DPI, pil_kwargs={"compress_level": 1})
    figure.clear()
    return buffer.getvalue()
