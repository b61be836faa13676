"""Runs in the background: started from a notebook or a terminal, watched from anywhere, ended without orphans."""

from vdpp_core.importing import importing

with importing():
    from launch.comparing import compare, timeline
    from launch.gallery import gallery
    from launch.job import Job, attach, jobs, start
    from launch.link import probe
    from launch.nodes import Nodes
    from launch.panel import panel
    from launch.sliders import sliders
    from launch.sweep import Sweep, sweep
    from launch.watch import watch

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
