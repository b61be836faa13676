"""The axes along which a run is split over ranks. Each axis is declared here once; everything else looks it up."""

from __future__ import annotations

from dataclasses import dataclass

MOST_RANKS = 4096


@dataclass(frozen=True)
class Axis:
    """One way to split a run, and how it appears to people.

    Attributes:
        name: field of `Parallel`, dimension of the mesh, flag and table column.
        splits: what it splits; the help text.
        label: name in figures.
        colour, marker: its look in figures; every pair of axes differs in greyscale, too.
        lockstep: whether its ranks compute the same step of the same sample together.
        most: largest size.
    """

    name: str
    splits: str
    label: str
    colour: str
    marker: str
    lockstep: bool = False
    most: int = MOST_RANKS


# In the order of the mesh, outermost first: the last axis communicates most. Lockstep axes are the innermost.
AXES = (
    Axis("dp", "replicas: split the samples", "data parallel (dp)", "#0072B2", "o"),
    Axis("pp", "stages: split the steps", "step pipeline (pp)", "#E69F00", "s"),
    Axis("cfg", "1 or 2: split the two guidance passes over ranks", "guidance (cfg)", "#009E73", "^", True, 2),
    Axis("frames", "split the frames over ranks, inside the UNet", "frames", "#CC79A7", "D", True),
    Axis("tp", "split heads, columns and channels over ranks", "tensor parallel (tp)", "#D55E00", "v", True),
)
# A flag rather than an axis of the mesh: it shards parameters over ranks that other axes provide.
FSDP = Axis("fsdp", "shard the parameters over all ranks of a stage", "sharded (fsdp)", "#5A3A1A", "P")

AXIS_NAMES = tuple(axis.name for axis in AXES)
LOCKSTEP_NAMES = tuple(axis.name for axis in AXES if axis.lockstep)
