"""The index of a distributed checkpoint, `.metadata`: which tensor lies where.

torch reads it with pickle. Here it goes through an allow-list that constructs the handful of record types it is made
of, and nothing else.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lmtools.errors import CheckpointError

_METADATA_TYPES = (
    {
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    }
    | {
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
        ("collections", "OrderedDict"),
    }
    | {("torch", name) for name in ("float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool")}
)


class _MetadataUnpickler(pickle.Unpickler):
    """Reads the index of a distributed checkpoint; constructs only the types that one consists of."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _METADATA_TYPES:
            raise CheckpointError(f"its .metadata names {module}.{name}, which no checkpoint of lmtools does")
        return super().find_class(module, name)


def read_metadata(stream: IO[bytes]) -> Metadata:
    """Read `.metadata`; every entry of it is a tensor, which torch reads without pickle's freedom.

    Raises:
        CheckpointError: it is broken, or is not what lmtools writes.
    """
    try:
        metadata = _MetadataUnpickler(stream).load()
    except CheckpointError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())  # torch writes several lines
        raise CheckpointError(f"its .metadata is broken ({reason})") from error
    entries = getattr(metadata, "state_dict_metadata", None)
    if not isinstance(metadata, Metadata) or not isinstance(entries, dict):
        raise CheckpointError("its .metadata is not the index of a checkpoint")
    for name, entry in entries.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"its .metadata holds {name!r} as an object, expected tensors only")
        if not isinstance(getattr(entry, "size", None), torch.Size):
            raise CheckpointError(f"its .metadata is broken (no size of {name!r})")
    return metadata


def tensor_shapes(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Names and whole shapes of a checkpoint's tensors, from its index alone."""
    try:
        with open(Path(path) / ".metadata", "rb") as stream:
            entries = read_metadata(stream).state_dict_metadata
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    return {name: tuple(entry.size) for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
