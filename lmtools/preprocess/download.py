"""Bring an artifact of the table to a folder: look what is there, fetch what is not, unpack it, write its manifest.

    DEST/megatron_11b.tar.gz.part     while it is being fetched (see transfer.py)
    DEST/megatron_11b.tar.gz          when it is whole and checked
    DEST/megatron_11b/                when it is unpacked (see archives.py); the archive is then removed
    DEST/megatron_11b.meta.json       which bytes it consists of, so that the next call can tell that all is there

Something that is there already is used when its bytes are the right ones and never overwritten when they are not.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from lmtools.artifacts import FileRecord, Manifest, read_manifest, write_manifest
from lmtools.errors import ConfigError, DownloadError
from lmtools.files import atomic_directory, disk_errors, made_folder, require_free_space, sha256_file
from lmtools.preprocess.archives import unpack, unpacked_size
from lmtools.preprocess.partfile import PartFile
from lmtools.preprocess.sources import Artifact, RemoteFile
from lmtools.preprocess.transfer import ProgressBar, RetryPolicy, fetch

TOOL = "lmtools download"

Get = Callable[[RemoteFile, PartFile], str]
"""Fills a part until it is the whole file, and says which URL gave it."""


@dataclass(frozen=True)
class Outcome:
    """What `download` did.

    Attributes:
        name: the artifact.
        status: `downloaded`, or `present` when nothing had to be fetched.
        paths: the folder that was unpacked, or the plain files.
        urls: which mirrors gave what was fetched.
    """

    name: str
    status: Literal["downloaded", "present"]
    paths: tuple[Path, ...]
    urls: tuple[str, ...]


def download(
    artifact: Artifact,
    dest: Path,
    *,
    policy: RetryPolicy,
    bar: ProgressBar,
    report: Callable[[str], None],
    offline: bool = False,
    keep_archive: bool = False,
) -> Outcome:
    """Make sure that an artifact is complete in a folder.

    Args:
        artifact: what to bring.
        dest: where to; made if it is not there.
        policy: how long to insist on a mirror.
        bar: opens a progress bar.
        report: told, a line at a time, what goes on.
        offline: fetch nothing, use what is there.
        keep_archive: leave an archive beside what was unpacked from it. One that was there before always stays.

    Returns:
        What was done, and where it lies now.

    Raises:
        DownloadError: no mirror gave it, the archive is broken, something else lies in its place, or, offline,
            something is missing.
        LmtoolsError: the disk is full or not writable.
    """
    if (outcome := _find(artifact, dest, report)) is not None:  # without the lock: the folder may be read-only
        return outcome
    get = None if offline else partial(fetch, policy=policy, bar=bar, report=report)
    with _folder(dest), _one_at_a_time(dest / f".{artifact.name}.lock", report):
        if (outcome := _find(artifact, dest, report)) is not None:
            return outcome
        if artifact.archive is not None:
            return _bring_archive(artifact, artifact.archive, dest, get, bar, report, keep_archive)
        return _bring_files(artifact, dest, get)


def from_mirror(artifacts: Sequence[Artifact], url: str) -> list[Artifact]:
    """The same artifacts, fetched from one place of your own.

    Args:
        artifacts: what is to be fetched.
        url: the address of the only file, or, ending in `/`, of a folder with all files under their own names.

    Raises:
        ConfigError: not an http address, or the address of one file for several.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url}: expected an address that starts with http:// or https://")
    num_files = sum(len(artifact.files) for artifact in artifacts)
    if not url.endswith("/") and num_files > 1:
        names = ", ".join(file.name for artifact in artifacts for file in artifact.files)
        raise ConfigError(
            f"--url {url}: {num_files} files are wanted ({names}); give a folder that holds them, with / at its end"
        )
    return [_from_mirror(artifact, url) for artifact in artifacts]


def _from_mirror(artifact: Artifact, url: str) -> Artifact:
    files = tuple(replace(file, urls=(url + file.name if url.endswith("/") else url,)) for file in artifact.files)
    # Without a published hash the mirror may hold something smaller, which the disk has room for.
    is_same = all(file.sha256 is not None for file in files)
    return replace(artifact, files=files, unpacked_num_bytes=artifact.unpacked_num_bytes if is_same else 0)


def _find(artifact: Artifact, dest: Path, report: Callable[[str], None]) -> Outcome | None:
    """The artifact if all of it is there; an error if something else lies in its place."""
    folder = dest / artifact.folder
    if artifact.archive is not None:
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            return None
        report(f"{folder}: is there already; comparing it with its manifest")
        _require_own(folder, artifact)
        return Outcome(artifact.name, "present", (folder,), ())
    paths = [folder / file.name for file in artifact.files]
    for file, path in zip(artifact.files, paths, strict=True):
        if not path.exists():
            return None
        _require_file(path, file, artifact)
    return Outcome(artifact.name, "present", tuple(paths), ())


