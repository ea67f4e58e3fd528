"""Reads tensors and plain data out of files that torch.save wrote, and runs nothing that is in them.

Two containers exist. Since 2020 a zip archive: `NAME/data.pkl` and, stored without compression, `NAME/data/KEY` for
each storage. Before that, one stream:

    pickle    magic number 0x1950a86a20f9469cfc6c
    pickle    protocol, 1001
    pickle    system information: byte order and sizes of types
    pickle    the object; a storage is a persistent id with its key
    pickle    list of storage keys, in file order
    then for each key: int64 number of elements, and the elements

Either way a storage is a run of bytes in the file, and a tensor a strided view of it: a `LazyTensor` knows where, and
reads what is asked for through a memory map. `inert_pickle.py` reads the pickles.
Source: torch/serialization.py (`_legacy_load`, `_load`).
"""

from __future__ import annotations

import io
import mmap
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

import torch

from lmtools.checkpoints.inert_pickle import read_pickle
from lmtools.checkpoints.lazy_tensor import LazyTensor, Storage
from lmtools.checkpoints.pickle_names import ForeignRecord
from lmtools.errors import CheckpointError

__all__ = ["ForeignRecord", "LazyTensor", "TorchFile", "plain", "read_torch_file"]

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001

_MAX_OPTIONS = 100_000


@dataclass(frozen=True)
class TorchFile:
    """A file's content: what `read_pickle` returns, tensors not read yet."""

    path: Path
    format: Literal["zip", "legacy"]
    content: Any


def read_torch_file(path: str | Path, *, span: tuple[int, int] | None = None) -> TorchFile:
    """Read a file that torch.save wrote, without its weights and without running anything in it.

    Args:
        path: the file.
        span: start and end of what torch.save wrote, where it is one of several things in the file; a zip archive then.

    Raises:
        CheckpointError: it is not there, not such a file, cut short, or asks for something that data never needs.
    """
    path = Path(path)
    try:
        with open(path, "rb") as stream:
            stream.seek(span[0] if span else 0)
            if stream.read(4) == b"PK\x03\x04":
                return TorchFile(path, "zip", _read_zip(path, span[1] if span else None))
            if span:
                raise CheckpointError(f"holds no zip archive at byte {span[0]:,}; it is damaged, or another file")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                # Storages are passed over: the kernel must not read ahead into each, which comes to the whole file.
                mapped.madvise(mmap.MADV_RANDOM)
                if mapped[:2] == b"\x1f\x8b" or mapped[257:262] == b"ustar":
                    raise CheckpointError("is a gzip or tar archive; unpack it and name a file that was in it")
                return TorchFile(path, "legacy", _read_legacy(path, mapped))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(f"{path}: broken, or not a file of torch.save ({reason[:200]})") from error


def plain(value: Any) -> Any:
    """Options as plain dicts and lists: a Namespace or a DictConfig becomes a dict, an enum member its value.

    Raises:
        CheckpointError: nested too deep, or too many, to be options.
    """
    return _plain(value, depth=0, left=iter(range(_MAX_OPTIONS)))


def _plain(value: Any, depth: int, left: Iterator[int]) -> Any:
    # What shares its parts is small in a file and endless when it is written out.
    if depth > 100 or next(left, None) is None:
        raise CheckpointError(f"options are nested deeper than 100 levels, or are more than {_MAX_OPTIONS:,}")
    if isinstance(value, ForeignRecord):
        if isinstance(value.state, Mapping) and value.state:
            # omegaconf's containers and nodes keep what they hold beside what they know of it.
            held = next((value.state[name] for name in ("_content", "_val") if name in value.state), value.state)
            return _plain(held, depth + 1, left)
        return _plain(value.args[0], depth + 1, left) if len(value.args) == 1 else repr(value)
    if isinstance(value, Mapping):
        return {key: _plain(item, depth + 1, left) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item, depth + 1, left) for item in value]
    return value


def _read_zip(path: Path, end: int | None) -> Any:
    with _Beginning(path, end) as stream, zipfile.ZipFile(stream) as archive:
        members = {info.filename: info for info in archive.infolist()}
    pickles = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise CheckpointError(f"a zip archive with {len(pickles)} data.pkl, expected 1; not a file of torch.save")
    root = pickles[0].removesuffix("data.pkl")
    byteorder = members.get(f"{root}byteorder")
    if byteorder is not None and _read_record(path, byteorder) != b"little":
        raise CheckpointError("was written on a big-endian machine, which lmtools does not read")
    storages: dict[str, Storage] = {}

    def find_storage(dtype: torch.dtype, key: str, num_elements: int) -> Storage:
        if key not in storages:
            info = members[f"{root}data/{key}"]
            storages[key] = Storage(path, key, dtype, info.file_size, _record_offset(path, info), _crc32(info))
        return _same_storage(storages[key], dtype, num_elements)

    return read_pickle(io.BytesIO(_read_record(path, members[pickles[0]])), find_storage)


class _Beginning(io.FileIO):
    """A file as if it ended at byte `end`. What comes before an archive, zipfile passes over by itself."""

    def __init__(self, path: Path, end: int | None) -> None:
        super().__init__(path)
        self._end = super().seek(0, io.SEEK_END) if end is None else end

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence == io.SEEK_END:
            return super().seek(self._end + offset)
        return super().seek(offset, whence)

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(self._end - self.tell(), 0)
        content = super().read(left if size is None or size < 0 else min(size, left))
        assert content is not None, "a file never has to be waited for"
        return content


def _read_record(path: Path, info: zipfile.ZipInfo) -> bytes:
    with open(path, "rb") as stream:
        stream.seek(_record_offset(path, info))
        content = stream.read(info.file_size)
    if _crc32(info) not in (None, zlib.crc32(content)):
        raise CheckpointError(f"{info.filename} does not have the checksum that the archive says; fetch the file again")
    return content


def _crc32(info: zipfile.ZipInfo) -> int | None:
    return info.CRC or None  # torch can be told to compute none, and writes 0


def _record_offset(path: Path, info: zipfile.ZipInfo) -> int:
    """Where a record's bytes begin: behind a header of its own, whose length the archive's directory does not say."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(
            f"{info.filename} is compressed, as torch.save never does; unpack the archive and zip it with `zip -0`"
        )
    with open(path, "rb") as stream:
        stream.seek(info.header_offset)
        header = stream.read(30)
        if header[:4] != b"PK\x03\x04":
            raise zipfile.BadZipFile(f"no record at the place of {info.filename}")
        name_bytes, extra_bytes = struct.unpack("<HH", header[26:30])
        offset: int = info.header_offset + 30 + name_bytes + extra_bytes
        if offset + info.file_size > stream.seek(0, io.SEEK_END):
            raise zipfile.BadZipFile(f"{info.filename} is cut short")
    return offset


def _same_storage(storage: Storage, dtype: torch.dtype, num_elements: int) -> Storage:
    if storage.dtype != dtype or storage.num_bytes != num_elements * dtype.itemsize:
        raise CheckpointError(f"storage {storage.key} has another size or type than its tensors say; it is damaged")
    return storage


def _read_legacy(path: Path, mapped: mmap.mmap) -> Any:
    stream = cast(IO[bytes], mapped)  # has what is needed of it, and reads no further than the file's end
    if read_pickle(stream) != LEGACY_MAGIC:
        raise CheckpointError("begins neither like a zip archive nor like a legacy file; not a file of torch.save")
    protocol, system = read_pickle(stream), read_pickle(stream)
    if protocol != LEGACY_PROTOCOL or not isinstance(system, dict) or system.get("little_endian") is not True:
        raise CheckpointError(f"not of legacy protocol {LEGACY_PROTOCOL}, or not from a little-endian machine")
    storages: dict[str, Storage] = {}

    def find_storage(dtype: torch.dtype, key: str, num_elements: int) -> Storage:
        new = Storage(path, key, dtype, num_elements * dtype.itemsize)
        return _same_storage(storages.setdefault(key, new), dtype, num_elements)

    content = read_pickle(stream, find_storage)
    keys = read_pickle(stream)
    # Strings first: comparing lists that share their parts can take for ever.
    if not (isinstance(keys, list) and all(type(key) is str for key in keys) and sorted(keys) == sorted(storages)):
        raise CheckpointError("its list of storages does not name those that its tensors use; it is damaged")
    for key in keys:
        storage = storages[key]
        count = struct.unpack("<q", stream.read(8))[0]
        _same_storage(storage, storage.dtype, count)
        storage.offset = stream.tell()
        end = storage.offset + storage.num_bytes
        if end > len(mapped):
            raise CheckpointError(
                f"ends at byte {len(mapped):,}, in the middle of a storage that reaches to {end:,}; "
                "the file is cut short, fetch it again"
            )
        stream.seek(end)
    return content
