"""What Python cannot set on widgets: keys that stay with them, a name and an explanation for every control.

JupyterLab acts on single keys (d d deletes a cell) unless the focused element itself carries an attribute.
ipywidgets shows the tooltips of some controls on their labels and those of others nowhere, and gives a slider's handle
no name. Python can only set classes, so a script in the page does it, once a group of widgets is shown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape

CLASS = "lab-widgets"  # of the box around all widgets that the script serves
HELP = "lab-help"  # of an element in that box that shows the explanation of the control with the focus or the mouse

_STYLE = f"""<style>
@keyframes lab-shown {{from {{opacity: 0.99}}}}
.{CLASS} .lab-keys, .{CLASS} .widget-inline-hbox {{animation: lab-shown 1ms}}
</style>"""
_SCRIPT = f"""
const box = this.closest('.{CLASS}'), explained = JSON.parse(this.dataset.words);
const name = row => {{
  const labels = [...row.querySelectorAll('.widget-label, .widget-label-basic')];
  const label = labels.map(one => one.textContent).join('').replaceAll('\u200b', '').trim();
  for (const one of row.querySelectorAll('select, input, [role=slider], .widget-readout')) {{
    if (label) one.setAttribute('aria-label', label);
    if (label in explained) one.setAttribute('aria-description', explained[label]);
  }}
  for (const one of [row, ...labels]) one.title = explained[label] ?? '';
}};
if (box && !box.dataset.explained) {{
  box.dataset.explained = true;
  box.querySelectorAll('.widget-inline-hbox').forEach(name);
  box.addEventListener('animationstart', event => {{
    if (event.target.matches('.widget-inline-hbox')) name(event.target);
  }});
  box.addEventListener('focusin', event => event.target.setAttribute('data-lm-suppress-shortcuts', ''));
  for (const kind of ['focusin', 'mouseover']) box.addEventListener(kind, event => {{
    const help = box.querySelector('.{HELP}'), words = event.target.closest('[title]')?.title;
    if (help && words && words !== 'null') help.textContent = words;
  }});
}}
"""


def keys(explained: Mapping[str, str] | None = None) -> str:
    """HTML to put into the box of class CLASS, for an HTML widget there.

    Args:
        explained: the label of a control -> what it means.
    """
    words = escape(json.dumps(dict(explained or {})))
    return f'{_STYLE}<i class="lab-keys" data-words="{words}" onanimationstart="{escape(_SCRIPT)}"></i>'
