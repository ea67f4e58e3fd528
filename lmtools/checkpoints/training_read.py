"""Reads the model out of a training checkpoint, a slice at a time, on one process or on any mesh.

The folder is laid out as `training.py` says. Each tensor lies in it in chunks, one for each rank that had a part of it,
and a chunk is what torch.save makes of a tensor, at some place in some file. So it reads as fairseq's files do: names
and shapes first, values when, and as far as, they are asked for, and nothing is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lmtools.checkpoints.identity import identity_of_files
from lmtools.checkpoints.models import model_config, new_model
from lmtools.checkpoints.training import read_record
from lmtools.checkpoints.training_index import Chunk, chunks_of, read_index
from lmtools.errors import CheckpointError, ConfigError
from lmtools.models.architectures import ModelConfig
from lmtools.parallel.parallelize import without_memory

_PREFIX = "model."


@dataclass(frozen=True)
class TrainingCheckpoint:
    """An open training checkpoint, of which only the index was read.

    Attributes:
        folder: where it is, links followed: what `checkpoint_best` names may change while it is read.
        record: configuration and progress.
        config: the model that it holds.
        chunks: where each parameter is, by name.
        dtypes: of each parameter.
    """

    format: ClassVar[str] = "training"
    folder: Path
    record: Mapping[str, Any]
    config: ModelConfig
    chunks: Mapping[str, tuple[Chunk, ...]]
    dtypes: Mapping[str, torch.dtype]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that hold the model."""
        return tuple(sorted({chunk.path for chunks in self.chunks.values() for chunk in chunks}))

    @property
    def num_parts(self) -> int:
        """How many files hold the model."""
        return len(self.paths)

    @property
    def tokens_per_sample(self) -> int | None:
        """The length of blocks that it was trained on."""
        length = self.record.get("train", {}).get("tokens_per_sample")
        return length if type(length) is int else None

    def identity(self) -> dict[str, Any]:
        """What tells this checkpoint from another one written to the same place, without hashing gigabytes."""
        return identity_of_files(self.paths, below=self.folder.parent)

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """Read part of a whole parameter, from whichever chunks hold it.

        Args:
            name: the parameter.
            slices: one for each dimension, with plain bounds.

        Returns:
            A tensor of its own, in the dtype that was trained in.
        """
        whole = torch.empty([piece.stop - piece.start for piece in slices], dtype=self.dtypes[name])
        for chunk in self.chunks[name]:
            bounds = [
                (max(piece.start, offset), min(piece.stop, offset + size))
                for piece, offset, size in zip(slices, chunk.offsets, chunk.sizes, strict=True)
            ]
            if all(start < stop for start, stop in bounds):
                there = [slice(a - offset, b - offset) for (a, b), offset in zip(bounds, chunk.offsets, strict=True)]
                here = tuple(
                    slice(a - piece.start, b - piece.start) for (a, b), piece in zip(bounds, slices, strict=True)
                )
                whole[here] = chunk.open().read_slice(there)
        return whole

    def drifted(self, part: int) -> list[str]:
        """No tensor is there twice, so none can differ from its copy."""
        return []

    def verify_part(self, part: int, *, allow_replica_drift: bool = False) -> None:
        """Compare what one of `paths` holds of the model with its checksums.

        Args:
            part: which one.
            allow_replica_drift: nothing is replicated here, so it changes nothing.

        Raises:
            CheckpointError: it is damaged.
        """
        for chunks in self.chunks.values():
            for chunk in chunks:
                if chunk.path == self.paths[part]:
                    chunk.open().storage.verify()


def open_training(path: str | Path) -> TrainingCheckpoint:
    """Open a training checkpoint and check all that can be checked without reading its weights.

    Raises:
        CheckpointError: no complete checkpoint is there, its index is broken, or it does not hold the model that its
            configuration says.
    """
    folder = Path(path).resolve()
    record = read_record(folder)
    config = _config(record, folder)
    index = read_index(folder)
    with without_memory():
        parameters = dict(new_model(config).named_parameters())
    saved = {name for name in index.state_dict_metadata if name.startswith(_PREFIX)}
    for name in sorted(saved ^ {_PREFIX + name for name in parameters}):
        problem = "is not of the model of its configuration" if name in saved else "is missing"
        raise CheckpointError(f"{folder}: {name} {problem}")
    chunks, dtypes = {}, {}
    for name, parameter in parameters.items():
        entry = index.state_dict_metadata[_PREFIX + name]
        assert isinstance(entry, TensorStorageMetadata), "see read_metadata"
        if entry.size != parameter.shape:
            raise CheckpointError(f"{folder}: {name} has shape {tuple(entry.size)}, expected {tuple(parameter.shape)}")
        chunks[name] = chunks_of(_PREFIX + name, entry, index, folder)
        dtypes[name] = entry.properties.dtype
    return TrainingCheckpoint(folder, record, config, chunks, dtypes)


def _config(record: Mapping[str, Any], folder: Path) -> ModelConfig:
    try:
        return model_config(record["model"], record["model"]["vocab_size"])
    except (KeyError, TypeError, ConfigError) as error:
        raise CheckpointError(f"{folder}: its configuration is of another version ({error})") from error
