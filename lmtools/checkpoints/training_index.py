"""The index of a distributed checkpoint, `.metadata`: which tensor lies where.

torch reads it with pickle. Here it goes through an allow-list that constructs the handful of record types it is made
of, and nothing else.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from lmtools.checkpoints.lazy_tensor import LazyTensor
from lmtools.checkpoints.unpickle import read_torch_file
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


def read_index(path: str | Path) -> Metadata:
    """The `.metadata` of a checkpoint's folder, as `read_metadata`; messages name the folder."""
    try:
        with open(Path(path) / ".metadata", "rb") as stream:
            return read_metadata(stream)
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def tensor_shapes(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Names and whole shapes of a checkpoint's tensors, from its index alone."""
    entries = read_index(path).state_dict_metadata
    return {name: tuple(entry.size) for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor, in a file.

    Attributes:
        offsets: where it begins, in each dimension.
        sizes: how long it is, in each dimension.
        path: the file.
        span: first byte in the file, and the one after the last.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    span: tuple[int, int]

    def open(self) -> LazyTensor:
        """The tensor that is in the file there.

        Raises:
            CheckpointError: another thing is there.
        """
        tensor = read_torch_file(self.path, span=self.span).content
        if not isinstance(tensor, LazyTensor) or tensor.shape != self.sizes:
            raise CheckpointError(
                f"{self.path}: holds no tensor of shape {self.sizes} at byte {self.span[0]:,}, as .metadata says; "
                "the files are not of one checkpoint"
            )
        return tensor


def chunks_of(name: str, entry: TensorStorageMetadata, index: Metadata, folder: Path) -> tuple[Chunk, ...]:
    """Where a tensor lies.

    Raises:
        CheckpointError: the index does not say, or a file is missing or too short.
    """
    try:
        return _chunks(name, entry, index, folder)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{folder}: its .metadata is broken ({name}: {error})") from error


def _chunks(name: str, entry: TensorStorageMetadata, index: Metadata, folder: Path) -> tuple[Chunk, ...]:
    chunks = []
    for saved in entry.chunks:
        place = index.storage_data.get(MetadataIndex(name, saved.offsets)) if index.storage_data else None
        if place is None or Path(place.relative_path).name != place.relative_path or place.transform_descriptors:
            raise CheckpointError(f"{folder}: its .metadata does not say where {name} lies")
        path = folder / place.relative_path
        span = place.offset, place.offset + place.length
        if not path.is_file() or path.stat().st_size < span[1]:
            raise CheckpointError(f"{path}: ends before byte {span[1]:,}, where {name} does; the checkpoint is damaged")
        chunks.append(Chunk(tuple(saved.offsets), tuple(saved.sizes), path, span))
    if sum(torch.Size(chunk.sizes).numel() for chunk in chunks) != entry.size.numel():
        raise CheckpointError(f"{folder}: the chunks of {name} do not make up the whole")
    return tuple(chunks)


def verify_tensors(path: str | Path, names: Iterable[str], *, rank: int, world_size: int) -> None:
    """Compare tensors with the checksums that their files have of them, which torch's own reader does not.

    Args:
        path: the checkpoint's folder.
        names: of the tensors.
        rank: which share of the files' chunks to read; all ranks together read each once.
        world_size: how many ranks there are.

    Raises:
        CheckpointError: one is damaged.
    """
    folder, index = Path(path), read_index(path)
    chunks: list[Chunk] = []
    for name in sorted(names):
        entry = index.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata), "see read_metadata"
        chunks += chunks_of(name, entry, index, folder)
    for chunk in chunks[rank::world_size]:
        chunk.open().storage.verify()
