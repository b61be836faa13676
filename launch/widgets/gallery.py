"""Videos in a notebook, embedded so that a report needs no other files."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from html import escape
from pathlib import Path

from IPython.display import HTML


def gallery(videos: Mapping[str, Path], width: int = 160) -> HTML:
    """Videos (MP4) and pictures side by side, each `width` pixels wide; videos loop.

    Args:
        videos: caption -> file.
    """
    return HTML(f'<div style="display:flex;flex-wrap:wrap;gap:12px">{"".join(_items(videos, width))}</div>')


def _items(videos: Mapping[str, Path], width: int) -> list[str]:
    items = []
    for caption, path in videos.items():
        data = base64.b64encode(path.read_bytes()).decode()
        style, label = f'style="width:{width}px;image-rendering:pixelated"', escape(caption)
        if path.suffix == ".mp4":
            playing = f'aria-label="{label}" autoplay loop muted playsinline'
            shown = f'<video {style} {playing} src="data:video/mp4;base64,{data}"></video>'
        else:
            shown = f'<img {style} alt="{label}" src="data:image/{escape(path.suffix[1:])};base64,{data}">'
        words = f'<figcaption style="font-size:12px;max-width:{width}px">{label}</figcaption>'
        items.append(f'<figure style="margin:0">{shown}{words}</figure>')
    return items
