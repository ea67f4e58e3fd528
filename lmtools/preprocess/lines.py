r"""Text as ranges of whole lines, which workers turn into parts of the output, joined in order.

    with scratch_folder(output) as scratch, plain_file(input, scratch) as plain:
        ranges = cut_at_newlines(plain, 1 << 20)
        parts = run_ordered(task, ranges, workers=2)          # each worker reads its range and writes its part
        with atomic_write(output) as stream:
            for part in parts:
                join_parts([part], stream)                    # the kernel copies; this process moves no text

Text is cut at the byte `\n` alone, never at `\r`, U+2028 or U+0085, and a task sees nothing but its own range: the
output does not depend on the number of workers, and the same tasks run on any `concurrent.futures` executor.
"""

from __future__ import annotations

import errno
import itertools
import os
import select
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lmtools.compressed import COMPRESSED_SUFFIXES
from lmtools.errors import DataError
from lmtools.files import disk_errors, is_device_or_pipe, open_binary

_READ_BYTES = 1 << 20
_LOOK_UP_MS = 500
_REMOVALS = 100
# Plain writing says what is wrong with a stream that is not open for it, or does the work.
_NO_SENDFILE = (errno.EBADF, errno.EINVAL, errno.ENOSYS, errno.ENOTSOCK, errno.ENOTSUP)


@dataclass(frozen=True)
class ByteRange:
    """Whole lines of a plain file: the bytes from `start` up to `end`.

    Attributes:
        path: the file to read.
        start: offset of the first byte; a line begins there.
        end: offset after the last byte; a line ends there, or the file.
        source: the name for messages: what the user gave, where `path` is its decompressed copy.
    """

    path: Path
    start: int
    end: int
    source: str

    @property
    def num_bytes(self) -> int:
        """Size of the range."""
        return self.end - self.start

    def first_line_number(self) -> int:
        """Number, from 1, of the range's first line in the file: reads all that lies before it (for error messages)."""
        return 1 + sum(chunk.count(b"\n") for chunk in _chunks(self.path, 0, self.start))


def cut_at_newlines(path: Path, range_bytes: int, *, source: str = "") -> list[ByteRange]:
    """Cut a file into ranges of whole lines, reading only around the cuts.

    Args:
        path: a plain file.
        range_bytes: size of a range, at least; a line that is longer stays in one piece.
        source: name for messages, if not the path.

    Returns:
        Ranges that cover the file in order; none for an empty file.
    """
    size = path.stat().st_size
    cuts = [0]
    with open(path, "rb", buffering=0) as stream:
        while cuts[-1] + range_bytes < size:
            cuts.append(_end_of_line(stream.fileno(), cuts[-1] + range_bytes - 1))
    return _between(cuts, path, source)


def _end_of_line(descriptor: int, offset: int) -> int:
    """The offset after the first newline at or after `offset`, or the file's size."""
    while chunk := os.pread(descriptor, 1 << 14, offset):
        index = chunk.find(b"\n")
        if index >= 0:
            return offset + index + 1
        offset += len(chunk)
    return offset


def cut_every_lines(path: Path, lines_per_range: int, *, source: str = "") -> tuple[list[ByteRange], int]:
    r"""Cut a file after every so many lines, so that several files are cut at the same lines; reads it all.

    Args:
        path: a plain file.
        lines_per_range: lines in each range but the last.
        source: name for messages, if not the path.

    Returns:
        Ranges that cover the file in order, and the number of its lines (a last one without `\n` included).
    """
    cuts = [0]
    num_newlines = offset = 0
    last_line_ends = True
    for chunk in _chunks(path, 0, path.stat().st_size):
        position = 0
        missing = lines_per_range - num_newlines % lines_per_range  # newlines until the next cut
        while (found := chunk.count(b"\n", position)) >= missing:
            for _ in range(missing):
                position = chunk.index(b"\n", position) + 1
            num_newlines += missing
            cuts.append(offset + position)
            missing = lines_per_range
        num_newlines += found
        offset += len(chunk)
        last_line_ends = chunk.endswith(b"\n")
    return _between(cuts, path, source), num_newlines + (not last_line_ends)


def _between(cuts: list[int], path: Path, source: str) -> list[ByteRange]:
    """The ranges between the cuts and up to the end of the file; a range without bytes is left out."""
    bounds = itertools.pairwise([*cuts, path.stat().st_size])
    return [ByteRange(path, start, end, source or str(path)) for start, end in bounds if start < end]


def read_lines(byte_range: ByteRange) -> Iterator[bytes]:
    r"""The lines of a range, each with its `\n` (the file's last line may have none)."""
    with open(byte_range.path, "rb", buffering=_READ_BYTES) as stream:
        stream.seek(byte_range.start)
        remaining = byte_range.num_bytes
        while remaining > 0:
            line = stream.readline()
            if not line:
                return
            remaining -= len(line)
            yield line


def read_text_lines(byte_range: ByteRange) -> Iterator[str]:
    """The lines of a range as text, each with its line end.

    Raises:
        DataError: a line is not UTF-8 (which lone surrogates are not).
    """
    for number, line in enumerate(read_lines(byte_range)):
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{byte_range.source}:{byte_range.first_line_number() + number}: not UTF-8 "
                f"(byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line); convert the text first"
            ) from error


