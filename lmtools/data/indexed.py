r"""fairseq's memory-mapped dataset: a split as `PREFIX.bin` and `PREFIX.idx`.

`.bin` is nothing but the tokens of all sentences, one after the other. `.idx` says where each sentence lies;
everything is little-endian and nothing is padded:

    byte          type      what
    0             9 bytes   magic: b"MMIDIDX\x00\x00"
    9             uint64    version, 1
    17            uint8     code of the tokens' type (below)
    18            uint64    n, the number of sentences
    26            int32     n sizes: tokens of each sentence, its end-of-sentence included
    26 + 4 n      int64     n offsets: the byte of .bin where each sentence begins
    26 + 12 n               end of the file

    code  1      2     3      4      5      6, 7     8       9       10
    type  uint8  int8  int16  int32  int64  float64  uint16  uint32  uint64

A dictionary of fewer than 65,500 types is written as uint16, a larger one as uint32; fairseq before 2021 wrote
int32 instead of uint32 and knew no code above 8. Floats are not tokens and are refused here. `indexed_writer.py`
writes what this reads.

Source: fairseq, `fairseq/data/indexed_dataset.py`, `MMapIndexedDataset`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lmtools.data.indexed_writer import HEADER, MAGIC, VERSION, bin_path, idx_path
from lmtools.errors import DataError

__all__ = ["IndexedDataset", "TokenArray", "bin_path", "idx_path"]

TokenArray: TypeAlias = NDArray[np.integer[Any]]

_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
    9: np.dtype("<u4"),
    10: np.dtype("<u8"),
}
_FLOAT_CODES = (6, 7)
_CHUNK = 1 << 20


class IndexedDataset:
    """A split on the disk, mapped into memory; opening it checks the pair from end to end.

    Attributes:
        prefix: path of the pair without its suffix.
        dtype: the tokens' type in the file.
        sizes: int32 `(num_sentences,)`, tokens of each sentence, its end-of-sentence included.
        tokens: `(num_tokens,)` of `dtype`, the whole stream.
    """

    def __init__(self, prefix: str | Path) -> None:
        """Open `PREFIX.idx` and `PREFIX.bin`.

        Raises:
            DataError: a file of the pair is missing, is of another format, is cut short, or does not fit the other.
        """
        self.prefix = Path(prefix)
        self.dtype, num_sentences = _read_header(idx_path(prefix))
        self.sizes: NDArray[np.int32] = _map(idx_path(prefix), np.dtype("<i4"), HEADER.size, num_sentences)
        self._offsets: NDArray[np.int64] = _map(
            idx_path(prefix), np.dtype("<i8"), HEADER.size + self.sizes.nbytes, num_sentences
        )
        num_tokens = self._check_offsets()
        self._check_bin_size(num_tokens)
        self.tokens: TokenArray = _map(bin_path(prefix), self.dtype, 0, num_tokens)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> TokenArray:
        """The tokens of one sentence, as a view of the file."""
        start = int(self._offsets[index]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.sizes[index])]

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[Path]]:
        return IndexedDataset, (self.prefix,)  # another process maps the files again instead of receiving them

    @property
    def num_tokens(self) -> int:
        """Tokens of all sentences, ends of sentence included."""
        return len(self.tokens)

    def _check_offsets(self) -> int:
        """Each sentence begins where the one before ends; returns the number of tokens."""
        num_tokens = 0
        for start in range(0, len(self.sizes), _CHUNK):
            sizes = self.sizes[start : start + _CHUNK].astype(np.int64)
            if sizes.min() < 0:
                bad = int(np.argmax(sizes < 0))
                raise DataError(f"{idx_path(self.prefix)}: sentence {start + bad} has {sizes[bad]} tokens")
            ends = num_tokens + np.cumsum(sizes)
            expected = (ends - sizes) * self.dtype.itemsize
            found = self._offsets[start : start + _CHUNK]
            if (found != expected).any():
                bad = int(np.argmax(found != expected))
                raise DataError(
                    f"{idx_path(self.prefix)}: sentence {start + bad} begins at byte {found[bad]} of the .bin, "
                    f"expected {expected[bad]}, where the one before ends; binarize the text again"
                )
            num_tokens = int(ends[-1])
        return num_tokens

    def _check_bin_size(self, num_tokens: int) -> None:
        path = bin_path(self.prefix)
        found = _file_size(path)
        expected = num_tokens * self.dtype.itemsize
        if found != expected:
            raise DataError(
                f"{path}: has {found:,} bytes, expected {expected:,} for the {num_tokens:,} tokens of "
                f"{idx_path(self.prefix).name}; the pair is cut short or not from one run"
            )


def _read_header(path: Path) -> tuple[np.dtype[Any], int]:
    """The tokens' type and the number of sentences, once the file's size fits them."""
    size = _file_size(path)
    with open(path, "rb") as stream:
        header = stream.read(HEADER.size)
    if header[: len(MAGIC)] != MAGIC:
        raise DataError(f"{path}: begins with {header[: len(MAGIC)]!r}, expected {MAGIC!r} (--dataset-impl mmap)")
    if len(header) < HEADER.size:
        raise DataError(f"{path}: has {size} bytes, expected {HEADER.size} or more; the file is cut short")
    _, version, code, num_sentences = HEADER.unpack(header)
    if version != VERSION:
        raise DataError(f"{path}: is of version {version}, expected {VERSION}")
    if code in _FLOAT_CODES:
        raise DataError(f"{path}: holds floating-point numbers (code {code}), expected integer tokens")
    if code not in _DTYPES:
        raise DataError(f"{path}: unknown type code {code}, expected one of {', '.join(map(str, _DTYPES))}")
    expected = HEADER.size + 12 * num_sentences
    if size != expected:
        raise DataError(
            f"{path}: has {size:,} bytes, expected {expected:,} for {num_sentences:,} sentences; "
            "the file is cut short or damaged"
        )
    return _DTYPES[code], num_sentences


def _file_size(path: Path) -> int:
    if not path.is_file():
        raise DataError(f"{path}: no such file; a split is a .bin and an .idx together")
    return path.stat().st_size


def _map(path: Path, dtype: np.dtype[Any], offset: int, count: int) -> NDArray[Any]:
    if count == 0:  # nothing can be mapped in an empty file
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,))
