"""Unpack a zip or tar.gz that a stranger made: regular files below one folder, or nothing at all.

Refused, before anything of it is written: absolute names, `..`, backslashes and drive letters, links of any kind,
devices, pipes, two members of one name, encrypted members, and a member that holds more than it declares.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, cast

from lmtools.artifacts import FileRecord
from lmtools.errors import DownloadError
from lmtools.files import require_free_space

_CHUNK_BYTES = 1 << 20
_MAX_NAME_BYTES = 255  # what file systems allow for one component
_MAX_PATH_BYTES = 1024
_DRIVE = re.compile(r"^[A-Za-z]:")
_BROKEN = (
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    NotImplementedError,  # a compression method that zipfile does not know
    UnicodeDecodeError,
)


@dataclass(frozen=True)
class _Member:
    """One entry of an archive; `stream` is None for a folder and is read before the next entry is asked for."""

    name: str
    num_bytes: int
    stream: IO[bytes] | None


def unpack(archive: Path, into: Path, *, folder: str, progress: Callable[[int], None]) -> list[FileRecord]:
    """Unpack what lies below one top folder of an archive.

    Args:
        archive: a `.zip` or `.tar.gz` file.
        into: an empty folder, to be thrown away if this raises (see `files.atomic_directory`).
        folder: the archive's top folder; what lies in it comes to lie in `into`. Members beside it must be as safe
            as the others but are left out.
        progress: called with the number of bytes that were just written.

    Returns:
        A record of each file that was written, in order of name, its `path` relative to `into`.

    Raises:
        DownloadError: the archive is broken or not safe, or has no such folder.
        LmtoolsError: the disk is full.
    """
    records: dict[str, FileRecord] = {}
    beside: set[str] = set()
    total = unpacked_size(archive)
    if total is not None:
        require_free_space(into, total, f"unpacking {archive.name}")
    with _broken_archive(archive):
        for member in _members(archive):
            top, *parts = _safe_parts(archive, member.name) or [""]
            if top != folder:
                beside.add(top)
                continue
            path = into.joinpath(*parts)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                if member.stream is None:
                    path.mkdir(exist_ok=True)
                    continue
                if total is None:  # a tar tells its sizes one by one
                    require_free_space(into, member.num_bytes, f"unpacking {archive.name}")
                sha256 = _copy(archive, member, path, progress)
            except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
                raise _refused(archive, member.name, "its name is taken by another member") from error
            name = "/".join(parts)
            records[name] = FileRecord(name, member.num_bytes, sha256)
    if not records:
        found = ", ".join(sorted(beside - {""})[:5]) or "nothing"
        raise DownloadError(f"{archive}: expected files in a folder {folder}/, found {found}; nothing was unpacked")
    return [records[name] for name in sorted(records)]


def unpacked_size(archive: Path) -> int | None:
    """The bytes that come out of a zip by its own account; None for a tar.gz, which has no table of contents."""
    if not archive.name.endswith(".zip"):
        return None
    with _broken_archive(archive), zipfile.ZipFile(archive) as stored:
        return sum(info.file_size for info in stored.infolist())


def _members(archive: Path) -> Iterator[_Member]:
    return _zip_members(archive) if archive.name.endswith(".zip") else _tar_members(archive)


def _zip_members(archive: Path) -> Iterator[_Member]:
    with zipfile.ZipFile(archive) as stored:
        for info in stored.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)  # 0 when the archive was not made on Unix
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _refused(archive, info.orig_filename, "a link or a device")
            if info.flag_bits & 0x1:
                raise _refused(archive, info.orig_filename, "encrypted")
            # The name as it is stored: `filename` has lost what follows a NUL.
            if info.is_dir():
                yield _Member(info.orig_filename, 0, None)
            else:
                with stored.open(info) as stream:
                    yield _Member(info.orig_filename, info.file_size, stream)


def _tar_members(archive: Path) -> Iterator[_Member]:
    with gzip.open(archive) as plain:
        with tarfile.open(fileobj=plain, mode="r|") as stored:
            for info in stored:
                if info.isdir():
                    yield _Member(info.name, 0, None)
                elif info.isreg() and info.size >= 0:
                    yield _Member(info.name, info.size, cast("IO[bytes]", stored.extractfile(info)))
                else:
                    raise _refused(archive, info.name, "a link or a device")
        while plain.read(_CHUNK_BYTES):  # to the end, where gzip compares its checksum
            pass


def _safe_parts(archive: Path, name: str) -> list[str]:
    if name.startswith("/") or _DRIVE.match(name):
        raise _refused(archive, name, "its name is absolute")
    if "\\" in name or any(ord(character) < 32 for character in name):
        raise _refused(archive, name, "a backslash or a control character in its name")
    parts = list(PurePosixPath(name).parts)  # without `.`
    if ".." in parts:
        raise _refused(archive, name, "its name leaves the folder")
    lengths = [len(part.encode("utf-8", "surrogateescape")) for part in parts]
    if any(length > _MAX_NAME_BYTES for length in lengths) or sum(lengths) + len(lengths) > _MAX_PATH_BYTES:
        raise _refused(archive, name[:40] + "...", "its name is too long")
    return parts


def _copy(archive: Path, member: _Member, path: Path, progress: Callable[[int], None]) -> str:
    """Write a member's bytes to a new file; returns their sha256."""
    assert member.stream is not None
    digest = hashlib.sha256()
    left = member.num_bytes
    with open(path, "xb") as target:
        while chunk := member.stream.read(_CHUNK_BYTES):
            left -= len(chunk)
            if left < 0:
                raise _refused(
                    archive, member.name, f"it holds more than the {member.num_bytes:,} bytes that it declares"
                )
            target.write(chunk)
            digest.update(chunk)
            progress(len(chunk))
    if left:
        raise DownloadError(
            f"{archive}: {member.name} ends {left:,} bytes early of {member.num_bytes:,}; nothing was unpacked"
        )
    return digest.hexdigest()


def _refused(archive: Path, name: str, what: str) -> DownloadError:
    return DownloadError(
        f"{archive}: member {name!r} refused ({what}): only plain files inside one folder are unpacked; nothing was"
    )


@contextmanager
def _broken_archive(archive: Path) -> Iterator[None]:
    try:
        yield
    except _BROKEN as error:
        raise DownloadError(f"{archive}: broken archive ({error}); remove it and download it again") from error
    except OSError as error:
        if error.errno is not None:  # a broken gzip or bz2 stream is an OSError without a number
            raise
        raise DownloadError(f"{archive}: broken archive ({error}); remove it and download it again") from error
