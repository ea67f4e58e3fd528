"""What a Transformer-XL remembers between the steps of a run, and between its legs.

A checkpoint within an epoch holds the memory as whole tensors `memory.LAYER`, `(rows of all replicas, M, d_model)`,
each replica's rows written by itself: a run goes on from it on any mesh that reads the same streams.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from lmtools.checkpoints.training import load_tensors
from lmtools.checkpoints.training_index import tensor_shapes
from lmtools.models.transformer_xl import LayerMemory, TransformerXL, zero_memories
from lmtools.parallel.mesh import Mesh
from lmtools.train.config import TrainConfig

Memories: TypeAlias = list[LayerMemory] | None
"""One a layer, of this replica's rows; None is no memory."""


def first_memories(model: nn.Module, config: TrainConfig, num_rows: int, device: torch.device) -> Memories:
    """The memory at the beginning of an epoch or of a validation: none, or by fairseq's rule zeros."""
    if not isinstance(model, TransformerXL) or not config.fairseq_compat:
        return None
    return zero_memories(model.config, num_rows, torch.empty(0, dtype=next(model.parameters()).dtype, device=device))


def memory_tensors(memories: Memories, mesh: Mesh) -> dict[str, Tensor]:
    """What a checkpoint holds of the memory, by name, in tensors of its own."""
    return {f"memory.{layer}": _over_replicas(memory, mesh) for layer, memory in enumerate(memories or [])}


def load_memories(path: Path, mesh: Mesh, *, dtype: torch.dtype) -> Memories:
    """The memory that a checkpoint holds, or None. Every rank must call it.

    Args:
        path: the checkpoint's folder.
        mesh: where we are; its replicas divide the rows.
        dtype: of the run's parameters.

    Raises:
        CheckpointError: a file is broken.
    """
    shapes = [shape for name, shape in tensor_shapes(path).items() if name.startswith("memory.")]
    if not shapes:
        return None
    rows, *rest = shapes[0]
    memories: list[LayerMemory] = [
        torch.empty(rows // mesh.dp_size, *rest, dtype=dtype, device=mesh.device) for _ in shapes
    ]
    tensors = memory_tensors(memories, mesh)
    load_tensors(path, tensors, mesh)
    return [_of_this_replica(tensors[f"memory.{layer}"]) for layer in range(len(shapes))]


def _over_replicas(memory: LayerMemory, mesh: Mesh) -> Tensor:
    assert isinstance(memory, Tensor), "in training the inputs of layers are remembered"
    # It may wait on the host, or be a view.
    rows = memory.to(mesh.device, copy=True, memory_format=torch.contiguous_format)
    if mesh.device_mesh is None:
        return rows
    return DTensor.from_local(rows, mesh.device_mesh, [Shard(0), Replicate()], run_check=False)


def _of_this_replica(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