def _bring_archive(
    artifact: Artifact,
    file: RemoteFile,
    dest: Path,
    get: Get | None,
    bar: ProgressBar,
    report: Callable[[str], None],
    keep_archive: bool,
) -> Outcome:
    folder, archive = dest / artifact.folder, dest / file.name
    urls: tuple[str, ...] = ()
    if archive.exists():
        report(f"{archive}: is there already")
        _require_right(archive, file)
    elif get is None:
        raise DownloadError(f"{artifact.name}: offline, and neither {folder}/ nor {archive} is there")
    else:
        part = PartFile(archive)
        needed = (file.num_bytes or 0) + artifact.unpacked_num_bytes - part.num_bytes()
        require_free_space(dest, needed, artifact.name)
        urls = (get(file, part),)
        part.finish()
    source = FileRecord.of(archive)
    with bar(f"unpacking {file.name}", total=unpacked_size(archive)) as advance, atomic_directory(folder) as temporary:
        outputs = unpack(archive, temporary, folder=artifact.folder, progress=advance)
        _write_manifest(folder, artifact, urls, [source], outputs)  # first, so that the folder is never without
    if urls and not keep_archive:
        archive.unlink()
    return Outcome(artifact.name, "downloaded" if urls else "present", (folder,), urls)


def _bring_files(artifact: Artifact, dest: Path, get: Get | None) -> Outcome:
    folder = dest / artifact.folder
    missing = []
    for file in artifact.files:
        if (folder / file.name).exists():
            _require_file(folder / file.name, file, artifact)
        else:
            missing.append(file)
    if get is None:
        names = ", ".join(str(folder / file.name) for file in missing)
        raise DownloadError(f"{artifact.name}: offline, and not there: {names}")
    with _folder(folder):
        parts = [PartFile(folder / file.name) for file in missing]
        needed = sum((file.num_bytes or 0) - part.num_bytes() for file, part in zip(missing, parts, strict=True))
        require_free_space(folder, needed, artifact.name)
        urls = []
        for file, part in zip(missing, parts, strict=True):
            urls.append(get(file, part))
            output = replace(FileRecord.of(part.path), path=file.name)
            _write_manifest(folder / file.name, artifact, urls[-1:], [], [output])
            part.finish()
    return Outcome(artifact.name, "downloaded", tuple(folder / file.name for file in artifact.files), tuple(urls))


def _write_manifest(
    path: Path, artifact: Artifact, urls: Sequence[str], inputs: Sequence[FileRecord], outputs: Sequence[FileRecord]
) -> None:
    counts = {"files": len(outputs), "num_bytes": sum(record.num_bytes for record in outputs)}
    options = {"artifact": artifact.name, "urls": list(urls)}
    write_manifest(path, Manifest(tool=TOOL, options=options, inputs=inputs, outputs=outputs, counts=counts))


def _require_file(path: Path, file: RemoteFile, artifact: Artifact) -> None:
    if file.sha256 is None:
        _require_own(path, artifact)
    else:
        _require_right(path, file)


def _require_right(path: Path, file: RemoteFile) -> None:
    """What lies where a download would go must have the published bytes, as far as these are known."""
    if file.sha256 is not None and (found := sha256_file(path)) != file.sha256:
        raise DownloadError(
            f"{path}: is there already with another content (sha256 {found}, expected {file.sha256}); "
            "remove it or choose another --dest"
        )


def _require_own(path: Path, artifact: Artifact) -> None:
    """What lies where a download would go must be what an earlier download recorded in its manifest."""
    manifest = read_manifest(path)
    advice = "use it as it is, or remove it, or choose another --dest"
    if manifest is None or manifest.tool != TOOL or manifest.options.get("artifact") != artifact.name:
        raise DownloadError(f"{path}: is there already, but no manifest of {TOOL!r} says what it should be; {advice}")
    folder = path if path.is_dir() else path.parent
    for record in manifest.outputs:
        output = folder / record.path
        if not output.is_file() or FileRecord.of(output) != replace(record, path=output.name):
            raise DownloadError(f"{output}: missing or changed since it was downloaded; {advice}")


@contextmanager
def _folder(path: Path) -> Iterator[None]:
    if path.exists() and not path.is_dir():
        raise DownloadError(f"{path}: is a file, expected a folder; choose another --dest")
    with made_folder(path):
        yield


@contextmanager
def _one_at_a_time(path: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock that a killed process leaves behind for nobody; a second process waits for the first."""
    while True:
        with disk_errors(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(descriptor, path, report)
            if _is_same_file(descriptor, path):
                break
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its owner removed it while we waited
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(descriptor: int, path: Path, report: Callable[[str], None]) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        report(f"{path.parent}: another process is downloading the same; waiting for it")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        # Some cluster file systems have no locks; there it is up to the user to start one download at a time.
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP):
            raise


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
