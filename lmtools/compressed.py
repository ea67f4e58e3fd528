"""Compressed files, read to the end or refused: .gz, .bz2, .xz and .zst, told by the name's suffix."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol, cast

from lmtools.errors import DataError

COMPRESSED_SUFFIXES = frozenset({".gz", ".bz2", ".xz", ".zst"})

_COPY_BYTES = 1 << 20
_COMPRESSED_BYTES = 1 << 10  # zstandard gives all that these hold at once, which may be some thousand times as much


def open_by_suffix(path: str | Path) -> IO[bytes]:
    """Open a file for reading its decompressed bytes.

    Reading raises DataError where a compressed stream is broken or cut short.

    Raises:
        OSError: as from `open`.
    """
    match Path(path).suffix:
        case ".gz":
            return _decompressed(path, cast(_Reader, gzip.open(path, "rb")))
        case ".bz2":
            return _decompressed(path, _FrameReader(open(path, "rb"), bz2.BZ2Decompressor, OSError, _COPY_BYTES))
        case ".xz":
            return _decompressed(
                path, _FrameReader(open(path, "rb"), lzma.LZMADecompressor, lzma.LZMAError, _COPY_BYTES)
            )
        case ".zst":
            import zstandard

            new_frame = zstandard.ZstdDecompressor().decompressobj
            return _decompressed(path, _FrameReader(open(path, "rb"), new_frame, zstandard.ZstdError))
        case _:
            return open(path, "rb")


class _Reader(Protocol):
    def readinto(self, buffer: Any, /) -> int | None: ...
    def close(self) -> None: ...


def _decompressed(path: str | Path, reader: _Reader) -> IO[bytes]:
    return io.BufferedReader(_CheckedReader(path, reader), buffer_size=_COPY_BYTES)


class _CheckedReader(io.RawIOBase):
    """Says which file it is, where a decompressor finds its stream broken."""

    def __init__(self, path: str | Path, reader: _Reader) -> None:
        self._path = path
        self._reader = reader

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        try:
            return self._reader.readinto(buffer)
        except (EOFError, lzma.LZMAError, zlib.error) as error:
            raise self._broken(error) from error
        except OSError as error:
            if error.errno is not None:  # a broken gzip or bz2 stream is an OSError without a number
                raise
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> DataError:
        return DataError(f"{self._path}: broken compressed stream ({error}); fetch or compress the file again")

    def close(self) -> None:
        self._reader.close()
        super().close()


class _FrameReader(io.RawIOBase):
    """Reads every frame (stream) of a .bz2, .xz or .zst file, and refuses one that is cut short or something else.

    Python's own readers take what is no frame after the first one for padding, and end: of a file in many frames, as
    pbzip2 writes it, all that follows a damaged one would be lost. Only zero bytes are padding here.

    Args:
        compressed: the file.
        new_frame: makes what decompresses one frame.
        error: what that raises where the frame is broken.
        max_length: how many bytes it is asked for at a time; None where it gives all that there is.
    """

    def __init__(
        self,
        compressed: BinaryIO,
        new_frame: Callable[[], Any],
        error: type[Exception],
        max_length: int | None = None,
    ) -> None:
        self._file = compressed
        self._new_frame = new_frame
        self._error = error
        self._frame: Any = None
        self._limit = () if max_length is None else (max_length,)
        self._compressed = b""
        self._plain = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer)
        while not self._plain:
            if self._frame is None and not self._begin_frame():
                return 0
            if not self._compressed and getattr(self._frame, "needs_input", True):
                self._compressed = self._file.read(_COMPRESSED_BYTES)
                if not self._compressed:
                    raise EOFError("the last frame is cut short")
            self._plain = memoryview(self._decompress())
        count = min(len(target), len(self._plain))
        target[:count] = self._plain[:count]
        self._plain = self._plain[count:]
        return count

    def _begin_frame(self) -> bool:
        """Go to the next frame; False if there is none."""
        self._compressed = self._compressed.lstrip(b"\0")
        while not self._compressed:
            more = self._file.read(_COMPRESSED_BYTES)
            if not more:
                return False
            self._compressed = more.lstrip(b"\0")
        self._frame = self._new_frame()
        return True

    def _decompress(self) -> bytes:
        try:
            plain: bytes = self._frame.decompress(self._compressed, *self._limit)
        except self._error as error:
            raise EOFError(str(error)) from error
        self._compressed = b""
        if self._frame.eof:
            self._compressed = self._frame.unused_data
            self._frame = None
        return plain

    def close(self) -> None:
        self._file.close()
        super().close()
