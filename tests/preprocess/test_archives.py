"""An archive from a stranger: what is good comes out byte for byte, what is not leaves nothing anywhere."""

from __future__ import annotations

import gzip
import io
import os
import stat
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtools.artifacts import FileRecord
from lmtools.errors import DownloadError, LmtoolsError
from lmtools.files import sha256_file
from lmtools.preprocess import archives
from lmtools.preprocess.archives import unpack, unpacked_size

Members = list[tuple[str, bytes | None]]
"""Names and contents; None for a folder."""

BINARY = bytes(range(256)) * 999
GOOD: Members = [("text/", None), ("text/a.txt", b"one\n"), ("text/sub/b.bin", BINARY), ("text/empty", b"")]


def make_zip(path: Path, members: Members) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of a second member of one name, and writes it
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name), content or b"")
    return path


def make_tar(path: Path, members: Members) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name.rstrip("/"))
            info.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
            info.size = len(content or b"")
            archive.addfile(info, io.BytesIO(content or b""))
    return path


def make(folder: Path, kind: str, members: Members) -> Path:
    return make_zip(folder / "text.zip", members) if kind == "zip" else make_tar(folder / "text.tar.gz", members)


def tar_of(folder: Path, **fields: object) -> Path:
    """A tar with one special member below the right folder."""
    info = tarfile.TarInfo(str(fields.pop("name", "text/special")))
    for key, value in fields.items():
        setattr(info, key, value)
    path = folder / "text.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.addfile(info)
    return path


@pytest.fixture
def yard(tmp_path: Path) -> Path:
    """A folder with nothing but the archive and the place to unpack it into."""
    (tmp_path / "yard" / "into").mkdir(parents=True)
    return tmp_path / "yard"


def unpack_here(archive: Path, progress: Callable[[int], None] = lambda _: None) -> list[FileRecord]:
    return unpack(archive, archive.parent / "into", folder="text", progress=progress)


def all_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_what_comes_out_is_what_went_in(yard: Path, kind: str) -> None:
    counts: list[int] = []
    records = unpack_here(make(yard, kind, GOOD), counts.append)
    files = {"a.txt": b"one\n", "empty": b"", "sub/b.bin": BINARY}
    assert {name: (yard / "into" / name).read_bytes() for name in files} == files
    assert all_files(yard / "into") == sorted(files)
    assert [(record.path, record.num_bytes, record.sha256) for record in records] == [
        (name, len(content), sha256_file(yard / "into" / name)) for name, content in sorted(files.items())
    ]
    assert sum(counts) == sum(len(content) for content in files.values())


def test_only_a_zip_says_its_size_beforehand(yard: Path) -> None:
    assert unpacked_size(make_zip(yard / "text.zip", GOOD)) == len(b"one\n" + BINARY)
    assert unpacked_size(make_tar(yard / "text.tar.gz", GOOD)) is None


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_dots_in_names_mean_nothing_and_members_beside_the_folder_are_left_out(yard: Path, kind: str) -> None:
    unpack_here(make(yard, kind, [("./text/./a.txt", b"one"), ("__MACOSX/._a.txt", b"junk"), ("README", b"hi")]))
    assert all_files(yard / "into") == ["a.txt"]


@pytest.mark.parametrize("kind", ["zip", "tar"])
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("../evil", "leaves the folder"),
        ("text/../../evil", "leaves the folder"),
        ("text/sub/../../../evil", "leaves the folder"),
        ("..", "leaves the folder"),
        ("/tmp/evil", "absolute"),
        ("//evil", "absolute"),
        ("C:/evil", "absolute"),
        ("c:evil", "absolute"),
        ("..\\evil", "backslash"),
        ("text\\..\\..\\evil", "backslash"),
        ("text/new\nline", "control character"),
        ("text/" + "x" * 256, "too long"),
        ("text/" + "d/" * 3000 + "x", "too long"),
    ],
)
def test_a_name_that_could_lead_elsewhere_is_refused(yard: Path, kind: str, name: str, why: str) -> None:
    archive = make(yard, kind, [("text/first", b"fine"), (name, b"evil")])
    with pytest.raises(DownloadError, match=why):
        unpack_here(archive)
    assert all_files(yard.parent) == ["yard/into/first", f"yard/{archive.name}"]


