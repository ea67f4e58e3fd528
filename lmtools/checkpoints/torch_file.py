"""Writes the files that torch.load reads, a few megabytes of tensors at a time: torch.save wants them all in memory.

The layout is that of the zip archives that `unpickle.py` reads. The archive's directory comes last, so a file whose
writing was cut short is not an archive. Each record has its checksum, and tensors begin at multiples of 64 bytes as
torch lays them, so that `torch.load(mmap=True)` can map them.
Source: torch/serialization.py (`_save`), caffe2/serialize/inline_container.cc (padding).
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_ALIGNMENT = 64
_ZIP64_EXTRA_BYTES = 20
_STORAGE_CLASSES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
}


@dataclass(frozen=True)
class StreamedTensor:
    """A tensor whose elements are given when they are written.

    Attributes:
        dtype: of its elements, a floating-point one.
        shape: its sizes.
        chunks: gives its bytes, row by row.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[memoryview]]


def write_torch_file(path: Path, content: Any) -> None:
    """Write what torch.load shall return.

    Args:
        path: the file.
        content: plain data, in which a StreamedTensor stands for a tensor.
    """
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(content)
    with open(path, "wb") as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        root = path.stem
        _write_record(archive, f"{root}/data.pkl", [pickled.getbuffer()])
        _write_record(archive, f"{root}/byteorder", [memoryview(b"little")])
        for key, tensor in enumerate(pickler.tensors):
            _write_record(archive, f"{root}/data/{key}", tensor.chunks())
        _write_record(archive, f"{root}/version", [memoryview(b"3\n")])


def _write_record(archive: zipfile.ZipFile, name: str, chunks: Iterable[memoryview]) -> None:
    info = zipfile.ZipInfo(name)
    begin = archive.start_dir + 30 + len(name.encode()) + _ZIP64_EXTRA_BYTES + 4
    info.extra = struct.pack("<2sH", b"FB", -begin % _ALIGNMENT) + b"Z" * (-begin % _ALIGNMENT)
    with archive.open(info, "w", force_zip64=True) as record:
        for chunk in chunks:
            record.write(chunk)


@dataclass(frozen=True)
class _Storage:
    """What torch keeps outside the pickle, which names it by its key."""

    dtype: torch.dtype
    key: str
    num_elements: int


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=2)
        self.tensors: list[StreamedTensor] = []

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, StreamedTensor):
            return NotImplemented
        storage = _Storage(obj.dtype, str(len(self.tensors)), math.prod(obj.shape))
        self.tensors.append(obj)
        strides = tuple(math.prod(obj.shape[dim + 1 :]) for dim in range(len(obj.shape)))
        return torch._utils._rebuild_tensor_v2, (storage, 0, obj.shape, strides, False, OrderedDict())

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        return "storage", _STORAGE_CLASSES[obj.dtype], obj.key, "cpu", obj.num_elements