def _chunks(path: Path, start: int, end: int) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as stream:
        stream.seek(start)
        while start < end and (chunk := stream.read(min(_READ_BYTES, end - start))):
            start += len(chunk)
            yield chunk


@contextmanager
def scratch_folder(output: str | Path) -> Iterator[Path]:
    """A hidden folder for parts beside `output`, on its disk; removed however the block ends.

    Raises:
        LmtoolsError: the output's folder does not exist or may not be written.
    """
    with disk_errors(output):
        beside = None if is_device_or_pipe(output) else os.path.dirname(os.path.realpath(output))
        folder = Path(tempfile.mkdtemp(prefix=f".{Path(output).name[:40]}.", suffix=".tmp", dir=beside))
    try:
        yield folder
    finally:
        # Renamed first, so that a task that still runs on another machine makes no new file in it.
        gone = folder.with_name(f"{folder.name}.gone")
        with suppress(OSError):
            folder.rename(gone)
        for name in (gone, folder):
            _remove_folder(name)


def _remove_folder(folder: Path) -> None:
    """Remove a folder with all that is in it, also what is made in it meanwhile; leave it if it may not be removed."""
    # Whoever had found the folder before it was renamed may still make a file in it, after its files were listed; on a
    # network's disk for seconds. The folder that is not empty then is listed again.
    for _ in range(_REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.lexists(folder):
            return


@contextmanager
def write_part(part: Path, *, buffering: int = -1) -> Iterator[BinaryIO]:
    """Write a part so that it is complete or absent, though its task be run twice, on two machines at once."""
    attempt = part.with_name(f"{part.name}.{uuid.uuid4().hex}")
    with open(attempt, "wb", buffering=buffering) as stream:
        yield stream
    attempt.replace(part)


@contextmanager
def plain_file(path: str | Path, scratch: Path) -> Iterator[Path]:
    """A regular, uncompressed file with the content of `path`, which workers can read at any offset.

    Yields:
        The file itself when it is one, else a decompressed copy in `scratch` (of standard input, a pipe, or a
        `.gz`, `.bz2`, `.xz` or `.zst` file), which goes when the block ends.

    Raises:
        DataError: the input cannot be opened or is broken.
        LmtoolsError: the copy does not fit on the disk.
    """
    if not is_device_or_pipe(path) and Path(path).suffix not in COMPRESSED_SUFFIXES:
        with open_binary(path):  # says now, not in a worker, that it may not be read
            pass
        yield Path(path)
        return
    descriptor, copy_name = tempfile.mkstemp(prefix="plain.", dir=scratch)
    copy = Path(copy_name)
    try:
        with disk_errors(copy), os.fdopen(descriptor, "wb") as target, open_binary(path) as source:
            copy_to_the_end = shutil.copyfileobj if Path(path).suffix in COMPRESSED_SUFFIXES else _copy_as_it_comes
            copy_to_the_end(source, target, _READ_BYTES)
        yield copy
    finally:
        copy.unlink(missing_ok=True)


def _copy_as_it_comes(source: BinaryIO, target: BinaryIO, most_bytes: int) -> None:
    """Copy what a pipe gives; a signal ends that soon, whenever it comes.

    Python hears of one between two calls: one that comes just before the waiting for a pipe, or with its first bytes,
    would wait for the rest of the text.
    """
    readable = select.poll()
    readable.register(source, select.POLLIN)
    while True:
        while not readable.poll(_LOOK_UP_MS):
            pass
        if not (chunk := os.read(source.fileno(), most_bytes)):
            return
        target.write(chunk)


class Unchanged:
    """Checks that texts are at the end what they were at the start: nothing was lost of one still being written.

    Args:
        texts: plain files, by the names for messages.
    """

    def __init__(self, texts: Iterable[tuple[str, Path]]) -> None:
        self._before = [(source, path, _state(path)) for source, path in texts]

    def require(self) -> None:
        """Call this when all is read.

        Raises:
            DataError: names one that has changed.
        """
        for source, path, before in self._before:
            if _state(path) != before:
                raise DataError(f"{source}: was changed while it was read; run again when it is written to the end")


def _state(path: Path) -> tuple[int, ...] | None:
    """What changes with a file's content; None where there is no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def join_parts(parts: Iterable[Path], output: BinaryIO) -> None:
    """Append part files to a stream in order, copied by the kernel where it can; each part is deleted once copied."""
    output.flush()
    for part in parts:
        with open(part, "rb", buffering=0) as source:
            _append(source.fileno(), output, os.fstat(source.fileno()).st_size)
        part.unlink()


def _append(source: int, output: BinaryIO, num_bytes: int) -> None:
    copied = 0
    try:
        while copied < num_bytes:
            # From file to file and from file to pipe; on Linux only.
            sent = os.sendfile(output.fileno(), source, copied, num_bytes - copied)
            if sent == 0:
                break
            copied += sent
    except (AttributeError, OSError) as error:  # io.UnsupportedOperation, for a stream in memory, is an OSError
        if getattr(error, "errno", None) not in (None, *_NO_SENDFILE):
            raise
    while chunk := os.pread(source, _READ_BYTES, copied):
        output.write(chunk)
        copied += len(chunk)
