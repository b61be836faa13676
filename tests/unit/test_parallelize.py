"""What `parallelize` refuses, and that one rank is left as it is; the rest is in tests/distributed/test_lockstep.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import vdpp_core
from vdpp_core import Parallel, RunConfig, models
from vdpp_core.parallel.parallelize import APPLIED


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Parallel().mesh("cpu")
    dist.destroy_process_group()


def test_one_rank_computes_alone(mesh):
    unet = models.load(RunConfig(device="cpu", parallel=Parallel()), torch.device("cpu"), torch.float32)
    before = set(unet.__dict__)
    assert vdpp_core.parallelize(unet, mesh) is unet
    assert set(unet.__dict__) - before == {APPLIED}
    with pytest.raises(ValueError, match=r"^unet UNetSpatio\w+: is parallelized already, restore comes first$"):
        vdpp_core.parallelize(unet, mesh)
    assert vdpp_core.restore(unet) is unet
    assert set(unet.__dict__) == before
    assert vdpp_core.restore(unet) is unet


def test_a_mesh_of_other_axes_is_refused():
    mesh = SimpleNamespace(mesh_dim_names=("tp",))
    with pytest.raises(
        ValueError, match=r"^mesh \('tp',\): must be of Parallel.mesh, with the axes dp, pp, cfg, frames, tp$"
    ):
        vdpp_core.parallelize(torch.nn.Linear(1, 1), mesh)


def test_the_package_has_no_other_late_names():
    with pytest.raises(AttributeError, match="no attribute 'paralelize'"):
        _ = vdpp_core.paralelize
