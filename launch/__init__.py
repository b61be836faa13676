"""Runs in the background: started from a notebook or a terminal, watched from anywhere, ended without orphans."""

from launch.job import Job, attach, jobs, start
from launch.sweep import Sweep, sweep

__all__ = ["Job", "Sweep", "attach", "jobs", "start", "sweep"]
