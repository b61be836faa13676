"""Runs in the background: started from a notebook or a terminal, watched from anywhere, stopped without orphans."""

from IPython import get_ipython

from launch.job import Job, attach, jobs, start
from launch.link_speed import probe
from launch.machines.nodes import Nodes
from launch.sweep import Sweep, sweep
from launch.widgets import table_words
from launch.widgets.comparison import compare, timeline
from launch.widgets.gallery import gallery
from launch.widgets.panel import panel
from launch.widgets.sliders import sliders
from launch.widgets.watch import watch

__all__ = [
    "Job",
    "Nodes",
    "Sweep",
    "attach",
    "compare",
    "gallery",
    "jobs",
    "panel",
    "probe",
    "sliders",
    "start",
    "sweep",
    "timeline",
    "watch",
]

if (_shell := get_ipython()) is not None:
    table_words.install(_shell)
