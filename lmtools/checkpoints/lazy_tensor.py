"""Tensors that are still in their file: where their bytes are, and how to read all or part of them."""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmtools.errors import CheckpointError

_RAW: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}
_CHUNK_BYTES = 1 << 20
_MAX_DIMS = 32  # NumPy's


@dataclass
class Storage:
    """A run of bytes in a file that tensors are views of; two tensors with the same one are tied.

    Attributes:
        path: the file.
        key: its name there.
        dtype: of its elements.
        num_bytes: its length.
        offset: of its first byte in the file.
        crc32: what the file says of its bytes, or None.
    """

    path: Path
    key: str
    dtype: torch.dtype
    num_bytes: int
    offset: int = -1
    crc32: int | None = None

    def verify(self) -> None:
        """Compare the bytes with their checksum, where the file has one.

        Raises:
            CheckpointError: they differ.
        """
        if self.crc32 is None:
            return
        crc32, left = 0, self.num_bytes
        with open(self.path, "rb") as stream:
            stream.seek(self.offset)
            while chunk := stream.read(min(left, _CHUNK_BYTES)):
                crc32 = zlib.crc32(chunk, crc32)
                left -= len(chunk)
        if left or crc32 != self.crc32:
            raise CheckpointError(
                f"{self.path}: the bytes of storage {self.key} have checksum {crc32:08x}, the file says "
                f"{self.crc32:08x}; it is damaged, fetch it again"
            )


@dataclass(frozen=True)
class LazyTensor:
    """A strided view of a storage.

    Attributes:
        dtype: of its elements.
        shape: its sizes.
        stride: in elements.
        storage_offset: in elements, from the storage's start.
        storage: where its bytes are.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    storage: Storage

    def __post_init__(self) -> None:
        if type(self.shape) is not tuple or type(self.stride) is not tuple or len(self.shape) != len(self.stride):
            raise CheckpointError("a tensor whose shape and stride are not two tuples of one length")
        numbers = (self.storage_offset, *self.shape, *self.stride)
        if len(self.shape) > _MAX_DIMS or not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
            raise CheckpointError("a tensor with an impossible shape, stride or offset")
        if prod(max(length, 1) for length in self.shape) * self.dtype.itemsize >= 1 << 63:
            raise CheckpointError(f"a tensor of impossible shape {self.shape}")
        if self.num_bytes == 0:
            return
        last = self.storage_offset + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        # The second: a few bytes seen again and again, which would make a file of nothing fill the memory.
        if (last + 1) * self.dtype.itemsize > self.storage.num_bytes or self.num_bytes > self.storage.num_bytes:
            raise CheckpointError(
                f"a tensor of shape {self.shape} and stride {self.stride} does not fit its storage of "
                f"{self.storage.num_bytes:,} bytes"
            )

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size of its elements together."""
        return self.num_elements * self.dtype.itemsize

    def read(self) -> Tensor:
        """The whole tensor, in memory of its own."""
        return self.read_slice(tuple(slice(0, length) for length in self.shape))

    def read_slice(self, slices: Sequence[slice]) -> Tensor:
        """Part of the tensor, in memory of its own; no other part is read.

        Args:
            slices: one for each dimension.

        Raises:
            CheckpointError: the file has become shorter since it was opened.
        """
        if self.num_bytes == 0:
            return torch.empty(self.shape, dtype=self.dtype)[tuple(slices)].clone()
        raw = _RAW[self.dtype.itemsize]
        with open(self.storage.path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            if len(mapped) < self.storage.offset + self.storage.num_bytes:
                raise CheckpointError(f"{self.storage.path}: has become shorter since it was opened")
            # An array may lie at any byte (legacy files align nothing), and NumPy copies from there correctly.
            view = np.ndarray(
                self.shape,
                raw,
                buffer=mapped,
                offset=self.storage.offset + self.storage_offset * raw.itemsize,
                strides=[step * raw.itemsize for step in self.stride],
            )
            piece = view[tuple(slices)]
            if piece.nbytes < _CHUNK_BYTES:
                mapped.madvise(mmap.MADV_RANDOM)  # else the kernel may read megabytes around a bias
            copy = np.array(piece, order="C")
            del view, piece
        return torch.from_numpy(copy).view(self.dtype)


def equal_values(left: LazyTensor, right: LazyTensor) -> bool:
    """Whether two tensors have the same type, shape and values; reads a little of each at a time."""
    if left == right:
        return True
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    if not left.shape:
        return torch.equal(left.read(), right.read())
    num_rows = left.shape[0]
    rows = max(1, _CHUNK_BYTES * num_rows // max(1, left.num_bytes))
    rest = tuple(slice(0, length) for length in left.shape[1:])
    pieces = ((slice(start, min(start + rows, num_rows)), *rest) for start in range(0, num_rows, rows))
    return all(torch.equal(left.read_slice(piece), right.read_slice(piece)) for piece in pieces)
