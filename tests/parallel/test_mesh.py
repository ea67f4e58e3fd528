"""Each rank knows its place, and a run of the wrong size is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lmtools.errors import ConfigError
from lmtools.parallel.mesh import Mesh, make_mesh, open_mesh
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


def _place(dp: int, tp: int) -> tuple[int, int, float, float]:
    """Dp rank, tp rank, and the sum of the ranks in each group of this rank (its own where there is no group)."""
    mesh = make_mesh(CPU, dp=dp, tp=tp)
    sums = []
    for part in (mesh.tp_mesh, mesh.dp_mesh):
        value = torch.tensor(float(mesh.rank))
        if part is not None:
            dist.all_reduce(value, group=part.get_group())
        sums.append(value.item())
    assert mesh.rank == dist.get_rank()
    assert mesh.device_mesh is not None
    assert mesh.device_mesh.mesh_dim_names == ("dp", "tp")
    assert mesh.device_mesh.shape == (dp, tp)
    return mesh.dp_rank, mesh.tp_rank, *sums


def test_tp_groups_are_neighbours() -> None:
    assert run_ranks(6, _place, 2, 3) == [
        (0, 0, 0 + 1 + 2, 0 + 3),
        (0, 1, 0 + 1 + 2, 1 + 4),
        (0, 2, 0 + 1 + 2, 2 + 5),
        (1, 0, 3 + 4 + 5, 0 + 3),
        (1, 1, 3 + 4 + 5, 1 + 4),
        (1, 2, 3 + 4 + 5, 2 + 5),
    ]


def test_a_dimension_of_one_has_no_group() -> None:
    assert run_ranks(2, _place, 1, 2) == [(0, 0, 1, 0), (0, 1, 1, 1)]
    assert run_ranks(2, _place, 2, 1) == [(0, 0, 0, 1), (1, 0, 1, 1)]


def test_a_world_of_one_is_a_mesh_without_a_process_group() -> None:
    with open_mesh(dp=1, tp=1, device="cpu") as mesh:
        assert mesh == Mesh(dp_size=1, tp_size=1, dp_rank=0, tp_rank=0, device=CPU, device_mesh=None)
        assert (mesh.rank, mesh.world_size, mesh.tp_mesh, mesh.dp_mesh) == (0, 1, None, None)
        assert not dist.is_initialized()


def test_a_run_of_the_wrong_size_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"--mp 4 x --dp 2 needs 8 processes, this run has 6; start 8"):
        run_ranks(6, _place, 2, 4)
    with pytest.raises(ConfigError, match=r"--mp 2 x --dp 1 needs 2 processes, this run has 1"):
        make_mesh(CPU, dp=1, tp=2)
