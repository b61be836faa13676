"""Each axis is declared once, and every table of what axes do has a row for each."""

from __future__ import annotations

import itertools

import pytest

from vdpp_core import Parallel
from vdpp_core.config.axes import AXES, AXIS_NAMES, LOCKSTEP_NAMES
from vdpp_core.parallel.parallelize import SPLITTERS
from vdpp_core.plots import style
from vdpp_core.predict.predictor import SENT


def test_a_layout_has_a_size_for_each_axis():
    assert tuple(Parallel().sizes) == AXIS_NAMES
    assert tuple(name for name, field in Parallel.model_fields.items() if field.annotation is int) == AXIS_NAMES


def test_lockstep_axes_are_the_innermost():
    """`place`, `rank` and `coordinates` count on it."""
    assert ("dp", "pp", *LOCKSTEP_NAMES) == AXIS_NAMES


@pytest.mark.parametrize("table", [SPLITTERS, SENT], ids=["splitters", "bytes sent"])
def test_what_lockstep_axes_do_is_known_of_each(table):
    assert set(table) == set(LOCKSTEP_NAMES)


def test_figures_know_each_axis():
    assert set(AXIS_NAMES) < set(style.COLOURS)
    assert set(style.COLOURS) == set(style.MARKERS) == set(style.NAMES)
    assert len({axis.colour for axis in AXES}) == len({axis.marker for axis in AXES}) == len(AXES)


def test_members_are_numbered_as_in_the_mesh():
    layout = Parallel(cfg=2, frames=3)
    assert list(layout.coordinates(0)) == list(LOCKSTEP_NAMES)
    found = [tuple(layout.coordinates(member).values()) for member in range(layout.lockstep)]
    assert found == list(itertools.product(*map(range, layout.lockstep_sizes.values())))