def test_a_name_that_hides_behind_a_nul_is_refused(yard: Path) -> None:
    path = make_zip(yard / "text.zip", [("text/aXevil", b"evil")])
    path.write_bytes(path.read_bytes().replace(b"text/aXevil", b"text/a\0evil"))
    with pytest.raises(DownloadError, match="control character"):
        unpack_here(path)


@pytest.mark.parametrize(
    "fields",
    [
        {"type": tarfile.SYMTYPE, "linkname": "../../etc/passwd"},
        {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
        {"type": tarfile.SYMTYPE, "linkname": "a.txt"},
        {"type": tarfile.LNKTYPE, "linkname": "../outside"},
        {"type": tarfile.LNKTYPE, "linkname": "text/a.txt"},
        {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3},
        {"type": tarfile.BLKTYPE},
        {"type": tarfile.FIFOTYPE},
        {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd", "name": "beside"},
    ],
)
def test_links_devices_and_pipes_in_a_tar_are_refused(yard: Path, fields: dict[str, object]) -> None:
    with pytest.raises(DownloadError, match="a link or a device"):
        unpack_here(tar_of(yard, **fields))
    assert all_files(yard) == ["text.tar.gz"]


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK])
def test_links_devices_and_pipes_in_a_zip_are_refused(yard: Path, kind: int) -> None:
    info = zipfile.ZipInfo("text/special")
    info.external_attr = (kind | 0o777) << 16
    with zipfile.ZipFile(yard / "text.zip", "w") as archive:
        archive.writestr(info, "../../etc/passwd")
    with pytest.raises(DownloadError, match="a link or a device"):
        unpack_here(yard / "text.zip")
    assert all_files(yard) == ["text.zip"]


def test_a_link_cannot_be_written_through(yard: Path) -> None:
    """The classic: a link to another folder first, then a file below the link's name."""
    with tarfile.open(yard / "text.tar.gz", "w:gz") as archive:
        link = tarfile.TarInfo("text/sub")
        link.type, link.linkname = tarfile.SYMTYPE, str(yard)
        archive.addfile(link)
        evil = tarfile.TarInfo("text/sub/evil")
        evil.size = 4
        archive.addfile(evil, io.BytesIO(b"evil"))
    with pytest.raises(DownloadError):
        unpack_here(yard / "text.tar.gz")
    assert all_files(yard) == ["text.tar.gz"]


@pytest.mark.parametrize("kind", ["zip", "tar"])
@pytest.mark.parametrize("second", ["text/a", "./text/a", "text/a/b", "text/a/"])
def test_two_members_of_one_name_are_refused(yard: Path, kind: str, second: str) -> None:
    archive = make(yard, kind, [("text/a", b"1"), (second, None if second.endswith("/") else b"2")])
    with pytest.raises(DownloadError, match="taken by another member"):
        unpack_here(archive)


def test_permissions_and_owners_are_not_taken_over(yard: Path) -> None:
    info = tarfile.TarInfo("text/tool")
    info.mode, info.uid = 0o6777, 0
    with tarfile.open(yard / "text.tar.gz", "w:gz") as archive:
        archive.addfile(info)
    unpack_here(yard / "text.tar.gz")
    mode = (yard / "into" / "tool").stat().st_mode
    assert not mode & (stat.S_ISUID | stat.S_ISGID | stat.S_IXUSR)


def test_a_zip_that_holds_more_than_it_declares_is_refused(yard: Path) -> None:
    content = b"x" * 5_000_000
    path = make_zip(yard / "text.zip", [("text/bomb", content)])
    declared = (10).to_bytes(4, "little")
    path.write_bytes(path.read_bytes().replace(len(content).to_bytes(4, "little"), declared))
    with pytest.raises(DownloadError, match="broken archive"):
        unpack_here(path)
    assert sum(file.stat().st_size for file in (yard / "into").rglob("*")) <= 10


def test_an_archive_larger_than_the_disk_is_refused_before_it_is_written(
    yard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, num_bytes: int, purpose: str) -> None:
        if num_bytes > 1000:
            raise LmtoolsError(f"{purpose}: no room for {num_bytes}")

    monkeypatch.setattr(archives, "require_free_space", full)
    for kind in ("zip", "tar"):
        with pytest.raises(LmtoolsError, match="no room"):
            unpack_here(make(yard, kind, [("text/big", b"x" * 2000)]))
        assert all_files(yard / "into") == []


