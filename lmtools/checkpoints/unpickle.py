"""Reads tensors and plain data out of torch files, and runs nothing.

torch.save writes a pickle, and a pickle is a program. Here it is read by an unpickler that knows three kinds of names:

- what a checkpoint is made of (tensors, storages, sizes, dtypes, ordered dicts): built here, tensors lazily;
- classes of the programs that wrote checkpoints (`argparse.Namespace`, fairseq's, omegaconf's, ...): they become inert
  `ForeignRecord`s, whatever the pickle asks to be done with them;
- everything else, `os.system` first of all: refused by name.

Two containers exist. Since 2020 a zip archive: `NAME/data.pkl` and, stored without compression, `NAME/data/KEY` for each
storage. Before that, one stream:

    pickle    magic number 0x1950a86a20f9469cfc6c
    pickle    protocol, 1001
    pickle    system information: byte order and sizes of types
    pickle    the object; a storage is a persistent id with its key
    pickle    list of storage keys, in file order
    then for each key: int64 number of elements, and the elements

Either way a storage is a run of bytes in the file, and a tensor a strided view of it: `LazyTensor` knows where, and reads
what is asked for through a memory map. Source: torch/serialization.py (`_legacy_load`, `_load`).
"""

from __future__ import annotations

import io
import mmap
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch
from torch import Tensor

from lmtools.errors import CheckpointError

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001

_FOREIGN_PACKAGES = frozenset(
    {
        "apex",
        "argparse",
        "enum",
        "fairscale",
        "fairseq",
        "fairseq_cli",
        "hydra",
        "megatron",
        "omegaconf",
        "transformers",
    }
)
"""Programs whose classes are found in checkpoints; an instance of one becomes a ForeignRecord."""

_STORAGE_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _STORAGE_DTYPES.values()}
_HARMLESS = {"set": set, "frozenset": frozenset, "list": list, "dict": dict, "tuple": tuple, "complex": complex}
_RAW: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}


