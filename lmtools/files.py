"""Files that are complete or absent: atomic writes, reading, hashes, disk space.

Every output of lmtools goes through `atomic_write` or `atomic_directory`: the bytes are written under a temporary
name in the same folder, flushed to the disk, and renamed. A process that is killed leaves the old file or the
new one, never half of either.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO, cast

from lmtools.compressed import open_by_suffix
from lmtools.errors import DataError, LmtoolsError

STDIO = "-"
"""The name that means standard input or standard output."""

NOTES_VARIABLE = "LMTOOLS_TEMPORARIES"
"""A folder where a process that may be ended without a word notes its temporary files (`remove_noted_temporaries`)."""

_COPY_BYTES = 1 << 20

_REFUSALS = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EIO, errno.ESTALE}
)


@contextmanager
def open_binary(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file for reading bytes, decompressed by its suffix; `-` is standard input.

    Args:
        path: a plain, `.gz`, `.bz2`, `.xz` or `.zst` file, or `-`.

    Yields:
        A binary stream of the decompressed content. Reading from it raises DataError where a compressed stream is
        broken or cut short.

    Raises:
        DataError: the file does not exist, is a folder or cannot be read.
    """
    try:
        stream = _standard_input() if str(path) == STDIO else open_by_suffix(path)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except IsADirectoryError as error:
        raise DataError(f"{path}: is a folder, expected a file") from error
    except PermissionError as error:
        raise DataError(f"{path}: may not be read (permission denied)") from error
    except OSError as error:  # a name that is too long, links in a circle, a file where a folder should be
        raise DataError(f"{path}: cannot be opened ({error.strerror})") from error
    with stream:
        yield cast(BinaryIO, stream)


def _standard_input() -> IO[bytes]:
    if sys.stdin is None:
        raise DataError("standard input is closed; name a file")
    # A duplicate, so that closing the stream leaves the process its standard input.
    return os.fdopen(os.dup(sys.stdin.fileno()), "rb")


def is_device_or_pipe(path: str | Path) -> bool:
    """Whether a name stands for something that is neither a regular file nor a folder, or for standard input/output.

    Such a thing cannot be read twice, replaced, or have a file beside it. `/dev/stdout` and its like count whatever
    they lead to: a file behind one is not only ours.
    """
    if str(path) == STDIO or _open_descriptor(path) is not None:
        return True
    # os.path's functions take a name that cannot be looked up (too long) for one that is not there; Path's raise.
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _open_descriptor(path: str | Path) -> int | None:
    """The descriptor of this process that a name stands for: `/dev/stdout`, `/dev/fd/3`, `/proc/self/fd/3`."""
    name = os.fspath(path)
    for _ in range(40):  # as many links as the kernel follows
        folder, last = os.path.split(name)
        if last.isdecimal() and re.fullmatch(rf"/proc/{os.getpid()}(/task/\d+)?/fd", os.path.realpath(folder)):
            return int(last) if os.path.exists(name) else None
        if not os.path.islink(name):
            return None
        name = os.path.join(folder, os.readlink(name))
    return None


@contextmanager
def atomic_write(path: str | Path) -> Iterator[BinaryIO]:
    """Write a file so that it is complete or absent.

    Args:
        path: the target; `-` writes to standard output. A device or a pipe is written as it is, so is what is open
            already (`/dev/stdout`), and where a link is there, the file that it points to.

    Yields:
        A binary stream. When the block ends without an exception, its content replaces the target.

    Raises:
        LmtoolsError: the folder does not exist or may not be written, or the disk is full; the target is as it was.
    """
    if str(path) == STDIO:
        with disk_errors("standard output"):
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
        return
    with disk_errors(path):
        if (descriptor := _open_descriptor(path)) is not None:
            # Not opened anew, which would empty a file behind it, also where the shell has opened it to append.
            with os.fdopen(os.dup(descriptor), "wb") as stream:
                yield stream
            return
        if is_device_or_pipe(path):
            with open(path, "wb") as stream:
                yield stream
            return
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        # The name is cut, since the temporary one may not be too long where the target's own is not.
        with _temporary_name(target) as temporary:
            try:
                with open(temporary, "xb") as stream:
                    yield stream
                    stream.flush()
                    os.fsync(stream.fileno())
                temporary.replace(target)
                fsync_directory(target.parent)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise


def atomic_write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 text file so that it is complete or absent (see `atomic_write`)."""
    with atomic_write(path) as stream:
        stream.write(text.encode("utf-8"))


@contextmanager
def atomic_directory(path: str | Path) -> Iterator[Path]:
    """Fill a folder so that it is complete or absent.

    Args:
        path: the target folder, which must not exist or be empty; where a link is there, the folder that it points to.

    Yields:
        A temporary folder beside it. When the block ends without an exception it takes the target's name.

    Raises:
        LmtoolsError: the target has content or cannot be replaced, or the disk is full or not writable.
    """
    target = Path(os.path.realpath(path))
    if target.exists():
        if not target.is_dir() or any(target.iterdir()):
            raise LmtoolsError(f"{path}: exists already; choose another name or remove it")
        if target == Path.cwd() or target.is_mount():
            kind = "a mount point" if target.is_mount() else "the current folder"
            raise LmtoolsError(f"{path}: is {kind}, in whose place no other can be put; name a folder in it")
    with disk_errors(path), made_folder(target.parent), _temporary_name(target) as temporary:
        try:
            temporary.mkdir()
            yield temporary
            for name in temporary.rglob("*"):
                if name.is_file():
                    fsync_file(name)
                elif name.is_dir():
                    fsync_directory(name)
            fsync_directory(temporary)
            temporary.replace(target)
            fsync_directory(target.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


@contextmanager
def made_folder(path: str | Path) -> Iterator[None]:
    """Make a folder that files are to be written into, if it is not there.

    After an exception what this has made is removed, parents included, where nothing lies in it.

    Args:
        path: the folder.

    Raises:
        LmtoolsError: it cannot be made.
    """
    absent = [folder for folder in (Path(path), *Path(path).parents) if not os.path.lexists(folder)]
    try:
        with disk_errors(path):
            Path(path).mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for folder in absent:
            with suppress(OSError):  # it is not empty, or was never made
                folder.rmdir()
        raise


@contextmanager
def _temporary_name(target: Path) -> Iterator[Path]:
    """A free name beside the target, noted for as long as something may lie there."""
    random = secrets.token_hex(8)
    # The name is cut, since the temporary one may not be too long where the target's own is not.
    temporary = target.with_name(f".{target.name[:40]}.{random}.tmp")
    if NOTES_VARIABLE not in os.environ:
        yield temporary
        return
    note = Path(os.environ[NOTES_VARIABLE], random)
    note.symlink_to(temporary.absolute())
    yield temporary
    note.unlink()  # after an exception too there is nothing any more: a note of nothing may stay


def remove_noted_temporaries(folder: str | Path) -> None:
    """Remove what processes with NOTES_VARIABLE set to this folder left half-written when they were ended.

    Args:
        folder: of notes, each a link to a temporary file or folder. No process that writes there may be left.
    """
    for note in Path(folder).iterdir():
        if note.is_symlink():
            temporary = note.readlink()
            if temporary.is_dir():
                shutil.rmtree(temporary, ignore_errors=True)
            else:
                temporary.unlink(missing_ok=True)
            note.unlink()


@contextmanager
def disk_errors(target: str | Path) -> Iterator[None]:
    """Turn the disk's own errors while writing `target` into one clear line.

    Raises:
        LmtoolsError: the disk or quota is full, the folder is missing, or it may not be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise LmtoolsError(f"{target}: no space left on the disk; free some space and run again") from error
        if error.errno == errno.EFBIG:
            raise LmtoolsError(f"{target}: larger than this file system or process may write") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise LmtoolsError(f"{target}: may not be written ({os.strerror(error.errno).lower()})") from error
        if error.errno in (errno.EEXIST, errno.ENOTDIR) and (file := _file_for_a_folder(Path(target))) is not None:
            raise LmtoolsError(f"{file}: is a file, expected a folder") from error
        if error.errno in (errno.ENOENT, errno.ENOTDIR) and not Path(target).parent.is_dir():
            raise LmtoolsError(f"{target}: the folder {Path(target).parent} does not exist") from error
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise LmtoolsError(f"{target}: exists already, written by another process in the meantime") from error
        if error.errno == errno.EISDIR:
            raise LmtoolsError(f"{target}: is a folder, expected a file name") from error
        if error.errno == errno.ENAMETOOLONG:
            raise LmtoolsError(f"{target}: the name is too long for the file system") from error
        raise


def _file_for_a_folder(path: Path) -> Path | None:
    """What of a path is there and no folder, though it was to be one."""
    return next((part for part in (*reversed(path.parents), path) if part.exists() and not part.is_dir()), None)


@contextmanager
def file_errors() -> Iterator[None]:
    """Turn what the file system refuses, of whatever file, into one clear line.

    Raises:
        LmtoolsError: a file or folder may not be read or written, has an impossible name, or the disk fails.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSALS or error.filename is None:
            raise
        raise LmtoolsError(f"{error.filename}: {os.strerror(error.errno).lower()}") from error


def fsync_file(path: str | Path) -> None:
    """Flush a file that another process or library wrote."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_directory(path: str | Path) -> None:
    """Flush a folder's entries, so that a rename in it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot
            raise
    finally:
        os.close(descriptor)


def sha256_file(path: str | Path) -> str:
    """The hex sha256 of a file's bytes as they are on the disk (not decompressed)."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(_COPY_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def require_free_space(folder: str | Path, num_bytes: int, purpose: str) -> None:
    """Stop before a long job that cannot end.

    Args:
        folder: an existing folder on the disk that will be written.
        num_bytes: how much the job will add.
        purpose: what it is for, as the message's first words.

    Raises:
        LmtoolsError: fewer than `num_bytes` are free.
    """
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise LmtoolsError(
            f"{purpose}: needs {num_bytes:,} bytes in {folder}, which has {free:,} free; "
            "free some space or choose another folder"
        )
