"""Files are read whatever their compression, and written whole or not at all."""

from __future__ import annotations

import bz2
import errno
import gzip
import hashlib
import lzma
import os
import resource
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmtools.errors import DataError, LmtoolsError
from lmtools.files import (
    NOTES_VARIABLE,
    atomic_directory,
    atomic_write,
    atomic_write_text,
    disk_errors,
    is_device_or_pipe,
    made_folder,
    open_binary,
    remove_noted_temporaries,
    require_free_space,
    sha256_file,
)

CONTENT = b"one\ntwo\n" * 1000
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}

not_as_root = pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_compressed_file_reads_as_its_content(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"text{suffix}"
    path.write_bytes(COMPRESS[suffix](CONTENT))
    with open_binary(path) as stream:
        assert stream.readline() == b"one\n"
        assert stream.read() == CONTENT[4:]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_file_of_several_compressed_streams_reads_as_all_of_them(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"text{suffix}"
    path.write_bytes(COMPRESS[suffix](CONTENT) + COMPRESS[suffix](CONTENT))
    with open_binary(path) as stream:
        assert stream.read() == CONTENT * 2


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("damage", ["cut short", "not compressed", "changed", "second changed", "second cut short"])
def test_a_broken_stream_is_named(tmp_path: Path, suffix: str, damage: str) -> None:
    path = tmp_path / f"text{suffix}"
    compressed = bytearray(COMPRESS[suffix](os.urandom(1 << 16)))
    if damage == "cut short":
        del compressed[-100:]
    elif damage == "changed":
        compressed[0] ^= 0xFF
    elif damage == "second changed":  # of many streams in one file, all that follow are at stake
        compressed += bytes([compressed[0] ^ 0xFF]) + compressed[1:] + compressed
    elif damage == "second cut short":
        compressed += compressed[:100]
    path.write_bytes(CONTENT if damage == "not compressed" else compressed)
    with (
        pytest.raises(DataError, match=rf"^{path}: broken compressed stream \(.+\); fetch or compress the file again$"),
        open_binary(path) as stream,
    ):
        stream.read()


@pytest.mark.parametrize("suffix", COMPRESS)
def test_zero_bytes_between_and_after_streams_are_padding(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"text{suffix}"
    path.write_bytes((COMPRESS[suffix](CONTENT) + bytes(4096)) * 2)
    with open_binary(path) as stream:
        assert stream.read() == CONTENT * 2


def test_a_zstandard_file_that_compresses_well_is_read_in_little_memory(tmp_path: Path) -> None:
    path, content = tmp_path / "text.zst", b"ten bytes\n" * 6_400_000
    path.write_bytes(zstandard.compress(content))
    tracemalloc.start()
    with open_binary(path) as stream:
        assert sum(iter(lambda: len(stream.read(1 << 20)), 0)) == len(content)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < len(content) / 2


@pytest.mark.parametrize("suffix", ["", *COMPRESS])
def test_a_missing_file_and_a_folder_are_named(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(DataError, match=r"nothing.*: no such file$"), open_binary(tmp_path / f"nothing{suffix}"):
        pass
    (tmp_path / f"folder{suffix}").mkdir()
    with pytest.raises(DataError, match=r"is a folder, expected a file$"), open_binary(tmp_path / f"folder{suffix}"):
        pass


@pytest.mark.parametrize("suffix", ["", *COMPRESS])
def test_a_name_that_leads_nowhere_is_named(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"loop{suffix}").symlink_to(f"loop{suffix}")
    (tmp_path / "file").touch()
    for name, why in (("x" * 300, "name too long"), ("loop", "Too many levels"), ("file/x", "Not a directory")):
        expected = pytest.raises(DataError, match=rf"{name}{suffix}: cannot be opened \(.*{why}.*\)$")
        with expected, open_binary(tmp_path / f"{name}{suffix}"):
            pass


@not_as_root
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "secret").touch(mode=0o200)
    expected = pytest.raises(DataError, match=r"secret: may not be read \(permission denied\)$")
    with expected, open_binary(tmp_path / "secret"):
        pass


@pytest.mark.parametrize("suffix", ["", *COMPRESS])
@pytest.mark.parametrize("error", [FileNotFoundError(2, "other"), EOFError(), OSError("other"), ValueError()])
def test_errors_of_what_is_done_with_a_file_are_not_blamed_on_it(tmp_path: Path, suffix: str, error: Exception) -> None:
    path = tmp_path / f"text{suffix}"
    path.write_bytes(COMPRESS[suffix](CONTENT) if suffix else CONTENT)
    with pytest.raises(type(error)) as caught, open_binary(path):
        raise error
    assert caught.value is error


def run(program: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", f"from lmtools.files import *; import sys\n{program}"]
    return subprocess.run(command, capture_output=True, check=False, **options)  # type: ignore[call-overload, no-any-return]


def test_a_dash_is_standard_input_and_output() -> None:
    program = 'with open_binary("-") as a, atomic_write("-") as b: b.write(a.read().upper())'
    done = run(program, input=b"one\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"ONE\n", b"")


def test_standard_input_that_is_closed_is_an_error() -> None:
    done = run('with open_binary("-"): pass', preexec_fn=lambda: os.close(0))
    assert b"DataError: standard input is closed; name a file" in done.stderr


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=100), st.lists(st.integers(1, 40)))
def test_a_zstandard_file_can_be_read_in_any_steps(tmp_path: Path, content: bytes, steps: list[int]) -> None:
    path = tmp_path / "text.zst"
    path.write_bytes(zstandard.compress(content))
    with open_binary(path) as stream:
        assert b"".join([stream.read(step) for step in steps] + [stream.read()]) == content


# --- writing ---------------------------------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_there_when_the_block_ends_and_not_before(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "file") as stream:
        stream.write(b"new")
        assert not (tmp_path / "file").exists()
    assert (tmp_path / "file").read_bytes() == b"new"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    def write() -> None:
        with atomic_write(tmp_path / "file") as stream:
            stream.write(b"new")
            raise error

    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(error):
        write()
    assert (tmp_path / "file").read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_a_killed_process_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    program = 'with atomic_write("file") as stream: stream.write(b"new"); stream.flush(); os.kill(os.getpid(), 9)'
    assert run(program, cwd=tmp_path).returncode == -9
    assert (tmp_path / "file").read_bytes() == b"old"


def test_the_content_is_on_the_disk_before_it_takes_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[tuple[int, bool]] = []

    def fsync(descriptor: int) -> None:
        flushed.append((os.fstat(descriptor).st_size, (tmp_path / "file").exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    atomic_write_text(tmp_path / "file", "x" * 1000)
    assert flushed[0] == (1000, False)
    assert flushed[1][1]  # then the folder, with the new name in it


def test_two_writers_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    def write(byte: bytes) -> None:
        for _ in range(20):
            with atomic_write(tmp_path / "file") as stream:
                stream.write(byte * 10_000)

    threads = [threading.Thread(target=write, args=(byte,)) for byte in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "file").read_bytes() in (b"a" * 10_000, b"b" * 10_000)
    assert names(tmp_path) == ["file"]


def test_a_file_gets_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    with atomic_write(tmp_path / "file"):
        pass
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_text_is_written_as_utf8(tmp_path: Path) -> None:
    atomic_write_text(tmp_path / "file", "é\n")
    assert (tmp_path / "file").read_bytes() == b"\xc3\xa9\n"


def test_a_link_stays_and_the_file_behind_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/file")
    atomic_write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder" / "file").read_text() == "new"
    assert names(tmp_path / "folder") == ["file"]


def test_a_device_is_written_and_stays(tmp_path: Path) -> None:
    atomic_write_text("/dev/null", "text")
    assert is_device_or_pipe("/dev/null")
    assert names(Path("/dev/null").parent).count("null") == 1


@pytest.mark.parametrize("name", ["/dev/fd/{}", "/proc/self/fd/{}", "/proc/thread-self/fd/{}", "link"])
def test_a_file_that_is_open_is_written_on(tmp_path: Path, name: str) -> None:
    """As `/dev/stdout` with `>> log`, which is a link to `/proc/self/fd/1`."""
    log = tmp_path / "log"
    log.write_bytes(b"before\n")
    with open(log, "ab") as stream:
        link = tmp_path / "link"
        link.symlink_to(f"/proc/self/fd/{stream.fileno()}")
        path = str(link) if name == "link" else name.format(stream.fileno())
        assert is_device_or_pipe(path)
        atomic_write_text(path, "text\n")
        atomic_write_text(path, "more\n")
    assert log.read_bytes() == b"before\ntext\nmore\n"
    assert sorted(tmp_path.iterdir()) == [link, log]
    assert not is_device_or_pipe(log)


def test_a_number_elsewhere_is_no_descriptor_and_neither_is_one_that_is_closed(tmp_path: Path) -> None:
    atomic_write_text(tmp_path / "1", "text")
    assert not is_device_or_pipe(tmp_path / "1")
    assert (tmp_path / "1").read_text() == "text"
    assert not is_device_or_pipe("/dev/fd/1000000")


def test_a_pipe_is_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[bytes] = []
    thread = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
    thread.start()
    atomic_write_text(tmp_path / "pipe", "text")
    thread.join()
    assert read == [b"text"]
    assert is_device_or_pipe(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere/file", "nowhere/file: the folder .*nowhere does not exist$"),
        ("file/file", r"/file: is a file, expected a folder$"),
        ("folder", "folder: is a folder, expected a file name$"),
        ("x" * 300, "x: the name is too long for the file system$"),
    ],
)
def test_a_target_that_cannot_be_is_named_before_the_work(tmp_path: Path, target: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(LmtoolsError, match=message), atomic_write(tmp_path / target):
        pytest.fail("the block was begun")


def test_a_name_as_long_as_the_file_system_takes(tmp_path: Path) -> None:
    atomic_write_text(tmp_path / ("ü" * 127), "text")
    assert names(tmp_path) == ["ü" * 127]


@not_as_root
def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(LmtoolsError, match=r"file: may not be written \(permission denied\)$"):
        atomic_write_text(tmp_path / "file", "text")


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_too_large_is_one_clear_error(tmp_path: Path) -> None:
    expected = pytest.raises(LmtoolsError, match=r"file: larger than this file system or process may write$")
    with expected, largest_file(1000):
        atomic_write_text(tmp_path / "file", "x" * 2000)
    assert names(tmp_path) == []


def test_a_full_disk_is_one_clear_error() -> None:
    with pytest.raises(LmtoolsError, match=r"^/dev/full: no space left on the disk; free some space and run again$"):
        atomic_write_text("/dev/full", "text")


def test_full_standard_output_is_one_clear_error() -> None:
    with open("/dev/full", "wb") as full:
        program = 'with atomic_write("-") as stream: stream.write(b"x" * 100_000)'
        done = subprocess.run(
            [sys.executable, "-c", f"from lmtools.files import *\n{program}"],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert b"LmtoolsError: standard output: no space left on the disk" in done.stderr


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_no_space_and_no_quota_are_one_error(code: int) -> None:
    with pytest.raises(LmtoolsError, match=r"^file: no space left on the disk"), disk_errors("file"):
        raise OSError(code, os.strerror(code))


def test_other_errors_pass_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), disk_errors(tmp_path / "file"):
        (tmp_path / "other").read_bytes()


def test_what_a_killed_process_was_writing_is_removed_by_its_notes(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "done").mkdir()
    program = (
        f"os.environ['{NOTES_VARIABLE}'] = 'notes'\n"
        "with atomic_directory('done/whole') as folder: (folder / 'file').touch()\n"
        "with atomic_directory('folder') as folder, atomic_write(folder / 'file'), atomic_write('file'):\n"
        "    os.kill(os.getpid(), 9)"
    )
    assert run(program, cwd=tmp_path).returncode == -9
    assert len(names(tmp_path)) == 4
    assert len(names(tmp_path / "notes")) == 3
    remove_noted_temporaries(tmp_path / "notes")
    assert names(tmp_path) == ["done", "notes"]
    assert names(tmp_path / "done" / "whole") == ["file"]
    assert names(tmp_path / "notes") == []


# --- folders ---------------------------------------------------------------------------------------------------------


def test_a_folder_is_there_when_the_block_ends_and_not_before(tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder"
    with atomic_directory(target) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_bytes(b"text")
        assert not target.exists()
    assert (target / "sub" / "file").read_bytes() == b"text"
    assert names(tmp_path / "new") == ["folder"]
    (tmp_path / "plain").mkdir()
    assert target.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with atomic_directory(tmp_path / "folder") as folder:
        (folder / "file").touch()
    assert names(tmp_path / "folder") == ["file"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_no_folder(tmp_path: Path, error: type[BaseException]) -> None:
    def fill() -> None:
        with atomic_directory(tmp_path / "new" / "folder") as folder:
            (folder / "file").touch()
            raise error

    with pytest.raises(error):
        fill()
    assert names(tmp_path) == []


def fill_and_fail(folder: Path, *files: str) -> None:
    with made_folder(folder):
        for file in files:
            (folder / file).touch()
        raise KeyboardInterrupt


def test_a_folder_that_was_made_stays_where_nothing_fails(tmp_path: Path) -> None:
    for _ in range(2):
        with made_folder(tmp_path / "new" / "folder"):
            pass
    assert names(tmp_path / "new") == ["folder"]


def test_an_error_leaves_no_folder_that_was_made_in_vain(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    for folder in (tmp_path / "new" / "folder", tmp_path / "old" / "new", tmp_path / "old"):
        with pytest.raises(KeyboardInterrupt):
            fill_and_fail(folder)
    assert names(tmp_path) == ["old"], "what was there before stays"
    assert names(tmp_path / "old") == []


def test_an_error_leaves_what_was_written(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fill_and_fail(tmp_path / "new" / "folder", "file")
    assert names(tmp_path / "new" / "folder") == ["file"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LmtoolsError, match="file: is a file, expected a folder"):
        fill_and_fail(tmp_path / "file" / "folder")
    with pytest.raises(LmtoolsError, match="the name is too long"):
        fill_and_fail(tmp_path / "new" / ("x" * 300))
    assert names(tmp_path) == ["file"]


def test_a_folder_with_content_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    (tmp_path / "file").touch()
    for name in ("folder", "file"):
        with pytest.raises(LmtoolsError, match=f"{name}: exists already"), atomic_directory(tmp_path / name):
            pytest.fail("the block was begun")


def test_the_folder_that_a_link_points_to_is_filled(tmp_path: Path) -> None:
    for name in ("there", "new"):
        (tmp_path / f"link to {name}").symlink_to(name)
    (tmp_path / "there").mkdir()
    for name in ("there", "new"):
        with atomic_directory(tmp_path / f"link to {name}") as folder:
            (folder / "file").touch()
        assert (tmp_path / f"link to {name}").readlink() == Path(name)
        assert names(tmp_path / name) == ["file"]
    assert names(tmp_path) == ["link to new", "link to there", "new", "there"]


@pytest.mark.parametrize("name", [".", "../here", "link"])
def test_the_current_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Who is in it would be in a folder that is no more."""
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to("here")
    monkeypatch.chdir(tmp_path / "here")
    path = tmp_path / "link" if name == "link" else Path(name)
    with pytest.raises(LmtoolsError, match="is the current folder, in whose place"), atomic_directory(path):
        pytest.fail("the block was begun")
    assert names(tmp_path) == ["here", "link"]


def test_a_mount_point_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the block: a rename onto it would fail after all the work."""
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path)
    with pytest.raises(LmtoolsError, match="is a mount point, in whose place"), atomic_directory(tmp_path):
        pytest.fail("the block was begun")


def test_a_folder_that_another_process_has_written_meanwhile_stays(tmp_path: Path) -> None:
    def fill() -> None:
        with atomic_directory(tmp_path / "folder"):
            (tmp_path / "folder").mkdir()
            (tmp_path / "folder" / "theirs").touch()

    with pytest.raises(LmtoolsError, match=r"folder: exists already, written by another process in the meantime$"):
        fill()
    assert names(tmp_path) == ["folder"]
    assert names(tmp_path / "folder") == ["theirs"]


# --- hashes and space ------------------------------------------------------------------------------------------------


def test_sha256_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT * 300)
    assert sha256_file(tmp_path / "file") == hashlib.sha256(CONTENT * 300).hexdigest()


def test_too_little_space_is_said_in_numbers(tmp_path: Path) -> None:
    require_free_space(tmp_path, 1, "test.bin")
    with pytest.raises(LmtoolsError, match=r"^test\.bin: needs 1(,000){6} bytes in .*, which has [\d,]+ free;"):
        require_free_space(tmp_path, 10**18, "test.bin")
