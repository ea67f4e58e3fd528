"""The dp x tp mesh: which rank holds which part of the model (tp), and which share of the data (dp).

Ranks are numbered with tp inside, `rank = dp_rank * tp_size + tp_rank`: the ranks of one tp group, which talk in
every layer, are neighbours on one machine.

              tp_rank 0   1   2   3
    dp_rank 0         0   1   2   3      one whole model, split over 4 ranks
    dp_rank 1         4   5   6   7      the same model again, on other data
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lmtools.errors import ConfigError
from lmtools.parallel.launch import process_group


@dataclass(frozen=True)
class Mesh:
    """This rank's place among all ranks. A world of one is a mesh too, one without a process group.

    Attributes:
        dp_size: number of copies of the model.
        tp_size: number of ranks that one copy is split over.
        dp_rank: this rank's copy.
        tp_rank: this rank's part of the copy.
        device: where this rank computes.
        device_mesh: all ranks, with dimensions "dp" and "tp"; None in a world of one.
    """

    dp_size: int
    tp_size: int
    dp_rank: int
    tp_rank: int
    device: torch.device
    device_mesh: DeviceMesh | None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp_size * self.tp_size

    @property
    def rank(self) -> int:
        """This rank's number among all; rank 0 speaks for them."""
        return self.dp_rank * self.tp_size + self.tp_rank

    @property
    def tp_mesh(self) -> DeviceMesh | None:
        """The ranks that hold this copy of the model; None when it is not split."""
        return self.device_mesh["tp"] if self.device_mesh is not None and self.tp_size > 1 else None

    @property
    def dp_mesh(self) -> DeviceMesh | None:
        """The ranks that hold this part of the model; None when there is one copy."""
        return self.device_mesh["dp"] if self.device_mesh is not None and self.dp_size > 1 else None


@contextmanager
def open_mesh(*, dp: int, tp: int, device: str | None = None) -> Iterator[Mesh]:
    """The run's process group and its mesh, for as long as the block lasts. Every rank must call it.

    Args:
        dp: number of copies of the model (`--dp`).
        tp: number of ranks that one copy is split over (`--mp`).
        device: "cpu" or "cuda"; None is cuda where there is one.

    Raises:
        ConfigError: the run has more or fewer processes than the mesh has places, or this rank has no GPU.
    """
    with process_group(device or ("cuda" if torch.cuda.is_available() else "cpu")) as device_of_rank:
        yield make_mesh(device_of_rank, dp=dp, tp=tp)


def make_mesh(device: torch.device, *, dp: int, tp: int) -> Mesh:
    """Arrange the ranks of the process group that there is in a mesh. Every rank must call it.

    Args:
        device: this rank's.
        dp: number of copies of the model.
        tp: number of ranks that one copy is split over.

    Raises:
        ConfigError: there are more or fewer ranks than the mesh has places.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if dp * tp != world_size:
        raise ConfigError(
            f"--mp {tp} x --dp {dp} needs {dp * tp} processes, this run has {world_size}; "
            f"start {dp * tp} (torchrun --nproc-per-node), or change --mp and --dp"
        )
    if world_size == 1:
        return Mesh(dp_size=1, tp_size=1, dp_rank=0, tp_rank=0, device=device, device_mesh=None)
    device_mesh = init_device_mesh(device.type, (dp, tp), mesh_dim_names=("dp", "tp"))
    dp_rank, tp_rank = divmod(dist.get_rank(), tp)
    return Mesh(dp_size=dp, tp_size=tp, dp_rank=dp_rank, tp_rank=tp_rank, device=device, device_mesh=device_mesh)