@dataclass
class Storage:
    """A run of bytes in a file that tensors are views of; two tensors with the same one are tied."""

    path: Path
    key: str
    dtype: torch.dtype
    num_bytes: int
    offset: int = -1
    crc32: int = 0


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is still in its file.

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

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return int(np.prod(self.shape, dtype=np.int64))

    def read(self) -> Tensor:
        """The whole tensor, in memory of its own."""
        return self.read_slice(tuple(slice(0, length) for length in self.shape))

    def read_slice(self, slices: Sequence[slice]) -> Tensor:
        """Part of the tensor, in memory of its own; no other part is read.

        Args:
            slices: one for each dimension.
        """
        if self.num_elements == 0:
            return torch.empty(self.shape, dtype=self.dtype)[tuple(slices)]
        raw = _RAW[self.dtype.itemsize]
        with open(self.storage.path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            # An array may lie at any byte (legacy files align nothing), and NumPy copies from there correctly.
            view = np.ndarray(
                self.shape,
                raw,
                buffer=mapped,
                offset=self.storage.offset + self.storage_offset * raw.itemsize,
                strides=[step * raw.itemsize for step in self.stride],
            )
            copy = np.array(view[tuple(slices)], order="C")
            del view
        return torch.from_numpy(copy).view(self.dtype)


def verify_storage(storage: Storage) -> None:
    """Compare a storage's bytes with the checksum that a zip archive has of them; legacy files have none.

    Raises:
        CheckpointError: they differ.
    """
    if storage.crc32 == 0:  # torch can be told not to compute it
        return
    crc32, left = 0, storage.num_bytes
    with open(storage.path, "rb") as stream:
        stream.seek(storage.offset)
        while left:
            chunk = stream.read(min(left, 1 << 20))
            if not chunk:
                break
            crc32 = zlib.crc32(chunk, crc32)
            left -= len(chunk)
    if left or crc32 != storage.crc32:
        raise CheckpointError(
            f"{storage.path}: the bytes of storage {storage.key} have checksum {crc32:08x}, the archive says "
            f"{storage.crc32:08x}; the file is damaged, fetch it again"
        )


class ForeignRecord:
    """What a pickle says of an instance of a class that is not here: its arguments, its state, its items. Inert."""

    module = ""
    name = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> ForeignRecord:
        record = super().__new__(cls)
        record.args = args
        record.state = {}
        record.items = []
        return record

    args: tuple[Any, ...]
    state: Any
    items: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        self.items.append(item)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def __repr__(self) -> str:
        return f"<{self.module}.{self.name}>"


@dataclass(frozen=True)
class TorchFile:
    """A file's content: plain data with LazyTensor and ForeignRecord leaves."""

    path: Path
    format: Literal["zip", "legacy"]
    content: Any


def read_torch_file(path: str | Path) -> TorchFile:
    """Read a file that torch.save wrote, without its weights and without running anything in it.

    Raises:
        CheckpointError: it is not there, not such a file, cut short, or asks for something that data never needs.
    """
    path = Path(path)
    try:
        with open(path, "rb") as stream:
            if stream.read(4) == b"PK\x03\x04":
                return TorchFile(path, "zip", _read_zip(path))
            stream.seek(0)
            return TorchFile(path, "legacy", _read_legacy(path, stream))
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except Exception as error:
        raise CheckpointError(
            f"{path}: broken, or not a file of torch.save ({type(error).__name__}: {error})"
        ) from error


def plain(value: Any, _depth: int = 0) -> Any:
    """Options as plain dicts and lists: a Namespace becomes a dict, an enum member its value.

    Raises:
        CheckpointError: nested too deep to be options.
    """
    if _depth > 100:
        raise CheckpointError("options are nested deeper than 100 levels")
    if isinstance(value, ForeignRecord):
        if isinstance(value.state, Mapping) and value.state:
            content = value.state.get("_content", value.state)  # omegaconf keeps its values under _content
            return plain(content, _depth + 1)
        return plain(value.args[0], _depth + 1) if len(value.args) == 1 else repr(value)
    if isinstance(value, Mapping):
        return {key: plain(item, _depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, _depth + 1) for item in value]
    return value


# The pickle itself ---------------------------------------------------------------------------------------------------


class _Unpickler(pickle._Unpickler):
    """Python's own slow unpickler: unlike the C one, no opcode makes it reserve memory that the file does not fill."""

    def __init__(self, stream: IO[bytes], find_storage: Callable[[tuple[Any, ...]], Storage] | None = None) -> None:
        super().__init__(stream, encoding="utf-8")
        self._find_storage = find_storage

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch._utils" and name in _REBUILD:
            return _REBUILD[name]
        if module in ("torch", "torch.storage") and name in _STORAGE_DTYPES:
            return _STORAGE_DTYPES[name]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("torch", "device"):
            return _device_name
        if module in ("builtins", "__builtin__") and name in _HARMLESS:
            return _HARMLESS[name]
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "scalar":
            return _numpy_scalar
        if module in ("copyreg", "copy_reg") and name == "_reconstructor":
            return _reconstruct
        if (module, name) == ("builtins", "object"):
            return object
        if (module, name) == ("numpy", "dtype") or module.partition(".")[0] in _FOREIGN_PACKAGES:
            return type(name, (ForeignRecord,), {"module": module, "name": name})
        raise CheckpointError(f"names {module}.{name}, which is no data; the file is refused, nothing of it was run")

    def persistent_load(self, pid: Any) -> Storage:
        if self._find_storage is None or not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage":
            raise pickle.UnpicklingError("a reference to something that is no storage")
        return self._find_storage(pid)


def _rebuild_tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> LazyTensor:
    """torch._utils._rebuild_tensor(_v2): what follows the stride (gradient flag, hooks) is not data."""
    if not isinstance(storage, Storage):
        raise pickle.UnpicklingError("a tensor without a storage")
    return _checked_tensor(storage, storage.dtype, offset, size, stride)


def _rebuild_tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> LazyTensor:
    """torch._utils._rebuild_tensor_v3: a view of an untyped storage."""
    if not isinstance(storage, Storage) or dtype not in _DTYPES.values():
        raise pickle.UnpicklingError(f"a tensor of type {dtype}")
    return _checked_tensor(storage, dtype, offset, size, stride)


def _checked_tensor(storage: Storage, dtype: torch.dtype, offset: Any, size: Any, stride: Any) -> LazyTensor:
    numbers = (offset, *size, *stride)
    if len(size) != len(stride) or not all(type(number) is int and number >= 0 for number in numbers):
        raise pickle.UnpicklingError(f"a tensor of size {size} and stride {stride}")
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if 0 not in size and (last + 1) * dtype.itemsize > storage.num_bytes:
        end = (last + 1) * dtype.itemsize
        raise pickle.UnpicklingError(
            f"a tensor of size {tuple(size)} reaches {end:,} bytes into a storage of {storage.num_bytes:,}"
        )
    return LazyTensor(dtype, tuple(size), tuple(stride), offset, storage)


def _reconstruct(cls: Any, _base: Any, _state: Any) -> ForeignRecord:
    """copyreg._reconstructor, with which old pickle protocols begin an instance."""
    if not (isinstance(cls, type) and issubclass(cls, ForeignRecord)):
        raise pickle.UnpicklingError(f"an instance of {cls!r}")
    return cls()


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    """torch._utils._rebuild_parameter: the tensor is all that matters of it."""
    return data


def _device_name(kind: str, *index: int) -> str:
    return ":".join(map(str, (kind, *index)))


def _numpy_scalar(dtype: Any, data: Any) -> Any:
    """A NumPy number, as checkpoints hold for a loss."""
    code = dtype.args[0] if isinstance(dtype, ForeignRecord) and dtype.args else None
    if code not in ("f4", "f8", "i4", "i8", "u4", "u8", "b1"):
        raise pickle.UnpicklingError(f"a NumPy scalar of type {code!r}")
    data = data.encode("latin1") if isinstance(data, str) else data
    return np.frombuffer(data, dtype=f"<{code}")[0].item()


_REBUILD = {
    "_rebuild_tensor": _rebuild_tensor,
    "_rebuild_tensor_v2": _rebuild_tensor,
    "_rebuild_tensor_v3": _rebuild_tensor_v3,
    "_rebuild_parameter": _rebuild_parameter,
    "_rebuild_parameter_with_state": _rebuild_parameter,
}


# The two containers --------------------------------------------------------------------------------------------------


def _read_zip(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: info for info in archive.infolist()}
        pickles = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise CheckpointError(
                f"{path}: a zip archive with {len(pickles)} data.pkl, expected 1; not a file of torch.save"
            )
        root = pickles[0].removesuffix("data.pkl")
        if f"{root}byteorder" in members and archive.read(f"{root}byteorder").strip() != b"little":
            raise CheckpointError(f"{path}: was written on a big-endian machine, which lmtools does not read")
        storages: dict[str, Storage] = {}

        def find_storage(pid: tuple[Any, ...]) -> Storage:
            _, dtype, key, _, num_elements = pid[:5]
            if key not in storages:
                info = members[f"{root}data/{key}"]
                storages[key] = _zip_storage(path, info, key, dtype)
            storage = storages[key]
            if storage.dtype != dtype or storage.num_bytes != num_elements * dtype.itemsize:
                raise pickle.UnpicklingError(
                    f"storage {key} of {num_elements:,} {dtype} in a record of {storage.num_bytes:,} bytes"
                )
            return storage

        return _run(_Unpickler(io.BytesIO(archive.read(pickles[0])), find_storage), path)


def _zip_storage(path: Path, info: zipfile.ZipInfo, key: str, dtype: torch.dtype) -> Storage:
    if info.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(
            f"{path}: {info.filename} is compressed; unpack the archive and zip it again without compression"
        )
    with open(path, "rb") as stream:
        stream.seek(info.header_offset)
        header = stream.read(30)
        if header[:4] != b"PK\x03\x04":
            raise pickle.UnpicklingError(f"no record at the place of {info.filename}")
        name_bytes, extra_bytes = struct.unpack("<HH", header[26:30])
        offset = info.header_offset + 30 + name_bytes + extra_bytes
        if offset + info.file_size > stream.seek(0, io.SEEK_END):
            raise pickle.UnpicklingError(f"{info.filename} is cut short")
    return Storage(path, key, dtype, info.file_size, offset, info.CRC)


def _read_legacy(path: Path, stream: IO[bytes]) -> Any:
    if _run(_Unpickler(stream), path) != LEGACY_MAGIC:
        raise CheckpointError(
            f"{path}: begins neither like a zip archive nor like a legacy file; not a file of torch.save"
        )
    protocol, system = _run(_Unpickler(stream), path), _run(_Unpickler(stream), path)
    if protocol != LEGACY_PROTOCOL or not isinstance(system, dict) or not system.get("little_endian"):
        raise CheckpointError(
            f"{path}: legacy protocol {protocol!r} of {system!r}, expected {LEGACY_PROTOCOL}, little-endian"
        )
    storages: dict[str, Storage] = {}

    def find_storage(pid: tuple[Any, ...]) -> Storage:
        _, dtype, key, _, num_elements = pid[:5]
        if len(pid) > 5 and pid[5] is not None:
            raise pickle.UnpicklingError("a view of a storage, which torch has not written since 2017")
        storage = storages.setdefault(key, Storage(path, key, dtype, num_elements * dtype.itemsize))
        if (storage.dtype, storage.num_bytes) != (dtype, num_elements * dtype.itemsize):
            raise pickle.UnpicklingError(f"storage {key} comes with two sizes")
        return storage

    content = _run(_Unpickler(stream, find_storage), path)
    keys = _run(_Unpickler(stream), path)
    size = path.stat().st_size
    if not isinstance(keys, list) or set(keys) != storages.keys():
        raise pickle.UnpicklingError("the list of storages does not name those that tensors use")
    for key in keys:
        storage = storages[key]
        count = struct.unpack("<q", stream.read(8))[0]
        if count * storage.dtype.itemsize != storage.num_bytes:
            raise pickle.UnpicklingError(f"storage {key} has {count:,} elements, its tensors say otherwise")
        storage.offset = stream.tell()
        end = storage.offset + storage.num_bytes
        if end > size:
            raise CheckpointError(
                f"{path}: ends at byte {size:,}, in the middle of a storage that reaches to {end:,}; "
                "the file is cut short, fetch it again"
            )
        stream.seek(storage.num_bytes, io.SEEK_CUR)
    return content


def _run(unpickler: _Unpickler, path: Path) -> Any:
    try:
        return unpickler.load()
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
