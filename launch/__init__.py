"""Runs in the background: started from a notebook or a terminal, watched from anywhere, stopped without orphans."""

from launch.job import Job, attach, jobs, start
from launch.link_speed import probe
from launch.machines.nodes import Nodes
from launch.sweep import Sweep, sweep
from launch.widgets import blanks
from launch.widgets.comparison import compare, timeline
from launch.widgets.gallery import gallery
from launch.widgets.panel import panel
from launch.widgets.sliders import sliders
from launch.widgets.watch import watch

blanks.register()

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
