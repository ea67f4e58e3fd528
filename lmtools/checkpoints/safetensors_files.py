"""safetensors files: opened without reading a value.

    u64 n, little-endian
    n bytes of JSON, spaces at its end: {NAME: {"dtype": "F32", "shape": [...], "data_offsets": [begin, end]}, ...,
                                         "__metadata__": {STRING: STRING}}
    the values, little-endian and row by row; offsets count from here, and leave no byte out

Source: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lmtools.checkpoints.lazy_tensor import LazyTensor, Storage
from lmtools.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the format's own bound
METADATA = "__metadata__"


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """What a file says of its tensors, `__metadata__` included, and the byte where their values begin.

    Raises:
        CheckpointError: it is missing, cut short, or not of the format.
    """
    try:
        num_bytes = path.stat().st_size
        with open(path, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, num_bytes - 8):
                raise CheckpointError(
                    f"{path}: not a safetensors file, or cut short ({num_bytes:,} bytes, a header of {length:,}); "
                    "fetch it again"
                )
            header = json.loads(stream.read(length))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a safetensors file ({error}); fetch it again") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: not a safetensors file (its header is no object); fetch it again")
    return header, 8 + length


def read_safetensors(path: Path) -> dict[str, LazyTensor]:
    """Open a file: names, types and shapes are read, values are not.

    Raises:
        CheckpointError: it is missing, cut short, or not of the format.
    """
    header, first = read_header(path)
    num_bytes = path.stat().st_size
    tensors = {name: _tensor(path, name, entry, first, num_bytes) for name, entry in header.items() if name != METADATA}
    _require_no_byte_left_out(path, tensors, first, num_bytes)
    return tensors


def _require_no_byte_left_out(path: Path, tensors: Mapping[str, LazyTensor], first: int, file_bytes: int) -> None:
    """As the format promises; where bytes were lost or came in, values would be those of other places."""
    end = first
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].storage.offset, item[1].storage.num_bytes)):
        if tensor.storage.offset != end:
            raise CheckpointError(
                f"{path}: {name} begins at byte {tensor.storage.offset:,}, where the tensor before it ends at {end:,}; "
                "fetch it again"
            )
        end += tensor.storage.num_bytes
    if end != file_bytes:
        raise CheckpointError(
            f"{path}: has {file_bytes:,} bytes, but its tensors end at {end:,}; it is damaged, fetch it again"
        )


def _tensor(path: Path, name: str, entry: Any, first: int, file_bytes: int) -> LazyTensor:
    try:
        dtype, shape, (begin, end) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
            raise ValueError("a size or offset is no whole number")
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{end - begin} bytes for shape {shape}")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {name} is not described as safetensors are ({error})") from error
    if first + end > file_bytes:
        raise CheckpointError(
            f"{path}: cut short: has {file_bytes:,} bytes, {name} ends at {first + end:,}; fetch it again"
        )
    stride = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    storage = Storage(path, name, dtype, end - begin, offset=first + begin)
    return LazyTensor(dtype, shape, tuple(stride), 0, storage)


def encode_header(
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """All that comes before the values of tensors, which follow in the order of `shapes`."""
    # transformers loads a file only if it says that it is of PyTorch's tensors.
    header: dict[str, Any] = {METADATA: {"format": "pt", **(metadata or {})}}
    begin = 0
    for name, shape in shapes.items():
        end = begin + math.prod(shape) * dtypes[name].itemsize
        header[name] = {"dtype": NAMES[dtypes[name]], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    encoded = json.dumps(header, separators=(",", ":")).encode("utf-8")
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded
