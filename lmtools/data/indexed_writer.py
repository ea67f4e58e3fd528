"""Writing a split: `PREFIX.bin` and `PREFIX.idx`, whose byte table is in `indexed.py`.

Works without numpy, so that the process that only hands out text to workers starts at once.
"""

from __future__ import annotations

import os
import shutil
import struct
import sys
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

from lmtools.files import disk_errors, fsync_directory, fsync_file

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQ")

_CODES = {"H": 8, "I": 9}  # uint16 and uint32
_UINT16_TYPES = 65_500
_SIZE_BYTES = 4
_SIZES_AT_A_TIME = 1 << 18


def bin_path(prefix: str | Path) -> Path:
    """`PREFIX.bin`, also when the prefix has a dot of its own."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """`PREFIX.idx`."""
    return Path(f"{prefix}.idx")


def token_typecode(vocab_size: int) -> str:
    """The type, as `array` names it, that tokens of a dictionary of this size are written as: uint16 or uint32."""
    return "H" if vocab_size < _UINT16_TYPES else "I"


def little_endian(typecode: str, values: Sequence[int]) -> bytes:
    """The bytes of numbers as both files hold them."""
    numbers = array(typecode, values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def write_index(stream: BinaryIO, sizes: Path, typecode: str) -> None:
    """Write an .idx in bounded memory, with offsets that stay right beyond 2 GiB.

    Args:
        stream: where to.
        sizes: a file of little-endian int32, the tokens of each sentence.
        typecode: the type of the tokens in the .bin, as `token_typecode` names it.
    """
    stream.write(HEADER.pack(MAGIC, VERSION, _CODES[typecode], sizes.stat().st_size // _SIZE_BYTES))
    with open(sizes, "rb") as source:
        shutil.copyfileobj(source, stream)
    token_bytes = array(typecode).itemsize
    end = 0
    for chunk in _read_sizes(sizes):
        *offsets, end = accumulate((size * token_bytes for size in chunk), initial=end)
        stream.write(little_endian("q", offsets))


def _read_sizes(path: Path) -> Iterator[Sequence[int]]:
    with open(path, "rb") as source:
        while content := source.read(_SIZES_AT_A_TIME * _SIZE_BYTES):
            yield struct.unpack(f"<{len(content) // _SIZE_BYTES}i", content)


def write_dataset(prefix: str | Path, sentences: Iterable[Sequence[int]], *, vocab_size: int) -> None:
    """Write a split sentence by sentence, in bounded memory.

    Args:
        prefix: path of the pair without its suffix.
        sentences: token indices of each, the end-of-sentence included.
        vocab_size: types of the dictionary, which decides how tokens are stored.

    Raises:
        LmtoolsError: the disk is full or the folder may not be written; what was there is as it was.
    """
    target = Path(prefix)
    typecode = token_typecode(vocab_size)
    with (
        disk_errors(bin_path(prefix)),
        tempfile.TemporaryDirectory(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent) as folder,
    ):
        split, sizes_file = Path(folder, "split"), Path(folder, "sizes")
        with open(bin_path(split), "wb") as tokens, open(sizes_file, "wb") as sizes:
            for sentence in sentences:
                tokens.write(little_endian(typecode, sentence))
                sizes.write(little_endian("i", [len(sentence)]))
        with open(idx_path(split), "wb") as index:
            write_index(index, sizes_file, typecode)
        fsync_file(bin_path(split))
        fsync_file(idx_path(split))
        replace_dataset(split, prefix)


def replace_dataset(source: str | Path, target: str | Path) -> None:
    """Rename a finished pair over another one in the same file system.

    The old index goes first and the new one comes last: whenever this is interrupted, an index that is there belongs
    to the .bin beside it.
    """
    idx_path(target).unlink(missing_ok=True)
    os.replace(bin_path(source), bin_path(target))
    os.replace(idx_path(source), idx_path(target))
    fsync_directory(Path(target).parent)