def test_an_encrypted_zip_is_refused(yard: Path) -> None:
    path = make_zip(yard / "text.zip", [("text/a", b"secret")])
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1
    data[6] |= 1
    path.write_bytes(data)
    with pytest.raises(DownloadError, match="encrypted"):
        unpack_here(path)


@pytest.mark.parametrize("kind", ["zip", "tar"])
@pytest.mark.parametrize(("members", "found"), [([], "nothing"), ([("other/a", b"1"), ("b", b"2")], "b, other")])
def test_an_archive_without_the_folder_says_what_it_found(yard: Path, kind: str, members: Members, found: str) -> None:
    with pytest.raises(DownloadError, match=f"expected files in a folder text/, found {found}"):
        unpack_here(make(yard, kind, members))


@pytest.mark.parametrize("name", ["text.zip", "text.tar.gz"])
@pytest.mark.parametrize("content", [b"", b"<html>not found</html>", os.urandom(2000), gzip.compress(b"x" * 700)])
def test_what_is_no_archive_is_one_line(yard: Path, name: str, content: bytes) -> None:
    (yard / name).write_bytes(content)
    with pytest.raises(DownloadError):
        unpack_here(yard / name)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_broken_compressed_stream_is_one_line(yard: Path, method: int) -> None:
    with zipfile.ZipFile(yard / "text.zip", "w", method) as archive:
        archive.writestr("text/a", os.urandom(3000).hex())
    data = bytearray((yard / "text.zip").read_bytes())
    data[60:2000] = b"\xff" * 1940
    (yard / "text.zip").write_bytes(data)
    with pytest.raises(DownloadError, match="broken archive"):
        unpack_here(yard / "text.zip")


def test_a_compression_that_nobody_knows_is_one_line(yard: Path) -> None:
    data = bytearray(make_zip(yard / "text.zip", [("text/a", b"a")]).read_bytes())
    data[8] = data[data.index(b"PK\x01\x02") + 10] = 77
    (yard / "text.zip").write_bytes(data)
    with pytest.raises(DownloadError, match="compression method is not supported"):
        unpack_here(yard / "text.zip")


def test_a_name_that_is_not_the_utf_8_it_claims_is_one_line(yard: Path) -> None:
    path = make_zip(yard / "text.zip", [("text/é", b"a")])
    path.write_bytes(path.read_bytes().replace("é".encode(), b"\xff\xfe"))
    with pytest.raises(DownloadError, match="broken archive"):
        unpack_here(path)


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_every_truncation_is_noticed(tmp_path: Path, kind: str) -> None:
    """A tar may end anywhere between two members and look whole; the checksum of gzip says that it is not."""
    archive = make(tmp_path, kind, [(f"text/{number}", os.urandom(400)) for number in range(3)])
    whole = archive.read_bytes()
    for length in {*range(0, len(whole), 37), len(whole) - 1}:
        archive.write_bytes(whole[:length])
        into = tmp_path / f"{length}" / "into"
        into.mkdir(parents=True)
        with pytest.raises(DownloadError):
            unpack(archive, into, folder="text", progress=lambda _: None)


@given(data=st.data(), kind=st.sampled_from(["zip", "tar"]))
@settings(max_examples=150, deadline=None)
def test_a_damaged_archive_never_ends_in_anything_but_an_error_or_files_inside(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, kind: str
) -> None:
    yard = tmp_path_factory.mktemp("damage") / "yard"
    (yard / "into").mkdir(parents=True)
    archive = make(yard, kind, GOOD)
    content = bytearray(archive.read_bytes() if kind == "zip" else gzip.decompress(archive.read_bytes()))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, min(len(content), 2000) - 1))] = data.draw(st.integers(0, 255))
    archive.write_bytes(content if kind == "zip" else gzip.compress(content))
    with suppress(LmtoolsError):
        unpack_here(archive)
    assert all_files(yard.parent) == sorted(
        [f"yard/{archive.name}"] + [f"yard/into/{name}" for name in all_files(yard / "into")]
    )
